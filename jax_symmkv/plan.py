"""Batch → plan: which rank computes which page, and where it lies in the dense buffer. Pure NumPy.

Everything here is computed from batch-logical numbers, which are the same on every rank, so that
every rank gets the same plan, or the same error.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jax.tree_util import register_dataclass

from jax_symmkv.batch import (
    check_range,
    read_batch,
    read_count,
    read_dense_page,
    read_ints,
    read_prefix_array,
)
from jax_symmkv.errors import PlanError
from jax_symmkv.split import ragged, rank_token_bound, split, starts, tokens_in_page

if TYPE_CHECKING:
    import jax

Int32Array = npt.NDArray[np.int32]


@functools.partial(
    register_dataclass,
    data_fields=[
        "current_page",
        "current_writer",
        "prefix_page",
        "prefix_owner",
        "prefix_pool_page",
        "num_current",
        "num_prefix",
        "fingerprint",
    ],
    meta_fields=["page_size", "cp_size", "num_dense_pages"],
)
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ComposePlan:
    """One batch, from `build_plan`: a pytree whose shapes don't depend on the batch.

    C is `max_current_pages` and P is `max_prefix_pages`. Arrays are int32 and padded with -1; they
    are NumPy arrays, read-only, until a program takes them.

    Attributes:
      current_page: [C] page of the dense buffer, by slot.
      current_writer: [C] rank that computes the page, by slot.
      prefix_page: [P] page of the dense buffer, in logical order.
      prefix_owner: [P] rank whose pool holds the page.
      prefix_pool_page: [P] page of the owner's pool.
      num_current: [1] slots in use.
      num_prefix: [1] prefix pages in use.
      fingerprint: uint32[1], of all the other fields; ranks compare it.
      page_size: tokens of a page; static, as are the next two.
      cp_size: ranks of the group.
      num_dense_pages: pages of the dense buffer.
    """

    current_page: np.ndarray | jax.Array
    current_writer: np.ndarray | jax.Array
    prefix_page: np.ndarray | jax.Array
    prefix_owner: np.ndarray | jax.Array
    prefix_pool_page: np.ndarray | jax.Array
    num_current: np.ndarray | jax.Array
    num_prefix: np.ndarray | jax.Array
    fingerprint: np.ndarray | jax.Array
    page_size: int
    cp_size: int
    num_dense_pages: int


def build_plan(
    prefix_lens: npt.ArrayLike,
    extend_lens: npt.ArrayLike,
    *,
    page_size: int,
    cp_size: int,
    max_current_pages: int,
    max_prefix_pages: int = 0,
    num_dense_pages: int,
    dense_page: npt.ArrayLike | None = None,
    prefix_owner: npt.ArrayLike | None = None,
    prefix_pool_page: npt.ArrayLike | None = None,
) -> ComposePlan:
    """Plans one batch; call it once per batch, on every rank with the same arguments.

    Args:
      prefix_lens: int[B] cached tokens of each request, multiples of `page_size`.
      extend_lens: int[B] tokens that this batch computes for each request.
      page_size: tokens of a page.
      cp_size: ranks of the group.
      max_current_pages: slots that the heap has, `heap.max_current_pages`.
      max_prefix_pages: room for prefix pages, which are planned but not yet exchanged; with 0 a prefix
        only shifts the layout, and the engine fills those pages itself.
      num_dense_pages: pages of the dense buffer.
      dense_page: int[logical pages] page of the dense buffer for each logical page (request after
        request, its prefix pages, then its current pages); the identity if absent.
      prefix_owner: int[prefix pages] rank whose pool holds each prefix page, in logical order.
      prefix_pool_page: int[prefix pages] the page of that pool.

    Raises:
      PlanError: the batch is malformed or doesn't fit; on every rank or on none.
      TypeError: an argument that is not of integers.
    """
    op = "build_plan"
    page_size = read_count(op, "page_size", page_size, at_least=1)
    cp_size = read_count(op, "cp_size", cp_size, at_least=1)
    max_current_pages = read_count(op, "max_current_pages", max_current_pages, at_least=1)
    max_prefix_pages = read_count(op, "max_prefix_pages", max_prefix_pages, at_least=0)
    num_dense_pages = read_count(op, "num_dense_pages", num_dense_pages, at_least=1)

    batch = read_batch(op, prefix_lens, extend_lens, page_size)
    num_current = int(batch.current_pages.sum())
    if num_current > max_current_pages:
        raise PlanError(
            f"{op}: the batch has {num_current} current pages and max_current_pages is "
            f"{max_current_pages}; split the batch, or create the heap with "
            "current_page_cap(max_extend_tokens, max_requests, page_size)"
        )
    if batch.num_pages > num_dense_pages:
        raise PlanError(
            f"{op}: the batch has {batch.num_pages} pages, prefixes included, and num_dense_pages "
            f"is {num_dense_pages}; split the batch, or make the dense buffer larger"
        )
    to_dense = read_dense_page(op, dense_page, batch.num_pages, num_dense_pages)

    logical_prefix = batch.logical_prefix_pages
    room = (logical_prefix.size, max_prefix_pages)
    if 0 < max_prefix_pages < logical_prefix.size:
        raise PlanError(
            f"{op}: the batch has {logical_prefix.size} prefix pages and max_prefix_pages is "
            f"{max_prefix_pages}; split the batch, or create the heap with more max_prefix_pages"
        )
    owner = read_prefix_array(op, "prefix_owner", prefix_owner, *room)
    check_range(op, "prefix_owner", owner, 0, cp_size, "pass ranks of the group, cp_size in all")
    pool_page = read_prefix_array(op, "prefix_pool_page", prefix_pool_page, *room)
    check_range(op, "prefix_pool_page", pool_page, 0, None, "pass pages of the owner's pool")

    request, page, writer = split(batch.current_pages, cp_size)
    current = to_dense[batch.first_current_page[request] + page]
    prefix = to_dense[logical_prefix[: owner.size]]
    arrays = {
        "current_page": _padded(current, max_current_pages),
        "current_writer": _padded(writer, max_current_pages),
        "prefix_page": _padded(prefix, max_prefix_pages),
        "prefix_owner": _padded(owner, max_prefix_pages),
        "prefix_pool_page": _padded(pool_page, max_prefix_pages),
        "num_current": _padded(np.array([num_current]), 1),
        "num_prefix": _padded(np.array([owner.size]), 1),
    }
    fingerprint = _seal(
        (page_size, cp_size, num_dense_pages, max_current_pages, max_prefix_pages), arrays
    )
    return ComposePlan(
        **arrays,
        fingerprint=fingerprint,
        page_size=page_size,
        cp_size=cp_size,
        num_dense_pages=num_dense_pages,
    )


def local_tokens(
    prefix_lens: npt.ArrayLike,
    extend_lens: npt.ArrayLike,
    *,
    page_size: int,
    cp_size: int,
    rank: int,
    pad_to: int | None = None,
) -> Int32Array:
    """The tokens that a rank computes.

    Args:
      prefix_lens, extend_lens, page_size, cp_size: as in `build_plan`.
      rank: the rank, below `cp_size`.
      pad_to: length of the result, for example `local_token_cap(...)`; what is left is -1.

    Returns:
      int32[n], or int32[pad_to]: positions in the concatenated extend tokens of the batch,
        ascending.

    Raises:
      PlanError: the batch is malformed, or some rank, not necessarily this one, has more than
        `pad_to` tokens.
      TypeError: an argument that is not of integers.
    """
    op = "local_tokens"
    page_size = read_count(op, "page_size", page_size, at_least=1)
    cp_size = read_count(op, "cp_size", cp_size, at_least=1)
    rank = read_count(op, "rank", rank, at_least=0)
    if rank >= cp_size:
        raise PlanError(
            f"{op}: rank must be below cp_size {cp_size}, got {rank}; "
            "pass the index along the context-parallel axis"
        )
    batch = read_batch(op, prefix_lens, extend_lens, page_size)
    request, page, writer = split(batch.current_pages, cp_size)
    in_page = tokens_in_page(batch.extend_lens[request], page, page_size)
    if pad_to is not None:
        pad_to = read_count(op, "pad_to", pad_to, at_least=0)
        # Of every rank, so that all of them raise or none.
        num_tokens = np.bincount(writer, weights=in_page, minlength=cp_size).astype(np.int64)
        if num_tokens.max() > pad_to:
            raise PlanError(
                f"{op}: rank {num_tokens.argmax()} has {num_tokens.max()} tokens of this batch and "
                f"pad_to is {pad_to}; pass local_token_cap(max_extend_tokens, max_requests, ...)"
            )
    first_token = starts(batch.extend_lens)[request] + page * page_size
    mine = writer == rank
    which, offset = ragged(in_page[mine])
    tokens = first_token[mine][which] + offset
    return _padded(tokens, tokens.size if pad_to is None else pad_to)


def dense_positions(
    prefix_lens: npt.ArrayLike,
    extend_lens: npt.ArrayLike,
    tokens: npt.ArrayLike,
    *,
    page_size: int,
    dense_page: npt.ArrayLike | None = None,
) -> tuple[Int32Array, Int32Array]:
    """Where each token lies in the dense buffer.

    Args:
      prefix_lens, extend_lens, page_size, dense_page: as in `build_plan`.
      tokens: int[n] positions in the concatenated extend tokens, or -1; as from `local_tokens`.

    Returns:
      page_id: int32[n] page of the dense buffer, -1 where the token is -1.
      row: int32[n] row in that page, -1 where the token is -1. JAX wraps -1 around, even under
        `mode="drop"`: scatter to `jnp.where(page_id < 0, num_dense_pages, page_id)` with `mode="drop"`.

    Raises:
      PlanError: the batch is malformed, or a token is not in it.
      TypeError: an argument that is not of integers.
    """
    op = "dense_positions"
    page_size = read_count(op, "page_size", page_size, at_least=1)
    batch = read_batch(op, prefix_lens, extend_lens, page_size)
    token = read_ints(op, "tokens", tokens)
    end = int(batch.extend_lens.sum())
    check_range(op, "tokens", token, -1, end, "pass what local_tokens returns for this batch")
    to_dense = read_dense_page(op, dense_page, batch.num_pages, None)

    page_id, row = np.full((2, token.size), -1, np.int32)
    real = token >= 0
    token = token[real]
    request = np.searchsorted(np.cumsum(batch.extend_lens), token, side="right")
    page, row[real] = np.divmod(token - starts(batch.extend_lens)[request], page_size)
    page_id[real] = to_dense[batch.first_current_page[request] + page]
    return page_id, row


def current_page_cap(max_extend_tokens: int, max_requests: int, page_size: int) -> int:
    """Slots that are enough for every batch of so many extend tokens and requests.

    Each request has at most one page that is not full.
    """
    op = "current_page_cap"
    max_extend_tokens = read_count(op, "max_extend_tokens", max_extend_tokens, at_least=1)
    max_requests = read_count(op, "max_requests", max_requests, at_least=1)
    return max_extend_tokens // read_count(op, "page_size", page_size, at_least=1) + max_requests


def local_token_cap(
    max_extend_tokens: int, max_requests: int, *, page_size: int, cp_size: int
) -> int:
    """Length that is enough for every rank's `local_tokens`: what to pass as `pad_to`.

    An upper bound over all batches of at most `max_extend_tokens` tokens in at most `max_requests`
    requests, empty ones included. Never above `max_extend_tokens`; about a `cp_size`-th of it when
    that is large for so many requests.
    """
    op = "local_token_cap"
    return rank_token_bound(
        read_count(op, "max_extend_tokens", max_extend_tokens, at_least=1),
        read_count(op, "max_requests", max_requests, at_least=1),
        page_size=read_count(op, "page_size", page_size, at_least=1),
        cp_size=read_count(op, "cp_size", cp_size, at_least=1),
    )


def interleaved(page_ids: npt.ArrayLike, cp_size: int) -> tuple[Int32Array, Int32Array]:
    """Owner and pool page of each page id, int32[n], in pools that the pages are dealt to in turn.

    For `build_plan`'s `prefix_owner` and `prefix_pool_page`.

    Raises:
      PlanError: a negative page id.
      TypeError: page ids that are not integers.
    """
    op = "interleaved"
    cp_size = read_count(op, "cp_size", cp_size, at_least=1)
    ids = read_ints(op, "page_ids", page_ids)
    check_range(op, "page_ids", ids, 0, None, "pass the ids of pages in use, without padding")
    return (ids % cp_size).astype(np.int32), (ids // cp_size).astype(np.int32)


def _padded(values: npt.NDArray[Any], capacity: int) -> Int32Array:
    out = np.full(capacity, -1, np.int32)
    out[: values.size] = values
    return out


def _seal(statics: tuple[int, ...], arrays: dict[str, Int32Array]) -> npt.NDArray[np.uint32]:
    """The fingerprint; the arrays become read-only, since it must stay theirs."""
    crc = zlib.crc32(np.array(statics, np.int64).tobytes())
    for array in arrays.values():
        crc = zlib.crc32(array.tobytes(), crc)
        array.flags.writeable = False
    return np.array([crc], np.uint32)

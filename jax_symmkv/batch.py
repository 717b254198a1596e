"""The arguments that describe a batch: read into NumPy, and refused where they are wrong.

Every error is computed from batch-logical numbers, which are the same on every rank: it is raised
on every rank or on none, before anything is launched. `op` is the function that was called.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jax_symmkv.errors import PlanError
from jax_symmkv.split import IntArray, ragged, starts

INT32_MAX = 2**31 - 1


class Batch(NamedTuple):
    """The lengths of a batch, int64[B] each."""

    extend_lens: IntArray
    prefix_pages: IntArray
    current_pages: IntArray

    # Logical pages: request after request, its prefix pages, then its current pages.

    @property
    def num_pages(self) -> int:
        return int(self.prefix_pages.sum() + self.current_pages.sum())

    @property
    def first_current_page(self) -> IntArray:
        """int64[B] logical page at which the current pages of each request begin."""
        return starts(self.prefix_pages + self.current_pages) + self.prefix_pages

    @property
    def logical_prefix_pages(self) -> IntArray:
        """int64[prefix pages] the logical page of each."""
        request, page = ragged(self.prefix_pages)
        return starts(self.prefix_pages + self.current_pages)[request] + page


def read_batch(
    op: str, prefix_lens: npt.ArrayLike, extend_lens: npt.ArrayLike, page_size: int
) -> Batch:
    prefix = read_ints(op, "prefix_lens", prefix_lens)
    extend = read_ints(op, "extend_lens", extend_lens)
    if prefix.size != extend.size:
        raise PlanError(
            f"{op}: prefix_lens and extend_lens must have one entry per request, got {prefix.size} "
            f"and {extend.size}; pass 0 for a request without prefix"
        )
    check_range(op, "prefix_lens", prefix, 0, None, "pass 0 for a request without prefix")
    check_range(op, "extend_lens", extend, 0, None, "pass 0 for a request without new tokens")
    unaligned = np.flatnonzero(prefix % page_size)
    if unaligned.size:
        b = unaligned[0]
        raise PlanError(
            f"{op}: prefix_lens must be multiples of page_size {page_size}, got {prefix[b]} for "
            f"request {b}; reuse whole pages only, and compute the rest as extend tokens"
        )
    total = int(prefix.sum() + extend.sum())
    if total > INT32_MAX:
        raise PlanError(
            f"{op}: a batch must have at most {INT32_MAX} tokens, prefixes included, got {total}; "
            "split the batch"
        )
    return Batch(extend, prefix // page_size, -(-extend // page_size))


def read_dense_page(
    op: str, dense_page: npt.ArrayLike | None, num_pages: int, num_dense_pages: int | None
) -> IntArray:
    """int64[num_pages]: the page of the dense buffer for each logical page."""
    if dense_page is None:
        return np.arange(num_pages)
    to_dense = read_ints(op, "dense_page", dense_page)
    if to_dense.size != num_pages:
        raise PlanError(
            f"{op}: dense_page must have one entry for each of the batch's {num_pages} pages, "
            f"prefixes included, got {to_dense.size}; leave padding out"
        )
    remedy = "pass pages of the dense buffer, num_dense_pages in all"
    check_range(op, "dense_page", to_dense, 0, num_dense_pages, remedy)
    ordered = np.sort(to_dense)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PlanError(
            f"{op}: dense_page must not name a page twice, got {twice[0]} at "
            f"{np.flatnonzero(to_dense == twice[0]).tolist()}; give every logical page its own"
        )
    return to_dense


def read_prefix_array(
    op: str, name: str, value: npt.ArrayLike | None, num_prefix: int, max_prefix_pages: int
) -> IntArray:
    """int64[num_prefix], in logical order; empty if there is no room for prefix pages by intent."""
    if value is None and max_prefix_pages and num_prefix:
        raise PlanError(
            f"{op}: {name} is required, as max_prefix_pages is {max_prefix_pages} and the batch "
            f"has {num_prefix} prefix pages, got None; pass one entry per prefix page, as from "
            "interleaved(page_ids, cp_size), or max_prefix_pages=0 to fill those pages yourself"
        )
    array = read_ints(op, name, () if value is None else value)
    if array.size and not max_prefix_pages:
        raise PlanError(
            f"{op}: {name} needs max_prefix_pages above 0, got {array.size} entries and "
            f"max_prefix_pages 0; pass the heap's max_prefix_pages, or leave {name} out"
        )
    if max_prefix_pages and array.size != num_prefix:
        raise PlanError(
            f"{op}: {name} must have one entry for each of the batch's {num_prefix} prefix pages, "
            f"got {array.size}; leave padding and current pages out"
        )
    return array


# --- any argument --------------------------------------------------------------------------------


def read_count(op: str, name: str, value: int, *, at_least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}; convert it") from None
    if not at_least <= count <= INT32_MAX:
        raise PlanError(
            f"{op}: {name} must be at least {at_least} and fit int32, got {count}; correct {name}"
        )
    return count


def read_ints(op: str, name: str, value: npt.ArrayLike) -> IntArray:
    """int64[n], of values that fit int32."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        raise TypeError(f"{op}: {name} must be 1-D, got {value!r}; pass a flat sequence") from None
    if array.ndim != 1:
        raise TypeError(f"{op}: {name} must be 1-D, got shape {array.shape}; pass a flat sequence")
    if array.size == 0:  # an empty list is float64 to NumPy
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{op}: {name} must be integers, got {array.dtype} ({array[0]!r}, …); convert them"
        )
    check_range(op, name, array, -INT32_MAX, None, "plans are int32")
    return array.astype(np.int64)


def check_range(
    op: str, name: str, array: npt.NDArray[Any], start: int, stop: int | None, remedy: str
) -> None:
    """Every value must be in [start, stop); up to the largest int32 without a stop."""
    wrong = np.flatnonzero((array < start) | (array >= (INT32_MAX + 1 if stop is None else stop)))
    if wrong.size:
        i = wrong[0]
        limit = f"at least {start} and " + ("fit int32" if stop is None else f"below {stop}")
        raise PlanError(f"{op}: {name} must be {limit}, got {array[i]} at {i}; {remedy}")

"""The arrays that describe one batch to the ranks' programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from jax_symmkv.cli.demo.attention import (
    QUERY_BLOCK_TOKENS,
    KeyIndex,
    QueryIndex,
    key_block_pages,
)
from jax_symmkv.cli.demo.geometry import Geometry
from jax_symmkv.cli.demo.model import IntArray
from jax_symmkv.cli.demo.trace import Batch

Int32 = npt.NDArray[np.int32]


class RankInputs(NamedTuple):
    """What differs between the ranks, int32, padded; sharded over the cp axis on the leading axis."""

    token_id: IntArray  # [local tokens]
    page_id: IntArray  # [local tokens], page of the dense buffer; num_dense_pages for padding
    row: IntArray  # [local tokens], row in that page
    queries: QueryIndex
    last_token: IntArray  # [max requests], index among the local tokens, or -1: on another rank


class BatchInputs(NamedTuple):
    """All inputs of one batch."""

    ranks: RankInputs
    keys: KeyIndex
    plan: symmkv.ComposePlan


def make_inputs(
    batch: Batch, prompts: Sequence[Int32], geometry: Geometry, mesh: Mesh, max_current_pages: int
) -> BatchInputs:
    """Builds a batch's arrays; every process of the mesh must call it with the same arguments.

    Args:
      prompts: token ids of each request of the batch, int32[extend_len].
      max_current_pages: slots of the heap.
    """
    lens = np.asarray(batch.extend_lens, np.int32)
    plan = symmkv.build_plan(
        np.zeros_like(lens),
        lens,
        page_size=geometry.page_size,
        cp_size=geometry.cp_size,
        max_current_pages=max_current_pages,
        num_dense_pages=geometry.num_dense_pages,
    )
    token_ids = np.concatenate(prompts)
    shards = [rank_inputs(lens, token_ids, geometry, rank) for rank in _local_ranks(mesh)]
    sharding = NamedSharding(mesh, P("cp"))

    def global_array(*pieces: Int32) -> Any:
        return jax.make_array_from_process_local_data(sharding, np.concatenate(pieces))

    ranks: RankInputs = jax.tree.map(global_array, *shards)
    return BatchInputs(ranks, key_index(lens, geometry), plan)


def _local_ranks(mesh: Mesh) -> list[int]:
    """Indices on the cp axis of this process's devices, ascending."""
    process = jax.process_index()
    return [rank for rank, device in enumerate(mesh.devices) if device.process_index == process]


def rank_inputs(lens: Int32, token_ids: Int32, geometry: Geometry, rank: int) -> RankInputs:
    """One rank's share of the batch; arrays of NumPy."""
    size: dict[str, Any] = {"page_size": geometry.page_size}
    no_prefix = np.zeros_like(lens)
    tokens = symmkv.local_tokens(
        no_prefix,
        lens,
        cp_size=geometry.cp_size,
        rank=rank,
        pad_to=geometry.num_local_tokens,
        **size,
    )
    page_id, row = symmkv.dense_positions(no_prefix, lens, tokens, **size)
    real = tokens >= 0
    ends = np.cumsum(lens, dtype=np.int32)
    request = np.where(real, np.searchsorted(ends, tokens, side="right"), -1).astype(np.int32)
    position = np.where(real, tokens - (ends - lens)[request], -1).astype(np.int32)
    first, end = _key_block_range(page_id, row, position, real, geometry)

    last_token = np.full(geometry.max_requests, -1, np.int32)
    found = np.flatnonzero(np.isin(tokens, ends - 1))
    last_token[request[found]] = found
    return RankInputs(
        token_id=np.where(real, token_ids[tokens], 0).astype(np.int32),
        # JAX wraps negative indices, also under mode="drop": padding goes past the end instead.
        page_id=np.where(real, page_id, geometry.num_dense_pages).astype(np.int32),
        row=np.where(real, row, 0).astype(np.int32),
        queries=QueryIndex(request, position, first, end),
        last_token=last_token,
    )


def _key_block_range(
    page_id: Int32,
    row: Int32,
    position: Int32,
    real: npt.NDArray[np.bool_],
    geometry: Geometry,
) -> tuple[Int32, Int32]:
    """First and one past the last block of keys that each block of queries needs.

    The dense layout is the logical one, and local tokens ascend: a block of queries needs the pages
    from the start of its first query's request to its last query's page.
    """
    block_pages = key_block_pages(geometry.page_size)
    request_start_page = page_id - position // geometry.page_size
    first = np.where(real, request_start_page, geometry.num_dense_pages)
    last = np.where(real, page_id, -1)
    first = first.reshape(-1, QUERY_BLOCK_TOKENS).min(axis=1) // block_pages
    end = last.reshape(-1, QUERY_BLOCK_TOKENS).max(axis=1) // block_pages + 1
    return first.astype(np.int32), end.astype(np.int32)


def key_index(lens: Int32, geometry: Geometry) -> KeyIndex:
    """Request and first position of every page of the dense buffer; arrays of NumPy."""
    num_pages = -(-lens // geometry.page_size)
    used = int(num_pages.sum())
    page_request = np.full(geometry.num_dense_pages, -1, np.int32)
    page_position = np.zeros(geometry.num_dense_pages, np.int32)
    page_request[:used] = np.repeat(np.arange(lens.size), num_pages)
    first_page = np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    page_position[:used] = (np.arange(used) - first_page) * geometry.page_size
    return KeyIndex(page_request, page_position)

"""Causal attention of one rank's queries over a dense buffer of pages, in blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_symmkv.cli.demo.model import IntArray

QUERY_BLOCK_TOKENS = 128
KEY_BLOCK_TOKENS = 512

_MASKED = -1e30  # finite: -inf - -inf would be NaN in rows that have no key yet


class QueryIndex(NamedTuple):
    """Where a rank's queries are, int32. Local to a rank; padding has request -1."""

    request: IntArray  # [tokens], index in the batch
    position: IntArray  # [tokens], in the request
    first_key_block: IntArray  # [query blocks]
    end_key_block: IntArray  # [query blocks], one past the last that any query of the block needs


class KeyIndex(NamedTuple):
    """What the pages of the dense buffer hold, int32, the same on every rank."""

    page_request: IntArray  # [num_dense_pages], index in the batch, -1 for a page not in use
    page_position: IntArray  # [num_dense_pages], position of the page's first row in its request


def key_block_pages(page_size: int) -> int:
    """Pages of one key block; num_dense_pages must be a multiple of it."""
    return max(1, KEY_BLOCK_TOKENS // page_size)


def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, queries: QueryIndex, keys: KeyIndex
) -> jax.Array:
    """Softmax attention of each query over the keys of its request at or before its position.

    One block of queries meets one block of keys at a time (online softmax), so memory doesn't grow
    with their product; blocks outside [first_key_block, end_key_block) are never touched.

    Args:
      q: float32 [tokens, num_heads, head_dim], scaled; tokens is a multiple of QUERY_BLOCK_TOKENS.
      k_pages, v_pages: [num_dense_pages, page_size, num_kv_heads, head_dim], any float type.

    Returns:
      float32 [tokens, num_heads, head_dim]; zeros for padding.
    """
    num_pages, page_size, num_kv_heads, head_dim = k_pages.shape
    num_tokens, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    num_query_blocks = num_tokens // QUERY_BLOCK_TOKENS
    block_keys = key_block_pages(page_size) * page_size

    # Head-major once a layer: every product below is then a plain [rows, head_dim] x [head_dim, keys].
    k = k_pages.reshape(-1, num_kv_heads, head_dim).astype(jnp.float32).transpose(1, 2, 0)
    v = v_pages.reshape(-1, num_kv_heads, head_dim).astype(jnp.float32).transpose(1, 0, 2)
    row = jnp.tile(jnp.arange(page_size, dtype=jnp.int32), num_pages)
    key_request = jnp.repeat(keys.page_request, page_size, total_repeat_length=row.size)
    key_position = jnp.repeat(keys.page_position, page_size, total_repeat_length=row.size) + row
    q = q.reshape(num_query_blocks, QUERY_BLOCK_TOKENS, num_kv_heads, group, head_dim)
    q = q.transpose(0, 2, 3, 1, 4)  # [query blocks, kv heads, group, queries, head_dim]

    def attend_block(block: tuple[Any, ...]) -> jax.Array:
        q_block, request, position, first, end = block
        q_block = q_block.reshape(num_kv_heads, -1, head_dim)

        def body(
            index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            start = index * block_keys
            k_block = jax.lax.dynamic_slice_in_dim(k, start, block_keys, axis=2)
            v_block = jax.lax.dynamic_slice_in_dim(v, start, block_keys, axis=1)
            where = (
                jax.lax.dynamic_slice_in_dim(array, start, block_keys)
                for array in (key_request, key_position)
            )
            visible = _visible(request, position, *where)
            visible = jnp.tile(visible, (group, 1))[None]  # the same for every head
            return _online_softmax(carry, q_block @ k_block, visible, v_block)

        largest = jnp.full_like(q_block[..., :1], _MASKED)
        start = (largest, jnp.zeros_like(largest), jnp.zeros_like(q_block))
        _, total, weighted = jax.lax.fori_loop(first, end, body, start)
        attended: jax.Array = weighted / jnp.where(total == 0, 1, total)
        return attended

    blocks = (
        q,
        queries.request.reshape(num_query_blocks, -1),
        queries.position.reshape(num_query_blocks, -1),
        queries.first_key_block,
        queries.end_key_block,
    )
    out: jax.Array = jax.lax.map(attend_block, blocks)
    out = out.reshape(num_query_blocks, num_kv_heads, group, QUERY_BLOCK_TOKENS, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(num_tokens, num_heads, head_dim)


def _visible(
    request: jax.Array, position: jax.Array, key_request: jax.Array, key_position: jax.Array
) -> jax.Array:
    """bool [queries, keys]. A page's rows behind its request's end have later positions than any query."""
    return (request[:, None] == key_request) & (position[:, None] >= key_position)


def _online_softmax(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    scores: jax.Array,
    visible: jax.Array,
    v_block: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds one block of keys to (largest score, sum of weights, weighted values)."""
    largest, total, weighted = carry
    scores = jnp.where(visible, scores, _MASKED)
    new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
    # Masked scores are zeroed by hand: in a row without any key, exp(_MASKED - _MASKED) is 1.
    weights = jnp.where(visible, jnp.exp(scores - new_largest), 0)
    rescale = jnp.exp(largest - new_largest)
    total = total * rescale + weights.sum(axis=-1, keepdims=True)
    return new_largest, total, weighted * rescale + weights @ v_block

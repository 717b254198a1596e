"""Attention over pages, and the one-rank run, against a plain NumPy decoder."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_symmkv.cli.demo import inputs, model, reference
from jax_symmkv.cli.demo.attention import paged_attention
from jax_symmkv.cli.demo.geometry import Geometry
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=10)


def naive_attention(q, k, v):
    """Causal attention of one request; q: [tokens, heads, d]; k, v: [tokens, kv heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k)
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def naive_last_logits(params, token_ids, config):
    """The decoder in float64, but for K and V, which are rounded as in a cache."""

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight

    def rotate(x):
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def cached(x):
        return np.asarray(jnp.asarray(x, config.kv_dtype), np.float64)

    x = params.embedding[token_ids].astype(np.float64)
    for layer in range(config.num_layers):
        w = jax.tree.map(lambda a, layer=layer: a[layer].astype(np.float64), params.layers)
        normed = norm(x, w.attention_norm)
        q, k, v = ((normed @ m).reshape(len(x), -1, config.head_dim) for m in (w.wq, w.wk, w.wv))
        q = rotate(q) / np.sqrt(config.head_dim)
        attended = naive_attention(q, cached(rotate(k)), cached(v))
        x = x + attended.reshape(len(x), -1) @ w.wo
        normed = norm(x, w.mlp_norm)
        gate = normed @ w.w_gate
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w.w_up)) @ w.w_down
    return norm(x[-1], params.final_norm) @ params.unembedding


@pytest.mark.parametrize("page_size", [16, 48])
def test_paged_attention_of_all_ranks_is_the_causal_attention_of_each_request(page_size):
    lens = np.array([700, 1, 130, 0, 33], np.int32)
    heads, kv_heads, head_dim, cp_size = 4, 2, 8, 3
    geometry = Geometry(cp_size, page_size, token_budget=1000, max_requests=8)
    rng = np.random.default_rng(0)
    token_ids = np.arange(lens.sum(), dtype=np.int32)  # so that inputs say which token is where
    q = rng.standard_normal((lens.sum(), heads, head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, lens.sum(), kv_heads, head_dim), dtype=np.float32)
    ranks = [inputs.rank_inputs(lens, token_ids, geometry, rank) for rank in range(cp_size)]
    keys = inputs.key_index(lens, geometry)

    # Garbage in rows without a token: nothing may depend on them.
    shape = (geometry.num_dense_pages, page_size, kv_heads, head_dim)
    k_pages, v_pages = rng.standard_normal((2, *shape), dtype=np.float32) * 100
    for rank in ranks:
        real = rank.queries.position >= 0
        place = rank.page_id[real], rank.row[real]
        k_pages[place], v_pages[place] = k[rank.token_id[real]], v[rank.token_id[real]]

    expected = np.concatenate(
        [
            naive_attention(*(x[end - n : end] for x in (q, k, v)))
            for n, end in zip(lens, np.cumsum(lens), strict=True)
        ]
    )
    seen = []
    for rank in ranks:
        actual = jax.jit(paged_attention)(q[rank.token_id], k_pages, v_pages, rank.queries, keys)
        real = rank.queries.position >= 0
        np.testing.assert_allclose(actual[real], expected[rank.token_id[real]], atol=2e-5)
        assert not actual[~real].any()
        seen.append(rank.token_id[real])
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), token_ids)


def test_rank_inputs_padding_is_dropped_by_a_scatter():
    geometry = Geometry(2, 16, token_budget=64, max_requests=8)
    lens = np.array([20], np.int32)
    rank = inputs.rank_inputs(lens, np.arange(20, dtype=np.int32), geometry, 0)
    pages = jnp.zeros((geometry.num_dense_pages, 16))
    written = pages.at[rank.page_id, rank.row].set(1, mode="drop")
    assert written.sum() == (rank.queries.position >= 0).sum() == 16


def test_rank_inputs_exactly_one_rank_holds_each_last_token():
    geometry = Geometry(4, 16, token_budget=400, max_requests=8)
    lens = np.array([100, 7, 0, 260], np.int32)
    token_ids = np.arange(lens.sum(), dtype=np.int32)
    ranks = [inputs.rank_inputs(lens, token_ids, geometry, rank) for rank in range(4)]
    last = np.stack([r.last_token for r in ranks])
    np.testing.assert_array_equal((last >= 0).sum(axis=0), [1, 1, 0, 1, 0, 0, 0, 0])
    for request, token in ((0, 99), (1, 106), (3, 366)):
        (rank,) = np.flatnonzero(last[:, request] >= 0)
        assert ranks[rank].token_id[last[rank, request]] == token


@pytest.mark.parametrize("num_tokens", [1, 255, 300])
def test_one_rank_run_is_the_plain_decoder(num_tokens):
    config = dataclasses.replace(model.ModelConfig(), num_layers=2, vocab_size=64)
    params = model.init_params(config, seed=1)
    token_ids = np.random.default_rng(2).integers(64, size=num_tokens, dtype=np.int32)
    expected = naive_last_logits(params, token_ids, config)
    actual = reference.last_token_logits(params, token_ids, config)
    # K and V rounded from float32 here and from float64 there: some end one float16 apart.
    np.testing.assert_allclose(actual, expected, atol=2e-3)

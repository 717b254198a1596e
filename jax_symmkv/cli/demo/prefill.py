"""The context-parallel prefill program: a scan over layers with one compose in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from jax_symmkv.cli.demo import model
from jax_symmkv.cli.demo.attention import KeyIndex, paged_attention
from jax_symmkv.cli.demo.inputs import RankInputs

Dense = tuple[jax.Array, jax.Array]  # K and V, [num_dense_pages, page_size, num_kv_heads, head_dim]


class Compose(Protocol):
    """`symmkv.compose` with its heap bound."""

    def __call__(
        self, dense: Dense, plan: symmkv.ComposePlan, ticket: jax.Array, /
    ) -> tuple[Dense, jax.Array]: ...


def make_prefill(
    mesh: Mesh, config: model.ModelConfig, compose: Compose, *, record: bool
) -> Callable[..., Any]:
    """Jits `prefill(params, dense, ranks, keys, plan, ticket)`; dense and ticket are donated.

    Returns:
      a function that returns dense, ticket, the logits of each request's last token (float32
      [cp * max_requests, vocab_size], zeros on the ranks that don't hold the token) and, with
      `record`, every layer's dense buffers before and after compose ([num_layers, ...] each; None
      otherwise: the copies would be timed).
    """

    def prefill(
        params: model.Params,
        dense: Dense,
        ranks: RankInputs,
        keys: KeyIndex,
        plan: symmkv.ComposePlan,
        ticket: jax.Array,
    ) -> tuple[Dense, jax.Array, jax.Array, tuple[Dense, Dense] | None]:
        def layer_step(
            carry: tuple[jax.Array, Dense, jax.Array], layer: model.LayerParams
        ) -> tuple[tuple[jax.Array, Dense, jax.Array], tuple[Dense, Dense] | None]:
            x, dense, ticket = carry
            q, k, v = model.project_qkv(x, ranks.queries.position, layer, config)
            local = (_scatter(dense[0], ranks, k), _scatter(dense[1], ranks, v))
            composed, ticket = compose(local, plan, ticket)
            x = model.finish_layer(x, paged_attention(q, *composed, ranks.queries, keys), layer)
            return (x, composed, ticket), (local, composed) if record else None

        x = params.embedding[ranks.token_id]
        (x, dense, ticket), layers = jax.lax.scan(layer_step, (x, dense, ticket), params.layers)
        owned = ranks.last_token[:, None] >= 0
        logits = jnp.where(owned, model.logits(x[ranks.last_token], params), 0)
        return dense, ticket, logits, layers

    sharded = jax.shard_map(
        prefill,
        mesh=mesh,
        in_specs=(P(), P("cp"), P("cp"), P(), P(), P("cp")),
        out_specs=(P("cp"), P("cp"), P("cp"), P(None, "cp")),
    )
    return jax.jit(sharded, donate_argnames=("dense", "ticket"))


def _scatter(pages: jax.Array, ranks: RankInputs, new: jax.Array) -> jax.Array:
    """Writes the local tokens' K or V into the rank's dense buffer; padding is out of range, dropped.

    Index arrays, before compose: XLA then updates the buffer in place.
    """
    return pages.at[ranks.page_id, ranks.row].set(new, mode="drop")

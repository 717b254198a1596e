"""A small decoder with random weights: everything but attention, which the callers supply."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

IntArray = jax.Array | npt.NDArray[np.int32]

_ROPE_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder.

    Attributes:
      kv_dtype: type of the cached K and V; the rest is float32. Not bfloat16: on CPUs XLA scatters it by
        way of float32, which copies the whole dense buffer twice a layer.
    """

    num_layers: int = 4
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    d_ff: int = 256
    vocab_size: int = 1024
    kv_dtype: jnp.dtype = dataclasses.field(default_factory=lambda: jnp.dtype(jnp.float16))

    def page_struct(self, page_size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The K page and the V page of one layer, [page_size, num_kv_heads, head_dim] each."""
        page = jax.ShapeDtypeStruct((page_size, self.num_kv_heads, self.head_dim), self.kv_dtype)
        return page, page


class LayerParams(NamedTuple):
    """Weights, float32, each with a leading [num_layers] axis (stripped inside a scan over layers)."""

    attention_norm: jax.Array  # [d_model]
    wq: jax.Array  # [d_model, num_heads * head_dim]
    wk: jax.Array  # [d_model, num_kv_heads * head_dim]
    wv: jax.Array  # [d_model, num_kv_heads * head_dim]
    wo: jax.Array  # [num_heads * head_dim, d_model]
    mlp_norm: jax.Array  # [d_model]
    w_gate: jax.Array  # [d_model, d_ff]
    w_up: jax.Array  # [d_model, d_ff]
    w_down: jax.Array  # [d_ff, d_model]


class Params(NamedTuple):
    """All weights, float32."""

    embedding: jax.Array  # [vocab_size, d_model]
    layers: LayerParams
    final_norm: jax.Array  # [d_model]
    unembedding: jax.Array  # [d_model, vocab_size]


def init_params(config: ModelConfig, seed: int) -> Params:
    """Random weights as NumPy arrays, the same in every process."""
    rng = np.random.default_rng(seed)
    layers, d_model = config.num_layers, config.d_model
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def normal(*shape: int) -> Any:
        # The fan-in scale keeps activations and logits near 1, so that one tolerance fits all sizes.
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-2]))

    def ones(*shape: int) -> Any:
        return np.ones(shape, np.float32)

    return Params(
        embedding=normal(config.vocab_size, d_model) * np.float32(np.sqrt(config.vocab_size)),
        layers=LayerParams(
            attention_norm=ones(layers, d_model),
            wq=normal(layers, d_model, q_dim),
            wk=normal(layers, d_model, kv_dim),
            wv=normal(layers, d_model, kv_dim),
            wo=normal(layers, q_dim, d_model),
            mlp_norm=ones(layers, d_model),
            w_gate=normal(layers, d_model, config.d_ff),
            w_up=normal(layers, d_model, config.d_ff),
            w_down=normal(layers, config.d_ff, d_model),
        ),
        final_norm=ones(d_model),
        unembedding=normal(d_model, config.vocab_size),
    )


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """float32 [..., d_model] in and out."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def rope(x: jax.Array, position: IntArray) -> jax.Array:
    """Rotary embedding; x: float32 [tokens, heads, head_dim]; position: int32 [tokens]."""
    half = x.shape[-1] // 2
    frequency = _ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[:, None, None].astype(jnp.float32) * frequency
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def project_qkv(
    x: jax.Array, position: IntArray, layer: LayerParams, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of tokens.

    Args:
      x: float32 [tokens, d_model], the residual stream.
      position: int32 [tokens], in the request.

    Returns:
      q: float32 [tokens, num_heads, head_dim], scaled by 1/sqrt(head_dim); k and v: kv_dtype
      [tokens, num_kv_heads, head_dim]. q and k are rotated.
    """
    normed = rms_norm(x, layer.attention_norm)
    q = (normed @ layer.wq).reshape(-1, config.num_heads, config.head_dim)
    k = (normed @ layer.wk).reshape(-1, config.num_kv_heads, config.head_dim)
    v = (normed @ layer.wv).reshape(-1, config.num_kv_heads, config.head_dim)
    q = rope(q, position) / np.sqrt(config.head_dim).astype(np.float32)
    return q, rope(k, position).astype(config.kv_dtype), v.astype(config.kv_dtype)


def finish_layer(x: jax.Array, attended: jax.Array, layer: LayerParams) -> jax.Array:
    """Output projection and MLP; x: float32 [tokens, d_model]; attended: [tokens, heads, head_dim]."""
    x = x + attended.reshape(attended.shape[0], -1) @ layer.wo
    normed = rms_norm(x, layer.mlp_norm)
    return x + (jax.nn.silu(normed @ layer.w_gate) * (normed @ layer.w_up)) @ layer.w_down


def logits(x: jax.Array, params: Params) -> jax.Array:
    """float32 [tokens, d_model] to float32 [tokens, vocab_size]."""
    return rms_norm(x, params.final_norm) @ params.unembedding

"""The same decoder on one device: no ranks, no pages, no exchange."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_symmkv.cli.demo import model

_MIN_BUCKET_TOKENS = 256
_MAX_SCORES = 1 << 22  # scores alive at a time, float32


def last_token_logits(
    params: model.Params, token_ids: npt.NDArray[np.int32], config: model.ModelConfig
) -> npt.NDArray[np.float32]:
    """Plain dense prefill of one request on the device of `params`.

    Args:
      token_ids: int32 [tokens].

    Returns:
      float32 [vocab_size], the logits of the last token.
    """
    num_tokens = token_ids.size
    # Powers of two: a few programs serve all lengths.
    bucket = max(_MIN_BUCKET_TOKENS, 1 << (num_tokens - 1).bit_length())
    padded = np.pad(token_ids, (0, bucket - num_tokens))
    return np.asarray(_prefill(params, padded, np.int32(num_tokens - 1), config=config))


@functools.partial(jax.jit, static_argnames="config")
def _prefill(
    params: model.Params, token_ids: jax.Array, last: jax.Array, *, config: model.ModelConfig
) -> jax.Array:
    position = jnp.arange(token_ids.size, dtype=jnp.int32)

    def layer_step(x: jax.Array, layer: model.LayerParams) -> tuple[jax.Array, None]:
        q, k, v = model.project_qkv(x, position, layer, config)
        return model.finish_layer(x, _causal_attention(q, k, v), layer), None

    x, _ = jax.lax.scan(layer_step, params.embedding[token_ids], params.layers)
    # Padding follows the last token, so causal attention never sees it.
    return model.logits(x[last][None], params)[0]


def _causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Softmax over all earlier keys at once, some queries at a time.

    Args:
      q: float32 [tokens, num_heads, head_dim], scaled.
      k, v: [tokens, num_kv_heads, head_dim]; tokens is a power of two.

    Returns:
      float32 [tokens, num_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    k = jnp.repeat(k.astype(jnp.float32), group, axis=1).transpose(1, 2, 0)
    v = jnp.repeat(v.astype(jnp.float32), group, axis=1).transpose(1, 0, 2)
    chunk = min(num_tokens, max(16, _MAX_SCORES // (num_tokens * num_heads)))
    chunk = 1 << (chunk.bit_length() - 1)
    key_position = jnp.arange(num_tokens)

    def attend(start: jax.Array) -> jax.Array:
        queries = jax.lax.dynamic_slice_in_dim(q, start, chunk).transpose(1, 0, 2)
        visible = key_position[None, :] <= (start + jnp.arange(chunk))[:, None]
        scores = jnp.where(visible, queries @ k, -jnp.inf)
        return (jax.nn.softmax(scores, axis=-1) @ v).transpose(1, 0, 2)

    out: jax.Array = jax.lax.map(attend, jnp.arange(0, num_tokens, chunk))
    return out.reshape(num_tokens, num_heads, head_dim)

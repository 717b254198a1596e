"""The same result from XLA's collectives alone: the oracle of every test, and the fallback."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_symmkv import compat
from jax_symmkv.plan import ComposePlan


def collective_compose(
    dense: jax.Array | tuple[jax.Array, ...], plan: ComposePlan, *, axis_name: str
) -> jax.Array | tuple[jax.Array, ...]:
    """Composes the current pages with one all-reduce of a compact buffer.

    Every rank puts its own pages into the slots of the buffer and zeros elsewhere; the sum, of unsigned
    integers whatever the dtype, is each writer's bytes unchanged, NaN patterns included.

    Args:
      dense: `[num_dense_pages, *page_shape]`, or a tuple of such buffers; this rank's own current pages
        are in it. Any dtype of whole bytes; a page is a multiple of 4 bytes.
      plan: the batch, the same on every rank.
      axis_name: the context-parallel axis, bound by the shard_map around.

    Returns:
      `dense` with every current page, of exactly the type of the input.
    """
    # A gradient would be zero, and not say so: the bytes travel as integers.
    buffers = compat.refuse_transforms(
        "collective_compose", dense if isinstance(dense, tuple) else (dense,)
    )
    composed = tuple(_compose_buffer(b, plan, axis_name) for b in buffers)
    return composed if isinstance(dense, tuple) else composed[0]


def _compose_buffer(dense: jax.Array, plan: ComposePlan, axis_name: str) -> jax.Array:
    page, writer = jnp.asarray(plan.current_page), jnp.asarray(plan.current_writer)
    mine = writer == jax.lax.axis_index(axis_name)
    bits = _to_bits(dense)
    slots = _to_words(bits[jnp.maximum(page, 0)])
    slots = jax.lax.psum(jnp.where(mine[:, None], slots, 0), axis_name)
    pages = _from_words(slots, bits)
    # The padding's -1 would wrap around; beyond the end, each at an index of its own, it is dropped.
    target = jnp.where(page < 0, dense.shape[0] + jnp.arange(page.shape[0]), page)
    (pages, target) = compat.vary_alike([pages, target], compat.varying_axes(dense))
    composed = bits.at[target].set(pages, mode="drop", unique_indices=True)
    return _from_bits(composed, dense.dtype)


# Everything moves as unsigned integers: XLA may widen small floats, which quiets signalling NaNs.


def _to_bits(x: jax.Array) -> jax.Array:
    """The same bytes as unsigned integers; a complex array gets a last dimension of 2."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    elif x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.dtype(f"float{4 * dtype.itemsize}")
        parts = jax.lax.bitcast_convert_type(bits, part)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    return jax.lax.bitcast_convert_type(bits, dtype)


def _to_words(pages: jax.Array) -> jax.Array:
    """Unsigned `[n, *page_shape]` → uint32 `[n, page_nbytes // 4]`, which every collective can sum."""
    n, itemsize = pages.shape[0], pages.dtype.itemsize
    if itemsize < 4:
        pages = pages.reshape(n, -1, 4 // itemsize)
    return jax.lax.bitcast_convert_type(pages, jnp.uint32).reshape(n, -1)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `_to_words`, for buffers of `like`'s dtype and page shape."""
    n, itemsize = words.shape[0], like.dtype.itemsize
    if itemsize > 4:
        words = words.reshape(n, -1, itemsize // 4)
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(n, *like.shape[1:])

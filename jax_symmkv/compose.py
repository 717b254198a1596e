"""The per-layer function: picks the exchange or the collectives."""

from __future__ import annotations

import jax

from jax_symmkv import ops
from jax_symmkv.heap import SymmetricHeap
from jax_symmkv.ops import Dense
from jax_symmkv.plan import ComposePlan


def compose(
    dense: Dense, plan: ComposePlan, ticket: jax.Array, *, heap: SymmetricHeap
) -> tuple[Dense, jax.Array]:
    """Completes the dense buffer with the current pages that the peers computed, in place.

    One exchange: every rank of the group must make it, with the same plan, in the same order as its other
    calls on the heap. Call it inside a `jax.shard_map` that is manual over all axes of the heap's mesh,
    or in a process-local `jax.jit`.

    Args:
      dense: `[num_dense_pages, *page_shape]`, or a tuple that matches the heap's `page`; this rank's own
        current pages are written. Donate it, else XLA copies it once.
      plan: from `build_plan`, the same on every rank.
      ticket: int32[1], from `new_ticket` or the call before.
      heap: the group's heap.

    Returns:
      the dense buffer and the ticket for the next call, of the types of the inputs.

    Raises:
      TypeError, PlanError, HeapError: at trace time, an operand that does not fit.
      jax.errors.JaxRuntimeError: at run time, a rank that did not come, died, or failed; `heap.check()`
        then raises it as a `PeerError`.
    """
    if heap.transport == "collective":
        return ops.gather(dense, plan, ticket, heap=heap)
    return ops.exchange(dense, plan, ticket, heap=heap)

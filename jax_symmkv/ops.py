"""The custom calls: publish, barrier, gather, exchange, and the program's guard, new_ticket.

Each function validates its operands at trace time and makes one `ffi_call`. The ticket alone orders the
calls: XLA keeps independent side effects in no order, and ranks that differ in it would deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_symmkv import compat
from jax_symmkv.collective import collective_compose
from jax_symmkv.errors import HeapError, PlanError
from jax_symmkv.heap import SymmetricHeap
from jax_symmkv.plan import ComposePlan

Dense = jax.Array | tuple[jax.Array, ...]


def new_ticket(*heaps: SymmetricHeap) -> jax.Array:
    """The start of a program's chain of calls, and its guard.

    A custom call that runs at every execution and fails the program if a heap is closed or poisoned, or
    if the program's mesh orders the devices otherwise than the heap's.

    One chain a program: two are in no order. To order programs in flight, return the ticket and pass it to
    the next instead of a new one; globally it is `int32[cp]` with `P(axis)`. The calls check the heap too,
    but not the order of the devices.

    Args:
      heaps: the heaps that the program uses; one chain orders the calls on all of them.

    Returns:
      int32[1], varying over the heaps' axes.

    Raises:
      HeapError: a heap is closed, from another mesh, or not usable here; TypeError: no heap.
    """
    if not heaps:
        raise TypeError("new_ticket: needs the heaps that the program uses, got none")
    indices = [_axis_index("new_ticket", heap) for heap in heaps]
    axes = compat.varying_axes(*indices)
    mapped = [(h, i) for h, i in zip(heaps, indices, strict=True) if h.transport != "collective"]
    if not mapped:  # nothing to guard
        return compat.vary_alike([jnp.zeros((1,), jnp.int32)], axes)[0]
    operand = jnp.stack(compat.vary_alike([i for _, i in mapped], axes))
    ticket: jax.Array = _call(
        "symmkv_new_ticket",
        operand,
        results=[jax.typeof(operand[:1])],
        heap_ids=np.array([h.heap_id for h, _ in mapped], np.int64),
    )[0]
    return ticket


def publish(
    dense: Dense, plan: ComposePlan, ticket: jax.Array, *, heap: SymmetricHeap
) -> jax.Array:
    """Copies this rank's current pages from the dense buffer into its staging.

    Args:
      dense: `[num_dense_pages, *page_shape]`, or a tuple that matches the heap's `page`.
      plan: the batch, the same on every rank.
      ticket: int32[1], from the call before.

    Returns:
      the ticket for `barrier`.

    Raises:
      TypeError, PlanError, HeapError: an operand that does not fit the heap, at trace time.
    """
    buffers = _check_batch("publish", dense, plan, ticket, heap)
    if heap.transport == "collective":
        return ticket
    return _batch_call("publish", buffers, plan, ticket, heap)[0]


def barrier(ticket: jax.Array, *, heap: SymmetricHeap) -> jax.Array:
    """Waits until every rank of the group has come here; what they published before is visible after.

    Returns:
      the ticket for `gather`, or for the next exchange.
    """
    _check_ticket("barrier", ticket, heap)
    (ticket,) = compat.refuse_transforms("barrier", [ticket])
    if heap.transport == "collective":
        return ticket
    return _call(
        "symmkv_barrier",
        ticket,
        results=[jax.typeof(ticket)],
        aliases={0: 0},
        heap_id=np.int64(heap.heap_id),
    )[0]


def gather(
    dense: Dense, plan: ComposePlan, ticket: jax.Array, *, heap: SymmetricHeap
) -> tuple[Dense, jax.Array]:
    """Copies the peers' current pages from their staging into the dense buffer, in place.

    Args: those of `publish`; the same plan, and a dense buffer that holds this rank's own pages.

    Returns:
      the dense buffer with every current page, and the ticket.
    """
    buffers = _check_batch("gather", dense, plan, ticket, heap)
    if heap.transport == "collective":
        return collective_compose(dense, plan, axis_name=heap.axis_name), ticket
    ticket, *composed = _batch_call("gather", buffers, plan, ticket, heap)
    return _like(dense, composed), ticket


def exchange(
    dense: Dense, plan: ComposePlan, ticket: jax.Array, *, heap: SymmetricHeap
) -> tuple[Dense, jax.Array]:
    """publish, barrier and gather in one custom call, of a mapped heap. `compose` chooses it."""
    buffers = _check_batch("compose", dense, plan, ticket, heap)
    ticket, *composed = _batch_call("exchange", buffers, plan, ticket, heap)
    return _like(dense, composed), ticket


def _like(dense: Dense, buffers: Sequence[jax.Array]) -> Dense:
    return tuple(buffers) if isinstance(dense, tuple) else buffers[0]


def _batch_call(
    op: str,
    buffers: Sequence[jax.Array],
    plan: ComposePlan,
    ticket: jax.Array,
    heap: SymmetricHeap,
) -> list[jax.Array]:
    """Operands (ticket, plan arrays, buffers) → results (ticket, then buffers where they are written)."""
    arrays = (plan.current_page, plan.current_writer, plan.num_current, plan.fingerprint)
    operands = [jnp.asarray(x) for x in (ticket, *arrays, *buffers)]
    operands = compat.refuse_transforms("compose" if op == "exchange" else op, operands)
    first = len(operands) - len(buffers)
    written = [] if op == "publish" else operands[first:]
    return _call(
        f"symmkv_{op}",
        *operands,
        results=[jax.typeof(x) for x in (operands[0], *written)],
        aliases={0: 0} | {first + i: 1 + i for i in range(len(written))},
        heap_id=np.int64(heap.heap_id),
    )


def _call(
    target: str,
    *operands: jax.Array,
    results: Sequence[Any],
    aliases: dict[int, int] | None = None,
    **attributes: object,
) -> list[jax.Array]:
    """One ffi_call. Its results have the given types, so that scan carries keep theirs."""
    axes = compat.varying_axes(*operands)
    call = jax.ffi.ffi_call(
        target, list(results), has_side_effect=True, input_output_aliases=aliases or {}
    )
    out: list[jax.Array] = list(call(*compat.vary_alike(operands, axes), **attributes))
    return out


# --- what can be said at trace time --------------------------------------------------------------


def _axis_index(op: str, heap: SymmetricHeap) -> jax.Array:
    """This rank's index along the heap's axis, int32; -1 in a process-local program."""
    _check_open(op, heap)
    if _check_axes(op, heap):
        index: jax.Array = jax.lax.axis_index(heap.axis_name)
        return index
    return jnp.full((), -1, jnp.int32)


def _check_open(op: str, heap: SymmetricHeap) -> None:
    if not isinstance(heap, SymmetricHeap):
        raise TypeError(f"{op}: heap must be a SymmetricHeap, got {type(heap).__name__}")
    if heap.closed:
        raise HeapError(f"{op}: the heap is closed; create a new one and trace the program with it")


def _check_axes(op: str, heap: SymmetricHeap) -> bool:
    """True in a shard_map that suits the heap, False in a process-local program; else an error."""
    mesh, manual = compat.manual_mesh()
    if mesh is None:
        if heap.num_local_devices > 1 or heap.transport == "collective":
            raise HeapError(
                f"{op}: axis {heap.axis_name!r} is not bound; call it inside a jax.shard_map over the "
                "heap's mesh. (A program without shard_map needs one device of the mesh in this process "
                f"and a mapped transport; here are {heap.num_local_devices}, and {heap.transport!r}.)"
            )
        return False
    if dict(mesh.shape) != dict(heap.mesh.shape):
        raise HeapError(
            f"{op}: the heap is from another mesh: {dict(heap.mesh.shape)}, the program's is "
            f"{dict(mesh.shape)}; create the heap with the program's mesh"
        )
    if manual != frozenset(mesh.axis_names):
        raise HeapError(
            f"{op}: every axis of the mesh must be manual in the shard_map around it; of "
            f"{mesh.axis_names} it has {tuple(sorted(manual))}. Leave axis_names out of the shard_map"
        )
    return True


def _check_ticket(op: str, ticket: jax.Array, heap: SymmetricHeap) -> None:
    _check_open(op, heap)
    _check_axes(op, heap)
    if not hasattr(ticket, "dtype") or ticket.shape != (1,) or ticket.dtype != jnp.int32:
        raise TypeError(
            f"{op}: ticket must be the int32[1] of new_ticket or of the call before, got "
            f"{_described(ticket)}"
        )


def _check_batch(
    op: str, dense: Dense, plan: ComposePlan, ticket: jax.Array, heap: SymmetricHeap
) -> tuple[jax.Array, ...]:
    """The dense buffers, once everything about the call that has a static answer is found right."""
    _check_ticket(op, ticket, heap)
    _check_plan(op, plan, heap)
    if isinstance(dense, tuple) != heap.is_tuple:
        raise TypeError(
            f"{op}: dense must be {'a tuple of buffers' if heap.is_tuple else 'one array'}, like the "
            f"page of the heap, got {_described(dense)}"
        )
    buffers = dense if isinstance(dense, tuple) else (dense,)
    if len(buffers) != len(heap.page):
        raise TypeError(f"{op}: dense must have {len(heap.page)} buffers, got {len(buffers)}")
    plan_axes = compat.varying_axes(*jax.tree.leaves(plan))
    remedy = (
        "create the heap with this page, or pass the buffers in its order"
        if compat.manual_mesh()[0] is not None
        else "pass this rank's buffer, not the global array"
    )
    for i, (buffer, page) in enumerate(zip(buffers, heap.page, strict=True)):
        shape = (plan.num_dense_pages, *page.shape)
        if not hasattr(buffer, "dtype") or buffer.shape != shape or buffer.dtype != page.dtype:
            raise TypeError(
                f"{op}: dense must be {page.dtype}{list(shape)}, the plan's num_dense_pages of the heap's "
                f"pages, got {_described(buffer)} for buffer {i}; {remedy}"
            )
        # Else the result would pass for replicated over these axes, and not be.
        lacking = plan_axes - compat.varying_axes(buffer)
        if lacking:
            raise TypeError(
                f"{op}: dense must vary over {tuple(sorted(lacking))}, since the plan does; shard it over "
                "these axes, or apply jax.lax.pcast(dense, axes, to='varying')"
            )
    return buffers


def _described(x: object) -> str:
    return (
        f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array | np.ndarray) else type(x).__name__
    )


def _check_plan(op: str, plan: ComposePlan, heap: SymmetricHeap) -> None:
    if not isinstance(plan, ComposePlan):
        raise TypeError(f"{op}: plan must be a ComposePlan, got {type(plan).__name__}")
    if plan.cp_size != heap.cp_size:
        raise PlanError(
            f"{op}: the plan is for cp_size {plan.cp_size}, the heap has {heap.cp_size}; "
            "pass cp_size=heap.cp_size to build_plan"
        )
    if plan.current_page.shape[0] > heap.max_current_pages:
        raise PlanError(
            f"{op}: the plan has room for {plan.current_page.shape[0]} current pages, the heap for "
            f"{heap.max_current_pages}; pass max_current_pages=heap.max_current_pages to build_plan"
        )
    if plan.prefix_page.shape[0]:
        raise PlanError(
            f"{op}: current pages alone are exchanged, the plan has room for {plan.prefix_page.shape[0]} "
            "prefix pages; pass max_prefix_pages=0 to build_plan and fill those pages of the dense buffer"
        )

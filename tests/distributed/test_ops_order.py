"""The ticket's order: exchanges in loops and branches, in many programs in flight, on two heaps at once.

Every step first changes the whole dense buffer, on each rank differently, so that no exchange can be left
out, done twice, or given another step's bytes without a difference in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from tests import group
from tests.reference import (
    MAX_CURRENT_PAGES,
    NUM_DENSE_PAGES,
    Array,
    batches,
    composed,
    random_array,
)
from tests.registry import register_ci
from tests.run_rank import run_ranks_of

pytestmark = register_ci(suite="distributed", ranks=2, est_s=20)

PAGE = jax.ShapeDtypeStruct((4,), jnp.uint32)
STEPS = 7  # of every kind of batch; an odd number, so that loops begin in either half
IN_FLIGHT = 50


# --- a step, in JAX and in NumPy -----------------------------------------------------------------


def changed(dense: jax.Array, step: Any) -> jax.Array:
    rank = jax.lax.axis_index("cp").astype(jnp.uint32)
    return dense * jnp.uint32(3) + (rank + 1) * jnp.asarray(step + 1).astype(jnp.uint32)


def changed_reference(dense: Array, step: int) -> Array:
    rank = np.arange(len(dense), dtype=np.uint32).reshape(-1, 1, 1)
    return dense * np.uint32(3) + (rank + 1) * np.uint32(step + 1)


def after_steps(dense: Array, plans: Sequence[symmkv.ComposePlan], cp_size: int) -> Array:
    by_rank = group.by_rank(dense, cp_size)
    for step, plan in enumerate(plans):
        by_rank = composed(changed_reference(by_rank, step), plan)
    return by_rank.reshape(dense.shape)


def stacked(plans: Sequence[symmkv.ComposePlan]) -> symmkv.ComposePlan:
    """One plan whose arrays have a leading axis of steps."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *plans)


def at(plans: symmkv.ComposePlan, step: Any) -> symmkv.ComposePlan:
    return jax.tree.map(lambda a: a[step], plans)


# --- exchanges: (step, plan, dense, ticket) -> dense, ticket --------------------------------------

Exchange = Callable[[Any, symmkv.ComposePlan, Any, jax.Array], tuple[Any, jax.Array]]


def exchanges(heap: symmkv.SymmetricHeap) -> dict[str, Exchange]:
    def one(step: Any, plan: Any, dense: Any, ticket: Any) -> Any:
        return symmkv.compose(changed(dense, step), plan, ticket, heap=heap)

    def three(step: Any, plan: Any, dense: Any, ticket: Any) -> Any:
        return group.three_calls(changed(dense, step), plan, ticket, heap=heap)

    def with_barrier(step: Any, plan: Any, dense: Any, ticket: Any) -> Any:
        return one(step, plan, dense, symmkv.barrier(ticket, heap=heap))

    return {"compose": one, "three calls": three, "with a barrier more": with_barrier}


# --- programs: (exchange, ticket, dense, stacked plans) -> dense -----------------------------------


def unrolled(exchange: Exchange, ticket: Any, dense: Any, plans: Any) -> Any:
    for step in range(STEPS):
        dense, ticket = exchange(step, at(plans, step), dense, ticket)
    return dense


def scan(exchange: Exchange, ticket: Any, dense: Any, plans: Any) -> Any:
    def body(carry: Any, xs: Any) -> Any:
        return exchange(*xs, *carry), None

    return jax.lax.scan(body, (dense, ticket), (jnp.arange(STEPS), plans))[0][0]


def fori_loop(exchange: Exchange, ticket: Any, dense: Any, plans: Any) -> Any:
    def body(step: Any, carry: Any) -> Any:
        return exchange(step, at(plans, step), *carry)

    return jax.lax.fori_loop(0, STEPS, body, (dense, ticket))[0]


def while_loop(exchange: Exchange, ticket: Any, dense: Any, plans: Any) -> Any:
    def body(carry: Any) -> Any:
        step, *rest = carry
        return (step + 1, *exchange(step, at(plans, step), *rest))

    first = (jnp.int32(0), dense, ticket)
    return jax.lax.while_loop(lambda carry: carry[0] < STEPS, body, first)[1]


def cond(exchange: Exchange, ticket: Any, dense: Any, plans: Any) -> Any:
    """A jit in a scan in a branch that every rank takes; the other has no exchange."""

    def loop(dense: Any, ticket: Any) -> Any:
        return scan(jax.jit(exchange), ticket, dense, plans)

    return jax.lax.cond(plans.num_current.sum() > 0, loop, lambda *carry: carry[0], dense, ticket)


def bodies(heap: symmkv.SymmetricHeap) -> dict[str, group.Body]:
    """(dense, stacked plans) -> dense, by name."""
    kinds = exchanges(heap)

    def body(program: Any, exchange: Exchange) -> group.Body:
        return lambda dense, plans: program(exchange, symmkv.new_ticket(heap), dense, plans)

    def switch(step: Any, *rest: Any) -> Any:
        return jax.lax.switch(step % len(kinds), list(kinds.values()), step, *rest)

    found = {
        f"{name} in {program.__name__}": body(program, kinds[name])
        for program in (unrolled, scan, fori_loop, while_loop, cond)
        for name in ("compose", "three calls")
    }
    return found | {"now one, now the other": body(scan, switch)}


# --- what ranks execute --------------------------------------------------------------------------


def setup(cp_size: int, steps: int, seed: int) -> tuple[Array, list[symmkv.ComposePlan]]:
    rng = np.random.default_rng(seed)
    kinds = list(batches(cp_size, rng).values())
    dense = random_array(rng, (cp_size * NUM_DENSE_PAGES, *PAGE.shape), PAGE.dtype)
    return dense, [kinds[step % len(kinds)] for step in range(steps)]


def make_heap(page: Any = PAGE) -> symmkv.SymmetricHeap:
    return symmkv.SymmetricHeap(
        group.cpu_mesh(),
        "cp",
        page=page,
        max_current_pages=MAX_CURRENT_PAGES,
        transport="shm",
        timeout_s=40.0,
    )


def check_control_flow() -> None:
    with make_heap() as heap:
        dense, plans = setup(heap.cp_size, STEPS, seed=1)
        wanted = after_steps(dense, plans, heap.cp_size)
        for i, (name, body) in enumerate(bodies(heap).items()):
            program = group.sharded(body, heap, check_vma=i % 2 == 0, donate=i % 3 != 0)
            result = program(group.put(dense, heap.mesh, P("cp")), stacked(plans))
            group.assert_shards(result, wanted, name)
        heap.check()


def check_in_flight() -> None:
    """No program is waited for before the last is dispatched."""
    with make_heap() as heap:
        for exchange in (symmkv.compose, group.three_calls):
            check_ticket_passed_on(heap, exchange)
            check_programs_of_their_own(heap, exchange)
        heap.check()


def check_ticket_passed_on(heap: symmkv.SymmetricHeap, exchange: Any) -> None:
    def first(dense: Any) -> Any:
        return dense, symmkv.new_ticket(heap)

    def step(dense: Any, ticket: Any, plan: Any, step: Any) -> Any:
        return exchange(changed(dense, step), plan, ticket, heap=heap)

    state = (P("cp"), P("cp"))
    start = jax.jit(
        jax.shard_map(first, mesh=heap.mesh, in_specs=P("cp"), out_specs=state), donate_argnums=0
    )
    advance = jax.jit(
        jax.shard_map(step, mesh=heap.mesh, in_specs=(*state, P(), P()), out_specs=state),
        donate_argnums=(0, 1),
    )
    dense, plans = setup(heap.cp_size, IN_FLIGHT, seed=2)
    carry = start(group.put(dense, heap.mesh, P("cp")))
    for i, plan in enumerate(plans):
        carry = advance(*carry, plan, np.int32(i))
    group.assert_shards(carry[0], after_steps(dense, plans, heap.cp_size), "ticket passed on")


def check_programs_of_their_own(heap: symmkv.SymmetricHeap, exchange: Any) -> None:
    """Dispatched in the same order on every rank, with nothing that orders them but that."""

    def body(dense: Any, plan: Any, step: Any) -> Any:
        return exchange(changed(dense, step), plan, symmkv.new_ticket(heap), heap=heap)[0]

    program = jax.jit(
        jax.shard_map(body, mesh=heap.mesh, in_specs=(P("cp"), P(), P()), out_specs=P("cp"))
    )
    dense, plans = setup(heap.cp_size, IN_FLIGHT, seed=3)
    given = group.put(dense, heap.mesh, P("cp"))
    results = [program(given, plan, np.int32(i)) for i, plan in enumerate(plans)]
    by_rank = group.by_rank(dense, heap.cp_size)
    for i, (result, plan) in enumerate(zip(results, plans, strict=True)):
        wanted = composed(changed_reference(by_rank, i), plan).reshape(dense.shape)
        group.assert_shards(result, wanted, f"program {i}")


def check_two_heaps() -> None:
    """One ticket orders the exchanges on both, whatever else each rank's own program does between."""
    other_page = (
        jax.ShapeDtypeStruct((2, 24), jnp.bfloat16),
        jax.ShapeDtypeStruct((16,), jnp.bool_),
    )
    with make_heap() as first, make_heap(other_page) as second:
        cp_size, me = first.cp_size, jax.process_index()
        rng = np.random.default_rng(4)
        kinds = list(batches(cp_size, rng).values())
        a = random_array(rng, (cp_size, NUM_DENSE_PAGES, *PAGE.shape), PAGE.dtype)
        b = tuple(
            random_array(rng, (cp_size * NUM_DENSE_PAGES, *p.shape), p.dtype) for p in other_page
        )
        b = tuple(group.by_rank(x, cp_size) for x in b)

        def slow(x: Any, seed: int) -> Any:
            m = jnp.full((200, 200), seed, jnp.float32)
            return x + (m @ m).astype(x.dtype)[0, 0] * jnp.zeros((), x.dtype)

        def program(a: Any, b: Any, plans: Any) -> Any:
            ticket = symmkv.new_ticket(first, second)
            for plan in plans:
                if me == 0:  # its heap a is late, the other rank's is early, and b in turn
                    a = slow(a, 2)
                a, ticket = symmkv.compose(a, plan, ticket, heap=first)
                if me == 1:
                    b = jax.lax.optimization_barrier((slow(a, 3), b))[1]
                b, ticket = group.three_calls(b, plan, ticket, heap=second)
                a, ticket = symmkv.compose(a + jnp.uint32(me), plan, ticket, heap=first)
            return a, b

        wanted_a, wanted_b = a, b
        for plan in kinds:
            wanted_a = composed(wanted_a, plan)
            wanted_b = tuple(composed(x, plan) for x in wanted_b)
            wanted_a = wanted_a + np.arange(cp_size, dtype=np.uint32).reshape(-1, 1, 1)
            wanted_a = composed(wanted_a, plan)
        got = jax.jit(program)(a[me], tuple(x[me] for x in b), kinds)
        group.assert_shards(got, (wanted_a[me], tuple(x[me] for x in wanted_b)), "two heaps")
        first.check()
        second.check()


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, devices_per_rank", [(2, 1), (1, 2), (2, 2)])
def test_exchange_in_loops_and_branches_is_exact(ranks: int, devices_per_rank: int) -> None:
    run_ranks_of(
        __file__,
        "check_control_flow",
        ranks=ranks,
        devices_per_rank=devices_per_rank,
        timeout_s=120,
    )


@pytest.mark.parametrize("ranks, devices_per_rank", [(2, 1), (2, 2)])
def test_many_programs_in_flight_are_exact(ranks: int, devices_per_rank: int) -> None:
    run_ranks_of(
        __file__, "check_in_flight", ranks=ranks, devices_per_rank=devices_per_rank, timeout_s=120
    )


def test_one_ticket_orders_two_heaps_in_programs_that_differ() -> None:
    run_ranks_of(__file__, "check_two_heaps", ranks=2)

"""What only a run can show: a heap closed after tracing, a permuted mesh, a plan that was tampered with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from tests import group
from tests.reference import MAX_CURRENT_PAGES, NUM_DENSE_PAGES, batches, composed, random_array
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=4)

PAGE = jax.ShapeDtypeStruct((4,), jnp.float32)


def make_heap(cp_size: int) -> symmkv.SymmetricHeap:
    mesh = group.cpu_mesh((cp_size,))
    return symmkv.SymmetricHeap(
        mesh, "cp", page=PAGE, max_current_pages=MAX_CURRENT_PAGES, timeout_s=20.0
    )


@pytest.fixture
def heap() -> Iterator[symmkv.SymmetricHeap]:
    with make_heap(2) as heap:
        yield heap


@pytest.fixture(scope="module", autouse=True)
def last_program_succeeds() -> Iterator[None]:
    """At exit JAX reports every device whose last program with side effects has failed."""
    yield
    with make_heap(2) as heap:
        dense, wanted, plan = operands(heap)
        result = group.sharded(group.compose_body(heap), heap)(dense, plan)
        group.assert_shards(result, wanted, "the last program")


def operands(heap: symmkv.SymmetricHeap) -> tuple[Any, Any, symmkv.ComposePlan]:
    """The dense buffer, what it must become, and the plan."""
    rng = np.random.default_rng(5)
    plan = batches(heap.cp_size, rng)["full and scattered"]
    dense = random_array(rng, (heap.cp_size * NUM_DENSE_PAGES, 4), np.float32)
    wanted = composed(group.by_rank(dense, heap.cp_size), plan).reshape(dense.shape)
    return group.put(dense, heap.mesh, P("cp")), wanted, plan


def run(program: Any, *args: Any) -> Any:
    return jax.block_until_ready(program(*args))


@pytest.mark.parametrize("name", ["compose", "three calls"])
def test_heap_closed_after_tracing_is_an_error_at_run_time(
    heap: symmkv.SymmetricHeap, name: str
) -> None:
    dense, wanted, plan = operands(heap)
    program = group.sharded(group.BODIES[name](heap), heap)
    group.assert_shards(run(program, dense, plan), wanted, name)
    heap.close()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"new_ticket: heap .* is closed.*keep the heap open"
    ):
        run(program, dense, plan)
    # A heap of the same geometry is another heap.
    with make_heap(2) as successor:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"new_ticket: heap .* is closed"):
            run(program, dense, plan)
        program = group.sharded(group.BODIES[name](successor), successor)
        group.assert_shards(run(program, dense, plan), wanted, f"{name}, of the successor")
        successor.check()


@pytest.mark.parametrize("call", ["publish", "barrier", "gather", "compose"])
def test_every_call_on_a_closed_heap_is_an_error_at_run_time(
    heap: symmkv.SymmetricHeap, call: str
) -> None:
    """With a ticket from an earlier program there is no guard before it."""
    dense, _, plan = operands(heap)

    def body(dense: Any, plan: Any, ticket: jax.Array) -> Any:
        if call == "barrier":
            return symmkv.barrier(ticket, heap=heap)
        result = getattr(symmkv, call)(dense, plan, ticket, heap=heap)
        return result if call == "publish" else result[1]

    mapped = jax.shard_map(
        body, mesh=heap.mesh, in_specs=(P("cp"), P(), P("cp")), out_specs=P("cp")
    )
    ticket = group.put(np.zeros((2,), np.int32), heap.mesh, P("cp"))
    compiled = jax.jit(mapped).lower(dense, plan, ticket).compile()
    heap.close()
    name = "exchange" if call == "compose" else call
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{name}: heap .* is closed"):
        run(compiled, dense, plan, ticket)


def test_mesh_that_permutes_the_devices_is_refused_by_new_ticket(
    heap: symmkv.SymmetricHeap,
) -> None:
    dense, _, plan = operands(heap)
    permuted = group.cpu_mesh((2,), devices=list(heap.mesh.devices[::-1]))
    mapped = jax.shard_map(
        group.compose_body(heap), mesh=permuted, in_specs=(P("cp"), P()), out_specs=P("cp")
    )
    dense = group.put(np.asarray(dense), permuted, P("cp"))
    text = (
        "new_ticket.* this device has index [01] in the program's mesh; use the mesh that the heap"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        run(jax.jit(mapped), dense, plan)
    with pytest.raises(symmkv.PeerError, match=text) as caught:
        heap.check()
    assert caught.value.phase == "new_ticket"


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("current_page", NUM_DENSE_PAGES, "slot 0 has dense page 41, must be below 41"),
        ("current_page", -1, "slot 0 has dense page -1, must be below 41"),
        ("current_writer", 2, "slot 0 has writer 2, must be below 2"),
        ("num_current", MAX_CURRENT_PAGES + 1, "the plan has 24 current pages.* hold 23"),
        ("num_current", -1, "the plan has -1 current pages"),
    ],
)
def test_plan_out_of_range_is_an_error_and_touches_nothing(
    heap: symmkv.SymmetricHeap, field: str, value: int, text: str
) -> None:
    dense, _, plan = operands(heap)
    tampered = jax.tree.map(np.copy, plan)
    getattr(tampered, field)[0] = value
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"exchange 1: rank [01]: {text}"):
        run(group.sharded(group.compose_body(heap), heap), dense, tampered)
    with pytest.raises(symmkv.PeerError, match=text) as caught:
        heap.check()
    assert (caught.value.epoch, caught.value.phase) == (1, "exchange")
    # Poisoned: the next call fails at once, with the same first cause.
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        run(group.sharded(group.compose_body(heap), heap), dense, plan)


@pytest.mark.parametrize(
    "calls, text",
    [
        (("gather",), "gather .*no publish in this exchange; call publish, barrier, gather"),
        (("publish", "gather"), "gather .*no barrier since publish"),
        (("publish", "publish"), "publish .*published already in this exchange; call barrier"),
        (("publish", "barrier", "gather", "gather"), None),
        (("barrier", "publish", "barrier", "gather"), None),
    ],
)
def test_calls_in_the_wrong_order_are_an_error(
    heap: symmkv.SymmetricHeap, calls: tuple[str, ...], text: str | None
) -> None:
    dense, wanted, plan = operands(heap)

    def body(dense: Any, plan: Any) -> Any:
        ticket = symmkv.new_ticket(heap)
        for call in calls:
            if call == "barrier":
                ticket = symmkv.barrier(ticket, heap=heap)
            elif call == "publish":
                ticket = symmkv.publish(dense, plan, ticket, heap=heap)
            else:
                dense, ticket = symmkv.gather(dense, plan, ticket, heap=heap)
        return dense, ticket

    mapped = jax.shard_map(body, mesh=heap.mesh, in_specs=(P("cp"), P()), out_specs=P("cp"))
    if text is None:
        group.assert_shards(run(jax.jit(mapped), dense, plan)[0], wanted, str(calls))
        heap.check()
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            run(jax.jit(mapped), dense, plan)


@pytest.mark.parametrize("call", ["barrier", "publish", "compose"])
def test_calls_whose_results_nobody_uses_are_made(heap: symmkv.SymmetricHeap, call: str) -> None:
    """Neither dropped, nor merged, nor hoisted out of a loop, though nothing else depends on them."""
    dense, _, plan = operands(heap)

    def body(dense: Any, plan: Any) -> Any:
        def step(_: Any, count: Any) -> Any:
            ticket = symmkv.new_ticket(heap)
            if call == "compose":
                symmkv.compose(dense, plan, ticket, heap=heap)
            else:
                if call == "publish":
                    ticket = symmkv.publish(dense, plan, ticket, heap=heap)
                symmkv.barrier(ticket, heap=heap)
            return count + 1

        return jax.lax.fori_loop(0, 5, step, jnp.zeros((1,), jnp.int32))

    mapped = jax.shard_map(
        body, mesh=heap.mesh, in_specs=(P("cp"), P()), out_specs=P("cp"), check_vma=False
    )
    assert run(jax.jit(mapped), dense, plan).tolist() == [5, 5]
    assert [context.epoch for context in heap._contexts.values()] == [5, 5]
    heap.check()


def test_guard_whose_ticket_nobody_uses_fails_the_program(heap: symmkv.SymmetricHeap) -> None:
    def body(x: Any) -> Any:
        symmkv.new_ticket(heap)
        return x

    mapped = jax.jit(jax.shard_map(body, mesh=heap.mesh, in_specs=P("cp"), out_specs=P("cp")))
    x = group.put(np.zeros((2,), np.int32), heap.mesh, P("cp"))
    run(mapped, x)
    heap.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"new_ticket: heap .* is closed"):
        run(mapped, x)


def test_process_local_jit_of_a_group_of_one_needs_no_shard_map() -> None:
    with make_heap(1) as heap:
        dense, wanted, plan = operands(heap)
        result = run(jax.jit(group.compose_body(heap)), np.asarray(dense), plan)
        group.assert_shards(result, wanted, "process-local")

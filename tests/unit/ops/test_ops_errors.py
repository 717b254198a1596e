"""Misuse of the calls: a Python error at trace time, in the package's words, and the heap goes on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
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

CP = 2
PAGE = jax.ShapeDtypeStruct((2, 8), jnp.float32)
PLAN = batches(CP, np.random.default_rng(0))["full and scattered"]
DENSE = random_array(np.random.default_rng(1), (CP * NUM_DENSE_PAGES, 2, 8), np.float32)
SHAPE = jax.ShapeDtypeStruct(DENSE.shape, DENSE.dtype)

Exchange = Callable[..., tuple[Any, jax.Array]]
EXCHANGES: dict[str, Exchange] = {"compose": symmkv.compose, "publish": group.three_calls}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[symmkv.SymmetricHeap, Callable[..., Any]]]:
    mesh = group.cpu_mesh((CP,))
    with symmkv.SymmetricHeap(mesh, "cp", page=PAGE, max_current_pages=MAX_CURRENT_PAGES) as heap:
        yield heap, group.sharded(group.compose_body(heap), heap)


@pytest.fixture
def heap(shared: Any) -> Iterator[symmkv.SymmetricHeap]:
    """A heap that must be usable after the test, too."""
    heap, program = shared
    yield heap
    result = program(group.put(DENSE, heap.mesh, P("cp")), PLAN)
    wanted = composed(group.by_rank(DENSE, CP), PLAN).reshape(DENSE.shape)
    group.assert_shards(result, wanted, "after the error")
    heap.check()


def refuses(
    error: type[Exception],
    text: str,
    heap: symmkv.SymmetricHeap,
    *,
    body: group.Body | None = None,
    dense: Any = SHAPE,
    plan: Any = PLAN,
    **kwargs: Any,
) -> None:
    with pytest.raises(error, match=text):
        group.sharded(body or group.compose_body(heap), heap, **kwargs).trace(dense, plan)


# --- transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", EXCHANGES)
def test_vmap_inside_and_outside_of_shard_map_is_refused(
    heap: symmkv.SymmetricHeap, op: str
) -> None:
    def call(dense: Any, plan: Any) -> Any:
        return EXCHANGES[op](dense, plan, symmkv.new_ticket(heap), heap=heap)[0]

    text = f"^{op}: vmap over an exchange is not supported.*put the batch into the pages"
    batch = jax.ShapeDtypeStruct((3, *SHAPE.shape), SHAPE.dtype)
    for check_vma in (True, False):
        outside = jax.vmap(group.sharded(call, heap, check_vma=check_vma), in_axes=(0, None))
        with pytest.raises(TypeError, match=text):
            jax.jit(outside).trace(batch, PLAN)
        inside = jax.vmap(call, in_axes=(0, None))
        kwargs = {"spec": P(None, "cp"), "check_vma": check_vma}
        refuses(TypeError, text, heap, body=inside, dense=batch, **kwargs)


def test_vmap_of_barrier_is_refused(heap: symmkv.SymmetricHeap) -> None:
    def body(dense: Any, plan: Any) -> Any:
        tickets = jnp.stack([symmkv.new_ticket(heap)] * 2)
        return jax.vmap(lambda ticket: symmkv.barrier(ticket, heap=heap))(tickets)

    refuses(TypeError, "^barrier: vmap over an exchange", heap, body=body)


def in_scan(exchange: Exchange, heap: symmkv.SymmetricHeap, dense: Any) -> Any:
    def step(carry: Any, _: None) -> tuple[Any, None]:
        return exchange(carry[0], PLAN, carry[1], heap=heap), None

    return jax.lax.scan(step, (dense, symmkv.new_ticket(heap)), None, length=2)[0][0]


@pytest.mark.parametrize("op", EXCHANGES)
def test_grad_through_jit_scan_and_shard_map_is_refused(
    heap: symmkv.SymmetricHeap, op: str
) -> None:
    exchange = EXCHANGES[op]

    def once(dense: Any) -> Any:
        return exchange(dense, PLAN, symmkv.new_ticket(heap), heap=heap)[0]

    text = f"^{op}: an exchange is not differentiable.*stop_gradient"
    for body in (once, jax.jit(once), lambda dense: in_scan(exchange, heap, dense)):
        for check_vma in (True, False):
            mapped = jax.shard_map(
                body, mesh=heap.mesh, in_specs=P("cp"), out_specs=P("cp"), check_vma=check_vma
            )
            for loss in (mapped, jax.jit(mapped)):
                with pytest.raises(TypeError, match=text):
                    jax.eval_shape(jax.grad(lambda d, loss=loss: loss(d).sum()), SHAPE)
        within = jax.grad(lambda dense, body=body: body(dense).sum())
        refuses(TypeError, text, heap, body=lambda dense, plan, within=within: within(dense))


def test_stop_gradient_on_the_operand_is_the_remedy_for_grad(heap: symmkv.SymmetricHeap) -> None:
    def loss(scale: jax.Array, dense: Any) -> Any:
        stopped = jax.lax.stop_gradient(dense * scale)
        whole = in_scan(symmkv.compose, heap, stopped)
        return (whole * scale).sum()[None]

    mapped = jax.shard_map(
        loss, mesh=heap.mesh, in_specs=(P(), P("cp")), out_specs=P("cp"), check_vma=False
    )
    ones = np.ones_like(DENSE)
    gradient = jax.jit(jax.grad(lambda s: mapped(s, ones).sum()))(jnp.float32(2.0))
    assert gradient == 2 * ones.size  # not that of the scale inside


# --- operands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dense, text",
    [
        (jax.ShapeDtypeStruct((CP * 40, 2, 8), jnp.float32), r"float32\[41, 2, 8\].*\[40, 2, 8\]"),
        (jax.ShapeDtypeStruct((CP * 41, 8, 2), jnp.float32), r"float32\[41, 2, 8\].*\[41, 8, 2\]"),
        (jax.ShapeDtypeStruct((CP * 41, 16), jnp.float32), r"float32\[41, 2, 8\].*\[41, 16\]"),
        (jax.ShapeDtypeStruct((CP * 41, 2, 8), jnp.int32), r"float32\[41, 2, 8\].*int32\["),
        ((SHAPE,), "dense must be one array, like the page of the heap, got tuple"),
        ([SHAPE], r"dense must be float32\[41, 2, 8\].*got list"),
    ],
)
def test_dense_that_does_not_fit_the_page_is_refused(
    heap: symmkv.SymmetricHeap, dense: Any, text: str
) -> None:
    for op, exchange in EXCHANGES.items():

        def body(dense: Any, plan: Any, exchange: Exchange = exchange) -> Any:
            return exchange(dense, plan, symmkv.new_ticket(heap), heap=heap)[0]

        refuses(TypeError, f"^{op}: .*{text}", heap, body=body, dense=dense)


def test_plan_with_prefix_pages_is_refused(heap: symmkv.SymmetricHeap) -> None:
    plan = symmkv.build_plan(
        [2],
        [4],
        page_size=2,
        cp_size=CP,
        max_current_pages=MAX_CURRENT_PAGES,
        max_prefix_pages=3,
        num_dense_pages=NUM_DENSE_PAGES,
        prefix_owner=[1],
        prefix_pool_page=[0],
    )
    for op, exchange in EXCHANGES.items():

        def body(dense: Any, plan: Any, exchange: Exchange = exchange) -> Any:
            return exchange(dense, plan, symmkv.new_ticket(heap), heap=heap)[0]

        text = f"^{op}: .*room for 3 prefix pages; pass max_prefix_pages=0"
        refuses(symmkv.PlanError, text, heap, body=body, plan=plan)


def test_gather_checks_its_own_operands(heap: symmkv.SymmetricHeap) -> None:
    def body(dense: Any, plan: Any) -> Any:
        return symmkv.gather(dense[1:], plan, symmkv.new_ticket(heap), heap=heap)[0]

    refuses(TypeError, r"^gather: dense must be float32\[41, 2, 8\].*\[40, 2, 8\]", heap, body=body)


def test_tuples_that_differ_from_the_page_are_refused() -> None:
    pages = (PAGE, jax.ShapeDtypeStruct((16,), jnp.uint8))
    second = jax.ShapeDtypeStruct((CP * NUM_DENSE_PAGES, 16), jnp.uint8)
    with symmkv.SymmetricHeap(
        group.cpu_mesh((CP,)), "cp", page=pages, max_current_pages=MAX_CURRENT_PAGES
    ) as heap:
        refuses(TypeError, "dense must be a tuple of buffers", heap, dense=SHAPE)
        refuses(TypeError, "dense must have 2 buffers, got 1", heap, dense=(SHAPE,))
        refuses(TypeError, "dense must have 2 buffers, got 3", heap, dense=(SHAPE, second, SHAPE))
        refuses(TypeError, r"dense must be float32\[.*got uint8\[", heap, dense=(second, SHAPE))


@pytest.mark.parametrize(
    "ticket, text",
    [
        (np.zeros((1,), np.float32), r"float32\[1\]"),
        (np.zeros((2,), np.int32), r"int32\[2\]"),
        (np.zeros((), np.int32), r"int32\[\]"),
        (0, "int"),
        (None, "NoneType"),
    ],
)
def test_ticket_of_another_type_is_refused(
    heap: symmkv.SymmetricHeap, ticket: Any, text: str
) -> None:
    required = r": ticket must be the int32\[1\] of new_ticket or of the call before, got "
    calls = {
        "compose": lambda d, p: symmkv.compose(d, p, ticket, heap=heap),
        "publish": lambda d, p: symmkv.publish(d, p, ticket, heap=heap),
        "barrier": lambda d, p: symmkv.barrier(ticket, heap=heap),
        "gather": lambda d, p: symmkv.gather(d, p, ticket, heap=heap),
    }
    for op, call in calls.items():
        refuses(TypeError, f"^{op}{required}{text}", heap, body=call)


def test_plan_of_another_group_or_heap_is_refused(heap: symmkv.SymmetricHeap) -> None:
    lens = {"page_size": 4, "num_dense_pages": NUM_DENSE_PAGES}
    wrong_cp = symmkv.build_plan([0], [4], cp_size=3, max_current_pages=MAX_CURRENT_PAGES, **lens)
    refuses(
        symmkv.PlanError,
        r"^compose: the plan is for cp_size 3, the heap has 2; pass cp_size=heap.cp_size",
        heap,
        plan=wrong_cp,
    )
    too_large = symmkv.build_plan([0], [4], cp_size=CP, max_current_pages=24, **lens)
    refuses(
        symmkv.PlanError,
        r"^compose: the plan has room for 24 .*the heap for 23; pass max_current_pages=heap\.max",
        heap,
        plan=too_large,
    )
    refuses(
        TypeError,
        "^compose: plan must be a ComposePlan, got dict",
        heap,
        plan={f.name: np.zeros(1, np.int32) for f in dataclasses.fields(PLAN)},
    )


def test_plan_that_varies_where_dense_does_not_is_refused() -> None:
    """The result would be typed as replicated over dp, with other bytes on each."""
    mesh = group.cpu_mesh((2, 2), ("dp", "cp"))
    plans = jax.tree.map(lambda *leaves: np.concatenate(leaves), PLAN, PLAN)
    text = r"dense must vary over \('dp',\), since the plan does; .*pcast"
    with symmkv.SymmetricHeap(mesh, "cp", page=PAGE, max_current_pages=MAX_CURRENT_PAGES) as heap:
        refuses(TypeError, f"^compose: {text}", heap, plan=plans, plan_spec=P("dp"))

        def remedied(dense: Any, plan: Any) -> Any:
            dense = jax.lax.pcast(dense, ("dp",), to="varying")
            return group.compose_body(heap)(dense, plan)[None]

        mapped = jax.shard_map(
            remedied, mesh=mesh, in_specs=(P("cp"), P("dp")), out_specs=P("dp", "cp")
        )
        jax.jit(mapped).trace(SHAPE, plans)


def test_heap_argument_of_another_type_is_refused(heap: symmkv.SymmetricHeap) -> None:
    with pytest.raises(TypeError, match="new_ticket: needs the heaps that the program uses"):
        symmkv.new_ticket()
    with pytest.raises(TypeError, match="new_ticket: heap must be a SymmetricHeap, got str"):
        symmkv.new_ticket("cp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="barrier: heap must be a SymmetricHeap, got NoneType"):
        symmkv.barrier(jnp.zeros((1,), jnp.int32), heap=None)  # type: ignore[arg-type]


def test_fallback_refuses_what_the_mapped_heap_refuses() -> None:
    """So that a program that was written on a laptop can't fail first where memory is mapped."""
    with symmkv.SymmetricHeap(
        group.cpu_mesh((CP,)),
        "cp",
        page=PAGE,
        max_current_pages=MAX_CURRENT_PAGES,
        transport="collective",
    ) as heap:
        batch = jax.ShapeDtypeStruct((3, *SHAPE.shape), SHAPE.dtype)
        for exchange in EXCHANGES.values():

            def call(dense: Any, plan: Any, exchange: Exchange = exchange) -> Any:
                return exchange(dense, plan, symmkv.new_ticket(heap), heap=heap)[0]

            vmapped = jax.vmap(call, in_axes=(0, None))
            text = "vmap over an exchange is not supported"
            refuses(TypeError, text, heap, body=vmapped, dense=batch, spec=P(None, "cp"))
            grad = jax.grad(lambda dense, plan, call=call: call(dense, plan).sum())
            refuses(TypeError, "an exchange is not differentiable", heap, body=grad)
            wrong = jax.ShapeDtypeStruct(SHAPE.shape, jnp.int32)
            refuses(TypeError, r"dense must be float32\[", heap, body=call, dense=wrong)

        def barriers(dense: Any, plan: Any) -> Any:
            tickets = jnp.stack([symmkv.new_ticket(heap)] * 2)
            return jax.vmap(lambda ticket: symmkv.barrier(ticket, heap=heap))(tickets)

        refuses(TypeError, "^barrier: vmap over an exchange", heap, body=barriers)
    refuses(symmkv.HeapError, "the heap is closed", heap)


# --- the program around the call -----------------------------------------------------------------


def test_call_outside_of_shard_map_is_refused(heap: symmkv.SymmetricHeap) -> None:
    text = r"axis 'cp' is not bound; call it inside a jax.shard_map.*here are 2, and 'shm'"
    with pytest.raises(symmkv.HeapError, match=f"^new_ticket: {text}"):
        jax.jit(group.compose_body(heap)).trace(SHAPE, PLAN)
    with pytest.raises(symmkv.HeapError, match=f"^compose: {text}"):
        symmkv.compose(DENSE, PLAN, jnp.zeros((1,), jnp.int32), heap=heap)


def test_partly_manual_mesh_is_refused() -> None:
    mesh = group.cpu_mesh((2, 2), ("cp", "tp"))
    with symmkv.SymmetricHeap(mesh, "cp", page=PAGE, max_current_pages=MAX_CURRENT_PAGES) as heap:
        for axis in ("cp", "tp"):
            mapped = jax.shard_map(
                group.compose_body(heap),
                mesh=mesh,
                in_specs=(P(axis), P()),
                out_specs=P(axis),
                axis_names={axis},
                check_vma=False,
            )
            has = re.escape(str((axis,)))
            text = f"^new_ticket: every axis of the mesh must be manual.* it has {has}. Leave axis_names"
            with pytest.raises(symmkv.HeapError, match=text):
                jax.jit(mapped).trace(SHAPE, PLAN)


def test_heap_from_another_mesh_is_refused(heap: symmkv.SymmetricHeap) -> None:
    text = r"^new_ticket: the heap is from another mesh: {'cp': 2}, the program's is {'cp': 4}"
    mapped = jax.shard_map(
        group.compose_body(heap),
        mesh=group.cpu_mesh((4,)),
        in_specs=(P("cp"), P()),
        out_specs=P("cp"),
    )
    with pytest.raises(symmkv.HeapError, match=text):
        jax.jit(mapped).trace(jax.ShapeDtypeStruct((4 * 41, 2, 8), jnp.float32), PLAN)


def test_mesh_with_another_axis_is_refused(heap: symmkv.SymmetricHeap) -> None:
    text = r"^new_ticket: the heap is from another mesh: {'cp': 2}, the program's is {'x': 2}"
    mapped = jax.shard_map(
        group.compose_body(heap),
        mesh=group.cpu_mesh((CP,), ("x",)),
        in_specs=(P("x"), P()),
        out_specs=P("x"),
    )
    with pytest.raises(symmkv.HeapError, match=text):
        jax.jit(mapped).trace(SHAPE, PLAN)


def test_closed_heap_is_refused_at_trace_time() -> None:
    heap = symmkv.SymmetricHeap(
        group.cpu_mesh((CP,)), "cp", page=PAGE, max_current_pages=MAX_CURRENT_PAGES
    )
    heap.close()
    refuses(symmkv.HeapError, "^new_ticket: the heap is closed; create a new one", heap)

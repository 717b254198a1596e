"""compose and the three calls against the NumPy reference, on several devices of one process."""

from __future__ import annotations

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
    batches,
    composed,
    random_array,
)
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=5)

EXCHANGES = ("compose", "three calls")
# K, V, an index and more: one buffer each of the dtypes that move, none of the same page size.
MIXED = (
    jax.ShapeDtypeStruct((4, 2, 8), jnp.bfloat16),
    jax.ShapeDtypeStruct((4, 3, 8), jnp.bfloat16),
    jax.ShapeDtypeStruct((16,), jnp.uint8),
    jax.ShapeDtypeStruct((4, 12), jnp.float8_e4m3fn),
    jax.ShapeDtypeStruct((20,), jnp.float32),
    jax.ShapeDtypeStruct((2, 2, 6), jnp.int32),
    jax.ShapeDtypeStruct((112,), jnp.bool_),
    jax.ShapeDtypeStruct((4, 5), jnp.complex64),
)


def make_heap(cp_size: int, page: Any, **kwargs: Any) -> symmkv.SymmetricHeap:
    kwargs = {"max_current_pages": MAX_CURRENT_PAGES, "timeout_s": 30.0, **kwargs}
    return symmkv.SymmetricHeap(group.cpu_mesh((cp_size,)), "cp", page=page, **kwargs)


def make_dense(cp_size: int, page: Any, seed: int = 0, num_pages: int = NUM_DENSE_PAGES) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: random_array(rng, (cp_size * num_pages, *p.shape), p.dtype), page)


def expected(dense: Any, plan: symmkv.ComposePlan, cp_size: int) -> Any:
    return jax.tree.map(lambda d: composed(group.by_rank(d, cp_size), plan).reshape(d.shape), dense)


def check_batches(heap: symmkv.SymmetricHeap, page: Any, name: str, **kwargs: Any) -> None:
    """One compiled program over batches of every kind; the whole of every dense buffer is compared."""
    program = group.sharded(group.BODIES[name](heap), heap, **kwargs)
    cp_size = heap.cp_size
    for seed, (kind, plan) in enumerate(batches(cp_size, np.random.default_rng(1)).items()):
        dense = make_dense(cp_size, page, seed)
        given = group.put(dense, heap.mesh, P("cp"))
        group.assert_shards(program(given, plan), expected(dense, plan, cp_size), f"{name}, {kind}")
        if not kwargs.get("donate"):
            group.assert_shards(given, dense, f"{name}, {kind}: its operand")
    heap.check()


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_compose_of_every_group_size_is_exact(cp_size: int, name: str) -> None:
    page = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    with make_heap(cp_size, page) as heap:
        check_batches(heap, page, name)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", EXCHANGES)
def test_compose_of_a_tuple_moves_every_dtype_in_one_exchange(name: str, check_vma: bool) -> None:
    with make_heap(3, MIXED) as heap:
        check_batches(heap, MIXED, name, check_vma=check_vma, donate=True)


# Long copies stream past the caches and have tails; the largest pages make up a gather that streams.
@pytest.mark.parametrize("nbytes", [16, 48, 4112, 65536, 2**20 + 48])
def test_compose_of_every_page_size_is_exact(nbytes: int) -> None:
    cap, num_pages = (17, 19) if nbytes > 2**20 else (21, 30)
    page = jax.ShapeDtypeStruct((nbytes // 2,), jnp.bfloat16)
    plan = symmkv.build_plan(
        [4],
        [4 * cap - 1],
        page_size=4,
        cp_size=2,
        max_current_pages=cap,
        num_dense_pages=num_pages,
        dense_page=np.random.default_rng(2).permutation(num_pages)[: cap + 1],
    )
    dense = make_dense(2, page, num_pages=num_pages)
    with make_heap(2, page, max_current_pages=cap) as heap:
        for name in EXCHANGES:
            program = group.sharded(group.BODIES[name](heap), heap)
            result = program(group.put(dense, heap.mesh, P("cp")), plan)
            group.assert_shards(result, expected(dense, plan, 2), name)


def test_compose_takes_plans_and_buffers_smaller_than_the_heap() -> None:
    page = jax.ShapeDtypeStruct((4,), jnp.float32)
    dense = make_dense(2, page, num_pages=3)
    plan = symmkv.build_plan(
        [0], [3], page_size=1, cp_size=2, max_current_pages=3, num_dense_pages=3
    )
    with make_heap(2, page, max_current_pages=100) as heap:
        result = group.sharded(group.compose_body(heap), heap)(
            group.put(dense, heap.mesh, P("cp")), plan
        )
        group.assert_shards(result, expected(dense, plan, 2), "a short plan")


def test_compose_ignores_what_stands_in_the_padding() -> None:
    page = jax.ShapeDtypeStruct((4,), jnp.float32)
    plan = batches(2, np.random.default_rng(0))["one page"]
    count = int(plan.num_current[0])
    garbage = jax.tree.map(np.copy, plan)
    garbage.current_page[count:] = 10**9
    garbage.current_writer[count:] = 77
    dense = make_dense(2, page)
    with make_heap(2, page) as heap:
        program = group.sharded(group.compose_body(heap), heap)
        result = program(group.put(dense, heap.mesh, P("cp")), garbage)
        group.assert_shards(result, expected(dense, plan, 2), "padding")


@pytest.mark.parametrize("name", EXCHANGES)
def test_compose_exchanges_within_each_index_of_the_other_axes(name: str) -> None:
    """cp x tp with the heads over tp; and MLA's latent, of which every tp index has a copy."""
    mesh = group.cpu_mesh((3, 2), ("cp", "tp"))
    page = (jax.ShapeDtypeStruct((4, 2, 8), jnp.bfloat16), jax.ShapeDtypeStruct((48,), jnp.uint8))
    whole = (jax.ShapeDtypeStruct((4, 4, 8), jnp.bfloat16), page[1])
    spec = (P("cp", None, "tp"), P("cp"))
    with symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=MAX_CURRENT_PAGES) as heap:
        program = group.sharded(group.BODIES[name](heap), heap, spec=spec)
        for kind, plan in batches(3, np.random.default_rng(1)).items():
            dense = make_dense(3, whole)
            given = tuple(group.put(d, mesh, s) for d, s in zip(dense, spec, strict=True))
            group.assert_shards(program(given, plan), expected(dense, plan, 3), kind)


def test_compose_lets_each_group_have_its_own_batch() -> None:
    mesh = group.cpu_mesh((2, 3), ("dp", "cp"))
    page = jax.ShapeDtypeStruct((4,), jnp.float32)
    plans = list(batches(3, np.random.default_rng(1)).values())
    both = [plans[3], plans[5]]  # of differing page counts
    stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *both)
    dense = [make_dense(3, page, seed) for seed in range(2)]
    spec = P(("dp", "cp"))
    with symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=MAX_CURRENT_PAGES) as heap:
        program = group.sharded(group.compose_body(heap), heap, spec=spec, plan_spec=P("dp"))
        result = program(group.put(np.concatenate(dense), mesh, spec), stacked)
        wanted = [expected(d, plan, 3) for d, plan in zip(dense, both, strict=True)]
        group.assert_shards(result, np.concatenate(wanted), "two batches")


def test_one_ticket_serves_heaps_along_different_axes() -> None:
    mesh = group.cpu_mesh((2, 3), ("cp", "tp"))
    page = jax.ShapeDtypeStruct((4,), jnp.uint32)
    dense = make_dense(6, page)
    spec = P(("cp", "tp"))
    along_cp = batches(2, np.random.default_rng(1))["full and scattered"]
    along_tp = batches(3, np.random.default_rng(2))["full and scattered"]
    grid = dense.reshape(2, 3, NUM_DENSE_PAGES, 4)
    wanted = np.stack([composed(grid[:, tp], along_cp) for tp in range(3)], axis=1)
    wanted = np.stack([composed(wanted[cp], along_tp) for cp in range(2)])

    def body(dense: Any, plans: Any) -> Any:
        ticket = symmkv.new_ticket(cp_heap, tp_heap)
        dense, ticket = symmkv.compose(dense, plans[0], ticket, heap=cp_heap)
        return symmkv.compose(dense, plans[1], ticket, heap=tp_heap)[0]

    with (
        symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=MAX_CURRENT_PAGES) as cp_heap,
        symmkv.SymmetricHeap(mesh, "tp", page=page, max_current_pages=MAX_CURRENT_PAGES) as tp_heap,
    ):
        program = group.sharded(body, cp_heap, spec=spec)
        result = program(group.put(dense, mesh, spec), (along_cp, along_tp))
        group.assert_shards(result, wanted.reshape(dense.shape), "two axes")


def test_compose_of_one_array_as_two_buffers_is_exact() -> None:
    page = (jax.ShapeDtypeStruct((4,), jnp.uint32),) * 2
    plan = batches(2, np.random.default_rng(1))["full and scattered"]
    dense = make_dense(2, page[0])

    with make_heap(2, page) as heap:
        program = group.sharded(
            lambda d, plan: sum(group.compose_body(heap)((d, d), plan)), heap, donate=True
        )
        result = program(group.put(dense, heap.mesh, P("cp")), plan)
        group.assert_shards(result, expected(dense, plan, 2) * np.uint32(2), "twice the same")


def test_compose_on_an_explicit_mesh_is_exact() -> None:
    mesh = jax.make_mesh(
        (2,),
        ("cp",),
        axis_types=(jax.sharding.AxisType.Explicit,),
        devices=jax.devices("cpu")[:2],
    )
    page = jax.ShapeDtypeStruct((4,), jnp.float32)
    with symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=MAX_CURRENT_PAGES) as heap:
        check_batches(heap, page, "compose")


@pytest.mark.parametrize("transport", ["shm", "collective"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_compose_returns_the_types_of_its_inputs(transport: str, check_vma: bool) -> None:
    mesh = group.cpu_mesh((2, 2), ("cp", "tp"))
    page = (jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.bool_))
    spec = (P("cp", "tp"), P("cp"))
    types: list[Any] = []

    def body(dense: Any, plan: symmkv.ComposePlan) -> Any:
        ticket = symmkv.new_ticket(heap)
        for call in (symmkv.compose, group.three_calls):
            before = jax.tree.map(jax.typeof, (dense, ticket))
            dense, ticket = call(dense, plan, ticket, heap=heap)
            types.append((before, jax.tree.map(jax.typeof, (dense, ticket))))
        return dense

    with symmkv.SymmetricHeap(
        mesh, "cp", page=page, max_current_pages=MAX_CURRENT_PAGES, transport=transport
    ) as heap:
        program = group.sharded(body, heap, spec=spec, check_vma=check_vma)
        shapes = (
            jax.ShapeDtypeStruct((2 * NUM_DENSE_PAGES, 8), jnp.float32),
            jax.ShapeDtypeStruct((2 * NUM_DENSE_PAGES, 32), jnp.bool_),
        )
        program.trace(shapes, batches(2, np.random.default_rng(0))["full"])
    assert len(types) == 2
    for before, after in types:
        assert before == after

"""The exchange between processes, in every layout of ranks over processes and devices, byte for byte."""

from __future__ import annotations

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
from tests.run_rank import run_ranks_of

pytestmark = register_ci(suite="distributed", ranks=8, est_s=22)

PAGES = (
    jax.ShapeDtypeStruct((4, 2, 8), jnp.bfloat16),
    jax.ShapeDtypeStruct((48,), jnp.float8_e4m3fn),
    jax.ShapeDtypeStruct((4, 2, 3), jnp.complex64),
)
# The heads of each page, if any, are sharded over the axes beside the heap's.
HEADS_AXIS = (2, None, 2)


# --- what ranks execute --------------------------------------------------------------------------


def check_layout(shape: list[int], names: list[str], device_order: list[int] | None = None) -> None:
    """Batches of every kind, by compose and by the three calls, over a mesh of all devices."""
    devices = sorted(jax.devices(), key=lambda d: d.id)
    if device_order is not None:
        devices = [devices[i] for i in device_order]
    mesh = group.cpu_mesh(shape, names, devices)
    cp_size = mesh.shape["cp"]
    others = tuple(name for name in names if name != "cp")
    copies = mesh.size // cp_size
    spec, pages = [], []
    for page, axis in zip(PAGES, HEADS_AXIS, strict=True):
        spec.append(P("cp", *[None] * (axis - 1), others) if axis and others else P("cp"))
        whole = [n * copies if axis == i + 1 else n for i, n in enumerate(page.shape)]
        pages.append(jax.ShapeDtypeStruct(whole, page.dtype))
    heap = symmkv.SymmetricHeap(
        mesh, "cp", page=PAGES, max_current_pages=MAX_CURRENT_PAGES, transport="shm", timeout_s=40
    )
    assert heap.cp_size == cp_size
    for seed, (kind, plan) in enumerate(batches(cp_size, np.random.default_rng(1)).items()):
        rng = np.random.default_rng(seed)
        dense = tuple(
            random_array(rng, (cp_size * NUM_DENSE_PAGES, *p.shape), p.dtype) for p in pages
        )
        wanted = tuple(composed(group.by_rank(d, cp_size), plan).reshape(d.shape) for d in dense)
        for name, check_vma in (("compose", True), ("three calls", False)):
            program = programs(heap, name, tuple(spec), check_vma)
            given = tuple(group.put(d, mesh, s) for d, s in zip(dense, spec, strict=True))
            group.assert_shards(program(given, plan), wanted, f"{name}, {kind}")
    group.synchronise("done")
    heap.check()  # drained
    if heap.num_local_devices == 1:
        check_process_local(heap)
    heap.close()


_programs: dict[str, Any] = {}


def programs(heap: symmkv.SymmetricHeap, name: str, spec: Any, check_vma: bool) -> Any:
    """One compilation for all batches."""
    if name not in _programs:
        body = group.BODIES[name](heap)
        _programs[name] = group.sharded(body, heap, spec=spec, check_vma=check_vma, donate=True)
    return _programs[name]


def check_process_local(heap: symmkv.SymmetricHeap) -> None:
    """No shard_map; each process compiles a program of its own, for its own device."""
    rank = list(heap.mesh.devices.flat).index(jax.local_devices()[0])
    rng = np.random.default_rng(9)
    dense = tuple(
        random_array(rng, (heap.cp_size * NUM_DENSE_PAGES, *p.shape), p.dtype) for p in PAGES
    )
    by_rank = [group.by_rank(d, heap.cp_size) for d in dense]
    plan = batches(heap.cp_size, rng)["full and scattered"]
    for name in ("compose", "three calls"):
        program = jax.jit(group.BODIES[name](heap), donate_argnums=0)
        result = program(tuple(jnp.asarray(d[rank]) for d in by_rank), plan)
        wanted = tuple(composed(d, plan)[rank] for d in by_rank)
        group.assert_shards(result, wanted, f"process-local {name}")


def check_subset() -> None:
    """A heap of ranks 2 and 0, in this order; process 1 is not in the group."""
    mesh = group.cpu_mesh((2,), ("cp",), [jax.devices()[2], jax.devices()[0]])
    kwargs: dict[str, Any] = {"page": PAGES[0], "max_current_pages": MAX_CURRENT_PAGES}
    if jax.process_index() == 1:
        with pytest.raises(symmkv.HeapError, match="process 1 drives no device of the mesh"):
            symmkv.SymmetricHeap(mesh, "cp", **kwargs)
        return
    with symmkv.SymmetricHeap(mesh, "cp", transport="shm", **kwargs) as heap:
        rng = np.random.default_rng(3)
        dense = random_array(rng, (2 * NUM_DENSE_PAGES, *PAGES[0].shape), PAGES[0].dtype)
        plan = batches(2, rng)["full and scattered"]
        result = group.sharded(group.compose_body(heap), heap)(
            group.put(dense, mesh, P("cp")), plan
        )
        wanted = composed(group.by_rank(dense, 2), plan).reshape(dense.shape)
        group.assert_shards(result, wanted, "a subset")


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks, devices_per_rank, layout",
    [
        pytest.param(2, 1, {"shape": [2], "names": ["cp"]}, id="a device a process"),
        pytest.param(
            3, 1, {"shape": [3], "names": ["cp"], "device_order": [2, 0, 1]}, id="permuted"
        ),
        pytest.param(8, 1, {"shape": [8], "names": ["cp"]}, id="more ranks than cores"),
        pytest.param(
            2,
            2,
            {"shape": [4], "names": ["cp"], "device_order": [0, 2, 1, 3]},
            id="mixture",
        ),
        pytest.param(2, 2, {"shape": [2, 2], "names": ["cp", "tp"]}, id="cp across processes"),
        pytest.param(2, 2, {"shape": [2, 2], "names": ["tp", "cp"]}, id="cp within processes"),
    ],
)
def test_exchange_of_every_layout_is_exact(
    ranks: int, devices_per_rank: int, layout: dict[str, Any]
) -> None:
    run_ranks_of(
        __file__,
        "check_layout",
        ranks=ranks,
        devices_per_rank=devices_per_rank,
        timeout_s=120,
        **layout,
    )


def test_group_may_be_a_subset_of_the_processes_in_any_order() -> None:
    run_ranks_of(__file__, "check_subset", ranks=3)

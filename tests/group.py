"""Meshes, global arrays and programs for tests of the exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_symmkv as symmkv
from jax_symmkv import ComposePlan, SymmetricHeap, compat
from tests.reference import Array, assert_same_bytes

Body = Callable[..., Any]


def cpu_mesh(
    shape: Sequence[int] | None = None,
    names: Sequence[str] = ("cp",),
    devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
    """A mesh of CPU devices, all of them by default; the device order is the given one."""
    devices = jax.devices("cpu") if devices is None else devices
    shape = (len(devices),) if shape is None else tuple(shape)
    return jax.sharding.Mesh(np.array(devices)[: math.prod(shape)].reshape(shape), tuple(names))


def put(values: Any, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> Any:
    """Global arrays of NumPy arrays that every process has."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda v: jax.make_array_from_callback(v.shape, sharding, lambda index: v[index].copy()),
        values,
    )


def assert_shards(actual: Any, expected: Any, what: str) -> None:
    """This process's shards of the global arrays, byte for byte."""
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        for shard in got.addressable_shards:
            assert_same_bytes(np.asarray(shard.data), want[shard.index], f"{what}, {shard.device}")


def by_rank(dense: Array, cp_size: int) -> Array:
    """[cp * num_dense_pages, ...], as shard_map shards it, as [cp, num_dense_pages, ...]."""
    return dense.reshape(cp_size, -1, *dense.shape[1:])


def synchronise(name: str) -> None:
    """Waits for all processes, through the coordination service alone; each name serves once."""
    client = compat.coordination_client()
    assert client is not None
    client.wait_at_barrier(name, 60_000)


# --- bodies: (dense, plan) -> dense --------------------------------------------------------------


def compose_body(heap: SymmetricHeap) -> Body:
    def body(dense: Any, plan: ComposePlan) -> Any:
        return symmkv.compose(dense, plan, symmkv.new_ticket(heap), heap=heap)[0]

    return body


def three_calls(
    dense: Any, plan: ComposePlan, ticket: jax.Array, *, heap: SymmetricHeap
) -> tuple[Any, jax.Array]:
    """What compose does in one call."""
    ticket = symmkv.publish(dense, plan, ticket, heap=heap)
    ticket = symmkv.barrier(ticket, heap=heap)
    return symmkv.gather(dense, plan, ticket, heap=heap)


def slowly(dense: Any) -> Any:
    """The same, after about half a second of work."""
    ones = jnp.ones((256, 256), jnp.float32)
    after = jax.lax.fori_loop(0, 500, lambda _, x: (x @ ones) / 256, ones)
    return jnp.where(after[0, 0] > 1, jnp.zeros_like(dense), dense)  # never, as XLA can't know


def three_calls_body(heap: SymmetricHeap) -> Body:
    return lambda dense, plan: three_calls(dense, plan, symmkv.new_ticket(heap), heap=heap)[0]


def collective_body(heap: SymmetricHeap) -> Body:
    return lambda dense, plan: symmkv.collective_compose(dense, plan, axis_name=heap.axis_name)


BODIES = {
    "compose": compose_body,
    "three calls": three_calls_body,
    "collective_compose": collective_body,
}


def sharded(
    body: Body,
    heap: SymmetricHeap,
    *,
    spec: Any = None,
    plan_spec: Any = None,
    check_vma: bool = True,
    donate: bool = False,
) -> Callable[..., Any]:
    """The body under jit and a shard_map over the heap's mesh."""
    spec = PartitionSpec(heap.axis_name) if spec is None else spec
    in_specs = (spec, PartitionSpec() if plan_spec is None else plan_spec)
    mapped = jax.shard_map(
        body, mesh=heap.mesh, in_specs=in_specs, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(mapped, donate_argnums=(0,) if donate else ())

"""collective_compose between processes: XLA's collectives may sum, but no byte may change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from tests import group
from tests.reference import NUM_DENSE_PAGES, batches, composed, random_array
from tests.registry import register_ci
from tests.run_rank import run_ranks_of

pytestmark = register_ci(suite="distributed", ranks=3, est_s=6)

DTYPES = ("bfloat16", "float8_e4m3fn", "uint8", "float32", "int32", "bool", "complex64")


def check_collective() -> None:
    mesh = group.cpu_mesh()
    cp_size = mesh.size

    def body(dense: tuple[jax.Array, ...], plan: symmkv.ComposePlan) -> tuple[jax.Array, ...]:
        return symmkv.collective_compose(dense, plan, axis_name="cp")

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("cp"), P()), out_specs=P("cp")))
    for seed, (kind, plan) in enumerate(batches(cp_size, np.random.default_rng(1)).items()):
        rng = np.random.default_rng(seed)
        dense = tuple(
            random_array(rng, (cp_size * NUM_DENSE_PAGES, 3, 16), jnp.dtype(d)) for d in DTYPES
        )
        wanted = tuple(composed(group.by_rank(d, cp_size), plan).reshape(d.shape) for d in dense)
        group.assert_shards(program(group.put(dense, mesh, P("cp")), plan), wanted, kind)


def test_collective_compose_between_processes_is_exact() -> None:
    run_ranks_of(__file__, "check_collective", ranks=3)

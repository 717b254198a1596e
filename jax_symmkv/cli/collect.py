"""What the ranks tell each other about a run, outside of the programs under test.

These are XLA collectives: block on the results of every exchange before, and on these before the next
one. The ticket doesn't order them, and ranks that wait in different places never meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def make_rank_sum(mesh: Mesh) -> Callable[[jax.Array], Any]:
    """Jits the sum over ranks of an array sharded over its leading axis, replicated."""

    def rank_sum(x: jax.Array) -> Any:
        return jax.lax.psum(x, "cp")

    return jax.jit(jax.shard_map(rank_sum, mesh=mesh, in_specs=P("cp"), out_specs=P()))


def make_meeting(mesh: Mesh) -> Callable[[], None]:
    """A function that returns when every rank has called it, so that clocks start together."""
    one = jax.make_array_from_callback(
        (mesh.size,), jax.NamedSharding(mesh, P("cp")), lambda _: np.ones(1, np.int32)
    )
    rank_sum = make_rank_sum(mesh)

    def meet() -> None:
        jax.block_until_ready(rank_sum(one))

    return meet


def from_every_process(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Every process's array, stacked: float32 [processes, ...]."""
    gathered = np.asarray(multihost_utils.process_allgather(values))
    return gathered.reshape(jax.process_count(), *values.shape)

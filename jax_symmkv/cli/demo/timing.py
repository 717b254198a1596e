"""What one exchange costs, in programs that do nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from jax_symmkv.cli import collect
from jax_symmkv.cli.demo.prefill import Compose, Dense

_LOOP_EXCHANGES = 16
_REPEATS = 3


class ExchangeTimer:
    """Times compose and the collective path on a batch's plan, alternating."""

    def __init__(self, mesh: Mesh, compose: Compose) -> None:
        self._meet = collect.make_meeting(mesh)
        self._compose_loop = _make_compose_loop(mesh, compose)
        self._collective_loop = _make_collective_loop(mesh)

    def time(
        self, dense: Dense, plan: symmkv.ComposePlan, ticket: jax.Array
    ) -> tuple[Dense, jax.Array, npt.NDArray[np.float32]]:
        """Called on every rank; takes dense and ticket, and returns them.

        Returns:
          dense, ticket, and float32 [repeats, 2]: µs an exchange on this rank, by compose and by the
          collective path.
        """
        times_us = np.empty((_REPEATS, 2), np.float32)
        for repeat in range(_REPEATS):
            self._meet()
            start = time.perf_counter()
            dense, ticket = jax.block_until_ready(self._compose_loop(dense, plan, ticket))
            times_us[repeat, 0] = time.perf_counter() - start
            self._meet()
            start = time.perf_counter()
            dense = jax.block_until_ready(self._collective_loop(dense, plan))
            times_us[repeat, 1] = time.perf_counter() - start
        times_us *= 1e6 / _LOOP_EXCHANGES
        return dense, ticket, times_us


def slowest_rank_median(times_us: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[processes, batches, repeats, 2] → [batches, 2]: an exchange ends when its last rank has ended."""
    return np.asarray(np.median(times_us.max(axis=0), axis=1))


def _make_compose_loop(mesh: Mesh, compose: Compose) -> Callable[..., Any]:
    def loop(dense: Dense, plan: symmkv.ComposePlan, ticket: jax.Array) -> Any:
        def body(_: jax.Array, carry: tuple[Dense, jax.Array]) -> tuple[Dense, jax.Array]:
            return compose(carry[0], plan, carry[1])

        return jax.lax.fori_loop(0, _LOOP_EXCHANGES, body, (dense, ticket))

    sharded = jax.shard_map(
        loop, mesh=mesh, in_specs=(P("cp"), P(), P("cp")), out_specs=(P("cp"), P("cp"))
    )
    return jax.jit(sharded, donate_argnames=("dense", "ticket"))


def _make_collective_loop(mesh: Mesh) -> Callable[..., Any]:
    def loop(dense: Dense, plan: symmkv.ComposePlan) -> Any:
        def body(_: jax.Array, dense: Dense) -> Any:
            return symmkv.collective_compose(dense, plan, axis_name="cp")

        return jax.lax.fori_loop(0, _LOOP_EXCHANGES, body, dense)

    sharded = jax.shard_map(loop, mesh=mesh, in_specs=(P("cp"), P()), out_specs=P("cp"))
    return jax.jit(sharded, donate_argnames="dense")

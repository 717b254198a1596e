"""The jitted programs that are timed: each repeats one operation, layer after layer, unrolled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from jax_symmkv.cli.bench import operands, programs
from jax_symmkv.cli.bench.case import Case, Words
from jax_symmkv.cli.bench.gpu.variant import Variant


class Program(Variant):
    """A program whose first operands are donated, and its results; run after run on the same memory."""

    def __init__(
        self,
        name: str,
        layers: int,
        program: Callable[..., tuple[jax.Array, ...]],
        donated: tuple[jax.Array, ...],
        constants: tuple[Any, ...],
        expected: Words,
    ) -> None:
        self.name, self.layers = name, layers
        self._program, self._arrays, self._constants = program, donated, constants
        self._expected = expected

    def is_right(self, meet: Callable[[], None]) -> bool:
        self._run(1)
        result = operands.local_words(self._arrays[-1])
        return bool(np.array_equal(result, self._expected.ravel()))

    def sample_us(self, runs: int) -> float:
        # The ranks end a run within microseconds of each other, since its operations meet.
        self._run(1)
        start = time.perf_counter()
        self._run(runs)
        return (time.perf_counter() - start) * 1e6 / (runs * self.layers)

    def _run(self, runs: int) -> None:
        """Dispatches all, then waits for the last."""
        for _ in range(runs):
            self._arrays = self._program(*self._arrays, *self._constants)
        jax.block_until_ready(self._arrays)


def make_exchange(
    name: str,
    exchange: programs.Compose,
    case: Case,
    heap: symmkv.SymmetricHeap,
    layers: int,
) -> Program:
    """compose, or the three calls, on one dense buffer that is reused, as an engine does layer by layer."""

    def body(dense: jax.Array, plan: symmkv.ComposePlan) -> tuple[jax.Array]:
        ticket = symmkv.new_ticket(heap)
        for _ in range(layers):
            dense, ticket = exchange(dense, plan, ticket, heap=heap)
        return (dense,)

    mine, expected = operands.exchanged(case, operands.rank_of(heap.mesh))
    dense = mine.view(jnp.bfloat16).reshape(case.num_slots, *case.page.shape)
    return Program(
        name,
        layers,
        programs.jit_on_ranks(body, heap, (P("cp"), P()), (P("cp"),), donate=(0,)),
        (operands.shard(heap.mesh, dense),),
        (operands.replicate(heap.mesh, case.plan(heap.max_current_pages)),),
        expected,
    )


def make_collective(
    name: str,
    collective: Callable[[jax.Array], jax.Array],
    own: Words,
    expected: Words,
    heap: symmkv.SymmetricHeap,
    layers: int,
) -> Program:
    """One of XLA's, on the pages of the case as 4-byte integers, without moving them into a dense buffer."""

    def body(own: jax.Array, result: jax.Array, zero: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(layers):
            # One word depends on the layer before, or XLA may do it once for all. XLA can't know that
            # nothing is added.
            own = own.at[0, 0].add(result[-1, -1] * zero[0])
            result = collective(own)
        return own, result

    poison = np.full_like(expected, 0xEEEEEEEE)
    return Program(
        name,
        layers,
        programs.jit_on_ranks(
            body, heap, (P("cp"), P("cp"), P()), (P("cp"), P("cp")), donate=(0, 1)
        ),
        (operands.shard(heap.mesh, own), operands.shard(heap.mesh, poison)),
        (operands.replicate(heap.mesh, np.zeros(1, np.uint32)),),
        expected,
    )

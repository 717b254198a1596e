"""The programs that are timed: each repeats one operation in a loop of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from jax_symmkv import compat
from jax_symmkv.cli.bench import operands
from jax_symmkv.cli.bench.case import Case, Words

Compose = Callable[..., tuple[Any, jax.Array]]


class Variant:
    """A way to move a case's pages, or the bound of all of them.

    Attributes:
      name: as in the report.
      on_own_core: whether the rank is to be bound to one core meanwhile.
    """

    name: str
    on_own_core = True

    def run(self, count: int) -> None:
        """Does it `count` times, and returns when this rank has done so."""
        raise NotImplementedError

    def is_right(self) -> bool:
        """Whether what one run(1), the first, left behind is every expected byte."""
        raise NotImplementedError


class Exchange(Variant):
    """compose, or the three calls, on one dense buffer that is reused, as an engine does layer by layer."""

    def __init__(
        self, name: str, exchange: Compose, case: Case, heap: symmkv.SymmetricHeap
    ) -> None:
        self.name = name
        mine, self._expected = operands.exchanged(case, operands.rank_of(heap.mesh))
        dense = mine.view(jnp.bfloat16).reshape(case.num_slots, *case.page.shape)
        self._dense = operands.shard(heap.mesh, dense)
        self._plan = operands.replicate(heap.mesh, case.plan(heap.max_current_pages))
        self._loop = _make_exchange_loop(exchange, heap)

    def run(self, count: int) -> None:
        self._dense = jax.block_until_ready(self._loop(self._dense, self._plan, np.int32(count)))

    def is_right(self) -> bool:
        return bool(np.array_equal(operands.local_words(self._dense), self._expected.ravel()))


class Collective(Variant):
    """One of XLA's, on the pages of the case as 4-byte integers, which Gloo sums fastest.

    Without moving them into a dense buffer, so that a compose by this means takes longer. On all cores:
    Gloo's own threads want one, and small transfers take three times as long where they must share.
    """

    on_own_core = False

    def __init__(
        self,
        name: str,
        collective: Callable[[jax.Array], jax.Array],
        own: Words,
        expected: Words,
        heap: symmkv.SymmetricHeap,
    ) -> None:
        self.name = name
        self._expected = expected
        self._own = operands.shard(heap.mesh, own)
        self._result = operands.shard(heap.mesh, np.zeros_like(expected))
        self._loop = _make_collective_loop(collective, heap)

    def run(self, count: int) -> None:
        self._own, self._result = jax.block_until_ready(
            self._loop(self._own, self._result, np.int32(count))
        )

    def is_right(self) -> bool:
        return bool(np.array_equal(operands.local_words(self._result), self._expected.ravel()))


def psum(own: jax.Array) -> jax.Array:
    """XLA's all-reduce, of the compact buffer."""
    return compat.vary_alike([jax.lax.psum(own, "cp")], frozenset({"cp"}))[0]


def all_gather(own: jax.Array) -> jax.Array:
    """XLA's all-gather, of the pages that each rank publishes."""
    gathered: jax.Array = jax.lax.all_gather(own, "cp", tiled=True)
    return gathered


class Memcpy(Variant):
    """The bound: libc's copy of as many bytes as are published, and of as many as are gathered.

    On this core alone, each in one piece, between buffers of this process; at the same time on every rank.
    """

    name = "memcpy"

    def __init__(self, case: Case) -> None:
        self._pairs = []
        for nbytes in (case.published_nbytes, case.received_nbytes):
            source = np.arange(nbytes // 4, dtype=np.uint32)
            self._pairs.append((np.zeros_like(source), source))
        self._calls = [
            (to.ctypes.data, source.ctypes.data, to.nbytes) for to, source in self._pairs
        ]

    def run(self, count: int) -> None:
        (first, second), copy = self._calls, ctypes.memmove
        for _ in range(count):
            copy(*first)
            copy(*second)

    def is_right(self) -> bool:
        return all(np.array_equal(to, source) for to, source in self._pairs)


def make_variants(case: Case, heap: symmkv.SymmetricHeap, compose: Compose) -> Iterator[Variant]:
    rank = operands.rank_of(heap.mesh)
    yield Exchange("compose", compose, case, heap)
    yield Exchange("three_calls", three_calls, case, heap)
    yield Collective("psum", psum, *operands.compact(case, rank), heap)
    yield Collective("all_gather", all_gather, *operands.published(case, rank), heap)
    if case.num_pages:
        yield Memcpy(case)


def three_calls(
    dense: jax.Array, plan: symmkv.ComposePlan, ticket: jax.Array, *, heap: symmkv.SymmetricHeap
) -> tuple[Any, jax.Array]:
    """What compose does in one."""
    ticket = symmkv.publish(dense, plan, ticket, heap=heap)
    ticket = symmkv.barrier(ticket, heap=heap)
    return symmkv.gather(dense, plan, ticket, heap=heap)


# --- the loops: how often is an operand, so that one program serves every count ------------------


def _make_exchange_loop(exchange: Compose, heap: symmkv.SymmetricHeap) -> Callable[..., jax.Array]:
    def loop(dense: jax.Array, plan: symmkv.ComposePlan, count: jax.Array) -> jax.Array:
        def body(_: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            return exchange(carry[0], plan, carry[1], heap=heap)

        composed: jax.Array
        composed, _ = jax.lax.fori_loop(0, count, body, (dense, symmkv.new_ticket(heap)))
        return composed

    return jit_on_ranks(loop, heap, (P("cp"), P(), P()), P("cp"), donate=(0,))


def _make_collective_loop(
    collective: Callable[[jax.Array], jax.Array], heap: symmkv.SymmetricHeap
) -> Callable[..., tuple[jax.Array, ...]]:
    def loop(own: jax.Array, result: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            own, result = carry
            # One word depends on the iteration before, or XLA may do it once, before the loop. Carrying
            # the result alone would cost a copy of it in each iteration.
            own = own.at[0, 0].add(jnp.where(i > 0, result[-1, -1], 0))
            return own, collective(own)

        looped: tuple[jax.Array, ...] = jax.lax.fori_loop(0, count, body, (own, result))
        return looped

    return jit_on_ranks(loop, heap, (P("cp"), P("cp"), P()), (P("cp"), P("cp")), donate=(0, 1))


def jit_on_ranks(
    body: Callable[..., Any],
    heap: symmkv.SymmetricHeap,
    in_specs: Any,
    out_specs: Any,
    donate: tuple[int, ...],
) -> Callable[..., Any]:
    """Jits a function of each rank's shards."""
    sharded = jax.shard_map(body, mesh=heap.mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, donate_argnums=donate)

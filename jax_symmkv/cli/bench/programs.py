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
from jax_symmkv.cli.bench.case import Case, Words

Compose = Callable[..., tuple[Any, jax.Array]]


class Variant:
    """A way to move a case's pages, or the bound of all of them.

    Attributes:
      name: as in the report.
    """

    name: str

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
        plan = case.plan(heap.max_current_pages)
        self._expected = case.composed()
        mine = np.full_like(self._expected, 0xEEEEEEEE)
        own = np.asarray(plan.current_page)[np.asarray(plan.current_writer) == _rank(heap)]
        mine[own] = self._expected[own]
        if not case.num_pages:  # nothing may move
            self._expected = mine
        dense = mine.view(jnp.bfloat16).reshape(case.num_slots, *case.page.shape)
        self._dense = _shard(heap.mesh, dense)
        self._plan = jax.device_put(plan, jax.NamedSharding(heap.mesh, P()))
        self._loop = _make_exchange_loop(exchange, heap)

    def run(self, count: int) -> None:
        self._dense = jax.block_until_ready(self._loop(self._dense, self._plan, np.int32(count)))

    def is_right(self) -> bool:
        return bool(np.array_equal(_local_words(self._dense), self._expected.ravel()))


class Psum(Variant):
    """XLA's all-reduce of the compact buffer: all pages, zeros where they are other ranks'."""

    name = "psum"

    def __init__(self, case: Case, heap: symmkv.SymmetricHeap) -> None:
        plan = case.plan(heap.max_current_pages)
        self._expected = _words(case)
        compact = np.zeros_like(self._expected)
        for slot in np.flatnonzero(np.asarray(plan.current_writer) == _rank(heap)):
            compact[slot] = self._expected[slot]
        if not case.num_pages and _rank(heap) == 0:
            compact = self._expected
        self._compact = _shard(heap.mesh, compact)
        self._loop = _make_psum_loop(heap)

    def run(self, count: int) -> None:
        self._compact = jax.block_until_ready(self._loop(self._compact, np.int32(count)))

    def is_right(self) -> bool:
        return bool(np.array_equal(_local_words(self._compact), self._expected.ravel()))


class AllGather(Variant):
    """XLA's all-gather of the pages that each rank would publish."""

    name = "all_gather"

    def __init__(self, case: Case, heap: symmkv.SymmetricHeap) -> None:
        expected = _words(case)
        pages = max(1, case.pages_per_rank)
        every = np.concatenate([expected[:pages] + np.uint32(r) for r in range(case.cp_size)])
        self._expected = every
        rank = _rank(heap)
        self._own = _shard(heap.mesh, every[rank * pages : (rank + 1) * pages])
        self._gathered = _shard(heap.mesh, np.zeros_like(every))
        self._loop = _make_all_gather_loop(heap)

    def run(self, count: int) -> None:
        self._own, self._gathered = jax.block_until_ready(
            self._loop(self._own, self._gathered, np.int32(count))
        )

    def is_right(self) -> bool:
        return bool(np.array_equal(_local_words(self._gathered), self._expected.ravel()))


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
        self._calls = [(to.ctypes.data, source.ctypes.data, to.nbytes) for to, source in self._pairs]

    def run(self, count: int) -> None:
        (first, second), copy = self._calls, ctypes.memmove
        for _ in range(count):
            copy(*first)
            copy(*second)

    def is_right(self) -> bool:
        return all(np.array_equal(to, source) for to, source in self._pairs)


def make_variants(case: Case, heap: symmkv.SymmetricHeap, compose: Compose) -> Iterator[Variant]:
    yield Exchange("compose", compose, case, heap)
    yield Exchange("three_calls", _three_calls, case, heap)
    yield Psum(case, heap)
    yield AllGather(case, heap)
    if case.num_pages:
        yield Memcpy(case)


def _three_calls(
    dense: jax.Array, plan: symmkv.ComposePlan, ticket: jax.Array, *, heap: symmkv.SymmetricHeap
) -> tuple[Any, jax.Array]:
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

    return _jit(loop, heap, (P("cp"), P(), P()), P("cp"), donate=(0,))


def _make_psum_loop(heap: symmkv.SymmetricHeap) -> Callable[..., jax.Array]:
    def loop(compact: jax.Array, count: jax.Array) -> jax.Array:
        def body(_: jax.Array, x: jax.Array) -> jax.Array:
            return compat.vary_alike([jax.lax.psum(x, "cp")], frozenset({"cp"}))[0]

        return jax.lax.fori_loop(0, count, body, compact)

    return _jit(loop, heap, (P("cp"), P()), P("cp"), donate=(0,))


def _make_all_gather_loop(heap: symmkv.SymmetricHeap) -> Callable[..., tuple[jax.Array, ...]]:
    def loop(own: jax.Array, gathered: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            own, gathered = carry
            # One word depends on the iteration before: else XLA may gather once, before the loop.
            own = own.at[0, 0].add(jnp.where(i > 0, gathered[-1, -1], 0))
            return own, jax.lax.all_gather(own, "cp", tiled=True)

        return jax.lax.fori_loop(0, count, body, (own, gathered))

    return _jit(loop, heap, (P("cp"), P("cp"), P()), (P("cp"), P("cp")), donate=(0, 1))


def _jit(
    loop: Callable[..., Any],
    heap: symmkv.SymmetricHeap,
    in_specs: Any,
    out_specs: Any,
    donate: tuple[int, ...],
) -> Callable[..., Any]:
    sharded = jax.shard_map(loop, mesh=heap.mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(sharded, donate_argnums=donate)


# --- arrays --------------------------------------------------------------------------------------


def _words(case: Case) -> Words:
    """What the collectives move, as the 4-byte integers that Gloo sums fastest; one word for no pages."""
    return case.composed() if case.num_pages else np.full((1, 1), 7, np.uint32)


def _rank(heap: symmkv.SymmetricHeap) -> int:
    return [d.process_index for d in heap.mesh.devices.flat].index(jax.process_index())


def _shard(mesh: jax.sharding.Mesh, local: np.ndarray) -> jax.Array:
    sharding = jax.NamedSharding(mesh, P("cp"))
    # A copy: XLA may take an array of NumPy's as it is, and then it can't be donated.
    array: jax.Array = jax.make_array_from_process_local_data(sharding, local)
    return array


def _local_words(x: jax.Array) -> Words:
    return np.asarray(x.addressable_shards[0].data).view(np.uint32).ravel()

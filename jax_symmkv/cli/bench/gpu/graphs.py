"""What is timed without XLA, as bare CUDA graphs: the fused exchange, and copies by the copy engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import jax_symmkv as symmkv
from jax_symmkv import compat
from jax_symmkv.cli.bench import operands
from jax_symmkv.cli.bench.case import Case, Words
from jax_symmkv.cli.bench.gpu.variant import Variant

_HALVES_OFFSET = 12288  # in a slab: ffi/layout.h


class Graph(Variant):
    """A captured sequence on a stream of its own, which orders nothing against XLA's: each waits for itself.

    What it creates lies on the calling thread's GPU (`driver.make_current`).
    """

    def __init__(self, name: str, heap: symmkv.SymmetricHeap, layers: int) -> None:
        self.name, self.layers = name, layers
        self._cuda = compat.cuda_module()
        # The heap's own, so that the exchange is the very one that compose makes.
        (self._context,) = heap._contexts.values()
        self._stream = self._cuda.Stream()

    def sample_us(self, runs: int) -> float:
        # The stream's clock starts when the first replay has ended: one more is exact enough.
        self._stream.replay()
        self._stream.replay()
        us: float = self._stream.replay_us()
        return us / self.layers

    def _replay(self) -> None:
        self._stream.replay()
        self._stream.synchronize()


class ExchangeGraph(Graph):
    """The kernel of compose, on a dense buffer of its own."""

    def __init__(self, case: Case, heap: symmkv.SymmetricHeap, layers: int) -> None:
        super().__init__("graph", heap, layers)
        mine, self._expected = operands.exchanged(case, operands.rank_of(heap.mesh))
        self._dense = self._cuda.DeviceArray(mine.nbytes)
        self._dense.write(0, mine.tobytes())
        batch = self._cuda.Operands(
            plan=self._put_plan(case.plan(heap.max_current_pages)),
            capacity=heap.max_current_pages,
            num_dense_pages=case.num_slots,
            dense=[self._dense],
            guard_nbytes=0,
        )
        self._stream.begin_capture()
        for _ in range(layers):
            self._stream.exchange(self._context, batch)
        self._stream.end_capture()

    def is_right(self, meet: Callable[[], None]) -> bool:
        self._replay()
        return bool(self._dense.read(0, self._dense.nbytes) == self._expected.tobytes())

    def _put_plan(self, plan: symmkv.ComposePlan) -> Any:
        parts = (plan.current_page, plan.current_writer, plan.num_current, plan.fingerprint)
        raw = b"".join(np.asarray(part).tobytes() for part in parts)
        array = self._cuda.DeviceArray(len(raw))
        array.write(0, raw)
        return array


class CopyEngine(Graph):
    """The bound: as many bytes as are received, from the peers' slabs into this GPU's memory.

    A piece from each peer, one after the other. The ranks begin together, by a barrier before the first.
    """

    def __init__(self, case: Case, heap: symmkv.SymmetricHeap, layers: int) -> None:
        super().__init__("copy_engine", heap, layers)
        self._rank = operands.rank_of(heap.mesh)
        self._nbytes = case.published_nbytes
        self._slabs = [self._cuda.slab(self._context, rank) for rank in range(case.cp_size)]
        assert self._slabs[self._rank].nbytes >= self._nbytes + _HALVES_OFFSET
        self._copies = {
            rank: self._cuda.DeviceArray(self._nbytes)
            for rank in range(case.cp_size)
            if rank != self._rank
        }
        for to in self._copies.values():
            to.write(0, b"\xee" * self._nbytes)
        self._stream.begin_capture()
        self._stream.barrier(self._context)
        for _ in range(layers):
            for rank, to in self._copies.items():
                self._stream.copy(to, self._slabs[rank], self._nbytes)
        self._stream.end_capture()

    def is_right(self, meet: Callable[[], None]) -> bool:
        # A copy starts where the slab does; its halves may hold anything between two exchanges.
        self._slabs[self._rank].write(_HALVES_OFFSET, self._pattern(self._rank).tobytes())
        meet()
        self._replay()
        nbytes = self._nbytes - _HALVES_OFFSET
        return all(
            to.read(_HALVES_OFFSET, nbytes) == self._pattern(rank).tobytes()
            for rank, to in self._copies.items()
        )

    def _pattern(self, rank: int) -> Words:
        words = np.arange((self._nbytes - _HALVES_OFFSET) // 4, dtype=np.uint32)
        return words * np.uint32(2654435761) + np.uint32(rank)

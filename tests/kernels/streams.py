"""Ranks as streams of one process: the kernels alone, on one GPU, without JAX programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jax_symmkv import ComposePlan, compat

GUARD_NBYTES = 4096
# ffi/layout.h
_HALVES_OFFSET = 12288
_LINE_NBYTES = 128
_GUARD = b"\xa5" * GUARD_NBYTES


def require_gpu() -> Any:
    """The module `_cuda`; skips without a GPU, or fails with SYMMKV_REQUIRE_GPU=1."""
    why = compat.cuda_module_error()
    if why is None and compat.cuda_module().device_count() == 0:
        why = "no GPU"
    if why is not None:
        (pytest.fail if os.environ.get("SYMMKV_REQUIRE_GPU") == "1" else pytest.skip)(why)
    return compat.cuda_module()


class Group:
    """Contexts, streams and dense buffers of `cp_size` ranks.

    Blocks that wait must all find room on the one GPU, so each rank gets a share of it.
    """

    def __init__(
        self,
        cp_size: int,
        num_slots: int,
        page_nbytes: Sequence[int],
        num_dense_pages: int,
        *,
        module: Any = None,
        first_epoch: int = 0,
        timeout_s: float = 20.0,
    ) -> None:
        self._module = module or require_gpu()
        self.cp_size, self.page_nbytes = cp_size, list(page_nbytes)
        self.num_slots, self.num_dense_pages = num_slots, num_dense_pages
        self.contexts = [
            self._module.CudaContext(
                rank=rank,
                cp_size=cp_size,
                num_slots=num_slots,
                page_nbytes=self.page_nbytes,
                nonce=1000 + rank,
                first_epoch=first_epoch,
                timeout_ms=int(timeout_s * 1000),
                device=0,
                max_blocks=max(1, min(64, 128 // cp_size)),
            )
            for rank in range(cp_size)
        ]
        addresses = [context.address for context in self.contexts]
        for context in self.contexts:
            context.map(addresses, [1000 + rank for rank in range(cp_size)])
        for context in self.contexts:
            context.unlink()
            context.verify_greetings()
        self.streams = [self._module.Stream() for _ in range(cp_size)]
        self._dense = [
            [self._module.DeviceArray(2 * GUARD_NBYTES + num_dense_pages * n) for n in page_nbytes]
            for _ in range(cp_size)
        ]
        self._plans = [self._module.DeviceArray(8 * num_slots + 8) for _ in range(cp_size)]
        self.operands = [
            self._module.Operands(
                plan=plan,
                capacity=num_slots,
                num_dense_pages=num_dense_pages,
                dense=dense,
                guard_nbytes=GUARD_NBYTES,
            )
            for plan, dense in zip(self._plans, self._dense, strict=True)
        ]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for context in self.contexts:
            context.leave()
        for context in self.contexts:
            context.close()

    def write_plan(self, plan: ComposePlan, ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.cp_size) if ranks is None else ranks:
            self.write_plan_arrays(
                rank,
                np.asarray(plan.current_page),
                np.asarray(plan.current_writer),
                int(plan.num_current[0]),
                int(plan.fingerprint[0]),
            )

    def write_plan_arrays(
        self, rank: int, page: np.ndarray, writer: np.ndarray, num_current: int, fingerprint: int
    ) -> None:
        counts = np.array([num_current], np.int32).tobytes()
        counts += np.array([fingerprint], np.uint32).tobytes()
        arrays = [np.asarray(a, np.int32).tobytes() for a in (page, writer)]
        self._plans[rank].write(0, b"".join(arrays) + counts)

    def write(self, rank: int, dense: Sequence[np.ndarray]) -> None:
        """uint8 [num_dense_pages, page_nbytes] of every buffer, and the guards around them."""
        for array, values in zip(self._dense[rank], dense, strict=True):
            array.write(0, _GUARD + values.tobytes() + _GUARD)

    def read(self, rank: int) -> list[np.ndarray]:
        buffers = []
        for array, nbytes in zip(self._dense[rank], self.page_nbytes, strict=True):
            raw = array.read(0, array.nbytes)
            assert raw[:GUARD_NBYTES] == _GUARD, "the guard before the dense buffer was written"
            assert raw[-GUARD_NBYTES:] == _GUARD, "the guard behind the dense buffer was written"
            body = np.frombuffer(raw[GUARD_NBYTES:-GUARD_NBYTES], np.uint8)
            buffers.append(body.reshape(self.num_dense_pages, nbytes))
        return buffers

    def _halves(self) -> tuple[int, list[int]]:
        """Bytes of a half, and where each buffer begins in it."""
        sizes = [-(-self.num_slots * n // _LINE_NBYTES) * _LINE_NBYTES for n in self.page_nbytes]
        return sum(sizes), [sum(sizes[:b]) for b in range(len(sizes))]

    def fill_halves(self, value: int) -> None:
        """Of every rank; what no exchange writes keeps the value."""
        for rank in range(self.cp_size):
            slab = self._module.slab(self.contexts[rank], rank)
            slab.write(_HALVES_OFFSET, bytes([value]) * (2 * self._halves()[0]))

    def written(self, rank: int, value: int) -> list[set[int]]:
        """For each buffer the slots, of either half, with a byte that is not `value`; gaps must be."""
        half_nbytes, begins = self._halves()
        slab = self._module.slab(self.contexts[rank], rank)
        raw = np.frombuffer(slab.read(_HALVES_OFFSET, 2 * half_nbytes), np.uint8)
        found = []
        ends = [*begins[1:], half_nbytes]
        for nbytes, begin, end in zip(self.page_nbytes, begins, ends, strict=True):
            both = raw.reshape(2, half_nbytes)[:, begin:end] != value
            used = self.num_slots * nbytes
            assert not both[:, used:].any(), "the gap behind a buffer's slots was written"
            slots = both[:, :used].reshape(2, self.num_slots, nbytes)
            found.append({int(slot) for slot in np.flatnonzero(slots.any(axis=(0, 2)))})
        return found

    def exchange(self, ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.cp_size) if ranks is None else ranks:
            self.streams[rank].exchange(self.contexts[rank], self.operands[rank])

    def three_calls(self, ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.cp_size) if ranks is None else ranks:
            stream, context, operands = self.streams[rank], self.contexts[rank], self.operands[rank]
            stream.publish(context, operands)
            stream.barrier(context)
            stream.gather(context, operands)

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def assert_sound(self) -> None:
        for context in self.contexts:
            assert context.poisoned() is None, context.poisoned()
            assert context.undrained() is None, context.undrained()

    def await_poison(self, rank: int, within_s: float = 2.0) -> tuple[Any, ...]:
        deadline = time.monotonic() + within_s
        while (found := self.contexts[rank].poisoned()) is None:
            assert time.monotonic() < deadline, f"rank {rank} heard of no failure in {within_s} s"
            time.sleep(0.002)
        return found


Call = Callable[..., None]
CALLS: dict[str, Call] = {"exchange": Group.exchange, "three calls": Group.three_calls}

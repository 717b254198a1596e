"""How the samples are taken: all ranks at once, the variants in turn."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from jax_symmkv.cli.bench.placement import Cores
from jax_symmkv.cli.bench.programs import Variant
from jax_symmkv.cli.collect import from_every_process

# A sample lasts about so long: starting a program, some 100 µs, weighs little then.
_SAMPLE_S = 0.03
_MAX_COUNT = 20_000

Meet = Callable[[], None]


def measure(
    variants: Sequence[Variant], repeats: int, meet: Meet, cores: Cores
) -> npt.NDArray[np.float64]:
    """Called on every rank, after each variant has run once.

    Returns:
      float64 [repeats, variants], the same on every rank: µs an operation, on the slowest rank.
    """
    own_us = np.empty((repeats, len(variants)), np.float32)
    with cores.restored(), no_garbage_collection():
        counts = [_calibrate(variant, meet, cores) for variant in variants]
        for repeat in range(repeats):
            # In turn, so that whatever drifts hits all variants alike.
            for i, variant in enumerate(variants):
                own_us[repeat, i] = _sample_us(variant, counts[i], meet, cores)
    slowest_us: npt.NDArray[np.float64] = from_every_process(own_us).max(axis=0).astype(np.float64)
    return slowest_us


def _calibrate(variant: Variant, meet: Meet, cores: Cores) -> int:
    """Operations in a sample: the same number on every rank."""
    count = 1
    for _ in range(3):  # the first runs are slow: caches, page faults
        own_us = np.array([_sample_us(variant, count, meet, cores)], np.float32)
        slowest_us = float(from_every_process(own_us).max())
        count = max(1, min(_MAX_COUNT, round(_SAMPLE_S * 1e6 / slowest_us)))
    return count


def _sample_us(variant: Variant, count: int, meet: Meet, cores: Cores) -> float:
    cores.bind(variant.on_own_core)
    meet()
    start = time.perf_counter()
    variant.run(count)
    return (time.perf_counter() - start) * 1e6 / count


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

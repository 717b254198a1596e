"""What is timed on GPUs, and how the samples are taken: all ranks at once, the variants in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jax_symmkv.cli.bench.gpu.peers import Peers
from jax_symmkv.cli.bench.measure import no_garbage_collection

# A sample lasts about so long: what starts its first run and sees the end of its last weighs little then.
_SAMPLE_S = 0.03
_MAX_RUNS = 100


class Variant:
    """A way to move a case's pages, or the bound of all of them.

    Attributes:
      name: as in the report.
      layers: operations in one run.
    """

    name: str
    layers: int

    def is_right(self, meet: Callable[[], None]) -> bool:
        """Runs it for the first time; whether that left behind every expected byte.

        Args:
          meet: returns when every rank has called it.
        """
        raise NotImplementedError

    def sample_us(self, runs: int) -> float:
        """Runs it once, untimed, so that the ranks are in step, then `runs` times; µs an operation."""
        raise NotImplementedError


def wrong(variants: Sequence[Variant], peers: Peers) -> list[str]:
    """Runs each variant once; the names of those with a wrong byte on any rank."""
    found = []
    for variant in variants:
        peers.meet()
        found.append(not variant.is_right(peers.meet))
    on_any = peers.greatest(found)
    return [variant.name for variant, bad in zip(variants, on_any, strict=True) if bad]


def measure(variants: Sequence[Variant], repeats: int, peers: Peers) -> npt.NDArray[np.float64]:
    """Called on every rank, after each variant was found right.

    Returns:
      float64 [repeats, variants], the same on every rank: µs an operation, on the slowest rank.
    """
    own_us = np.empty((repeats, len(variants)))
    with no_garbage_collection():
        runs = [_calibrate(variant, peers) for variant in variants]
        for repeat in range(repeats):
            # In turn, so that whatever drifts hits all variants alike.
            for i, variant in enumerate(variants):
                peers.meet()
                own_us[repeat, i] = variant.sample_us(runs[i])
    return peers.greatest(own_us)


def _calibrate(variant: Variant, peers: Peers) -> int:
    """Runs in a sample: the same number on every rank."""
    runs = 1
    for _ in range(3):  # the first are slow: XLA records its command buffers
        peers.meet()
        slowest_us = float(peers.greatest(variant.sample_us(runs)))
        runs = max(1, min(_MAX_RUNS, round(_SAMPLE_S * 1e6 / (slowest_us * variant.layers))))
    return runs

"""Each rank on its core, while it is measured."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

BOUND = "each rank bound to a core of its own"
UNBOUND = "ranks not bound to cores, of which there are fewer"


def placement(num_ranks: int) -> str:
    return BOUND if num_ranks <= len(os.sched_getaffinity(0)) else UNBOUND


@contextlib.contextmanager
def own_core(rank: int, num_ranks: int) -> Iterator[None]:
    """Binds every thread of this process to one core, if there is one for every rank.

    XLA's threads and Gloo's too, so that all variants have the same. Undone at the end: a heap that is
    created by a bound rank takes the ranks to share that core.
    """
    cores = sorted(os.sched_getaffinity(0))
    if num_ranks > len(cores):
        yield
        return
    _bind({cores[rank]})
    try:
        yield
    finally:
        _bind(set(cores))


def _bind(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)

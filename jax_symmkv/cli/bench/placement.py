"""Each rank on its core, while it is measured."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class Cores:
    """The cores that this process's threads may run on: all that it was given, or one of them.

    Attributes:
      placement: what it comes to, for the report.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._all = sorted(os.sched_getaffinity(0))
        self._own = {self._all[rank]} if num_ranks <= len(self._all) else set(self._all)
        self._is_bound = False
        self.placement = (
            "each bound to a core, but for the collectives: Gloo has threads of its own"
            if num_ranks <= len(self._all)
            else "which are not bound to cores, of which there are fewer"
        )

    def bind(self, to_own: bool) -> None:
        """Binds every thread of the process, or undoes it."""
        if to_own == self._is_bound:
            return
        self._is_bound = to_own
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), self._own if to_own else self._all)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """In the end nothing is bound: a heap that a bound rank creates takes the core to be shared."""
        try:
            yield
        finally:
            self.bind(False)

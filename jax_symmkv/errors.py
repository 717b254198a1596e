"""The errors that users of the package can catch."""

from __future__ import annotations


class PlanError(ValueError):
    """A batch that cannot be planned. It follows from the batch alone, so every rank raises it or none."""


class HeapError(RuntimeError):
    """A heap that cannot be created, or is used against its contract."""


class PeerError(RuntimeError):
    """An exchange that failed because of a rank of the group; the heap is poisoned from then on.

    Attributes:
      rank: the rank the error is about: the first that did not arrive, or the one whose call failed.
      missing: every rank that had not arrived when the error was raised, ascending.
      epoch: number of the exchange that failed, counted from 1.
      phase: the operation that failed: "publish", "barrier", "gather" or "exchange".
    """

    def __init__(
        self, message: str, *, rank: int, missing: tuple[int, ...], epoch: int, phase: str
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.missing = missing
        self.epoch = epoch
        self.phase = phase

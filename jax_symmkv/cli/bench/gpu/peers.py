"""What the ranks tell each other about a run, outside of the programs under test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jax_symmkv.rendezvous import Rendezvous


class Peers:
    """Through the coordination service alone: ranks that share a GPU have no collectives of XLA.

    Ranks leave a meeting within milliseconds of each other, so no clock may start there.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

    def meet(self) -> None:
        """Returns when every rank has called it."""
        self._rendezvous.exchange({})

    def count_distinct(self, text: str) -> int:
        """How many different texts the ranks have."""
        return len({r["text"] for r in self._rendezvous.exchange({"text": text}).values()})

    def greatest(self, own: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Of each number the greatest that a rank has."""
        records = self._rendezvous.exchange({"numbers": np.asarray(own, np.float64).tolist()})
        every: Sequence[object] = [record["numbers"] for record in records.values()]
        greatest: npt.NDArray[np.float64] = np.max(np.array(every, np.float64), axis=0)
        return greatest

"""Who is in the group, and what they tell each other: exchange of records, unanimous yes or no."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import jax

from jax_symmkv import compat
from jax_symmkv.errors import HeapError

_Record = dict[str, Any]


class Rendezvous:
    """Rounds in which every process of a set posts one record and reads everybody's.

    Records go through the key-value store of JAX's coordination service, so a rendezvous concerns the
    processes of the set alone (`process_allgather` spans all), and every wait has a deadline. Used as a
    context manager: a process that leaves with an exception posts it as its next record, so that the
    others raise it too, in the same round, instead of waiting.

    Args:
      name: the same on every process of the set, and never used before.
      processes: `jax.Device.process_index` of the set, this process's among them.
      timeout_s: limit of each round.
    """

    def __init__(self, name: str, processes: list[int], timeout_s: float) -> None:
        self._name = name
        self._processes = sorted(set(processes))
        self._me = jax.process_index()
        self._timeout_s = timeout_s
        self._round = 0
        self._client = compat.coordination_client()
        if self._client is None and len(self._processes) > 1:
            raise HeapError(
                f"SymmetricHeap: the mesh spans {len(self._processes)} processes, but jax.distributed "
                "is not initialized; call jax.distributed.initialize() before any other use of JAX"
            )

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            # Some may have read this round's record already, so the next one says it too.
            for round_ in (self._round, self._round + 1):
                self._post(round_, {"error": f"{type(error).__name__}: {error}"})

    def exchange(self, record: Mapping[str, Any]) -> dict[int, _Record]:
        """Posts `record` (JSON types) and returns every process's, by process index.

        Raises:
          HeapError: a process reported an error, or posted nothing within the deadline.
        """
        own = self._post(self._round, dict(record))
        deadline = time.monotonic() + self._timeout_s
        records = {p: own if p == self._me else self._read(p, deadline) for p in self._processes}
        # Everybody has posted this round, so everybody has read the one before.
        self._delete(self._round - 1)
        self._round += 1
        for process, read in records.items():
            if "error" in read:
                raise HeapError(f"SymmetricHeap: process {process} failed: {read['error']}")
        return records

    def agree(self, failure: str | None) -> dict[int, str]:
        """The failures of all processes, by process index; empty when nobody has one."""
        records = self.exchange({"failure": failure})
        return {p: r["failure"] for p, r in records.items() if r["failure"] is not None}

    def _key(self, round_: int, process: int) -> str:
        return f"symmkv/{self._name}/{round_}/{process}"

    def _post(self, round_: int, record: _Record) -> _Record:
        if self._client is not None and len(self._processes) > 1:
            self._client.key_value_set_bytes(
                self._key(round_, self._me), json.dumps(record).encode(), allow_overwrite=True
            )
        return record

    def _read(self, process: int, deadline: float) -> _Record:
        assert self._client is not None  # the constructor saw to it
        left_ms = max(1, int((deadline - time.monotonic()) * 1000))
        try:
            raw = self._client.blocking_key_value_get_bytes(
                self._key(self._round, process), left_ms
            )
        except jax.errors.JaxRuntimeError as error:
            raise HeapError(
                f"SymmetricHeap: process {process} did not take part in step {self._round} of the "
                f"creation within {self._timeout_s:g} s; create the heap on every process of the mesh, "
                f"in the same order ({error})"
            ) from error
        record: _Record = json.loads(raw)
        return record

    def _delete(self, round_: int) -> None:
        if round_ >= 0 and self._client is not None and len(self._processes) > 1:
            self._client.key_value_delete(self._key(round_, self._me))

"""Who is in the group, and what they tell each other: exchange of records, unanimous yes or no."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jax_symmkv import compat
from jax_symmkv.errors import HeapError

_Record = dict[str, Any]

# Between two looks at whether a process that is waited for still lives; Python hears Ctrl-C then too.
_SLICE_S = 0.5


class Rendezvous:
    """Rounds in which every process of a set posts one record and reads everybody's.

    Records go through the key-value store of JAX's coordination service, so a rendezvous concerns the
    processes of the set alone (`process_allgather` spans all), and every wait has a deadline. Used as a
    context manager: a process that leaves with an exception posts it as its next record, so that the
    others raise it too, in the same round, instead of waiting. The death of one on this host is noticed
    within about a second, from its first record on.

    Args:
      name: the same on every process of the set, and never used before.
      processes: `jax.Device.process_index` of the set, this process's among them.

    Attributes:
      timeout_s: limit of each round; to be set before the first.
    """

    def __init__(self, name: str, processes: list[int]) -> None:
        self.timeout_s = 300.0
        self._name = name
        self._processes = sorted(set(processes))
        self._me = jax.process_index()
        self._identities: dict[int, dict[str, Any]] = {}
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
                # Without a coordinator nobody can be told, and the error itself says more.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    self._post(round_, {"error": f"{type(error).__name__}: {error}"})

    @property
    def hosts(self) -> dict[int, str]:
        """What names each process's host, by process index; complete after the first round."""
        return {process: i["boot_id"] for process, i in self._identities.items()}

    @property
    def num_cores(self) -> int:
        """Cores that the processes, all of one host, may run on; known after the first round.

        A process that is bound to a core of its own, as under Slurm, sees only that one by itself.
        """
        return len(set().union(*(i["cores"] for i in self._identities.values())))

    def exchange(self, record: Mapping[str, Any]) -> dict[int, _Record]:
        """Posts `record` (JSON types) and returns every process's, by process index.

        Raises:
          HeapError: a process reported an error, died, or posted nothing within the deadline.
        """
        if self._me not in self._identities:
            self._identities[self._me] = _identity()
        own = self._post(self._round, {**record, "identity": self._identities[self._me]})
        deadline = time.monotonic() + self.timeout_s
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
        return failures(self.exchange({"failure": failure}))

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
        dead = False
        while True:
            left_s = deadline - time.monotonic()
            slice_s = 0.0 if dead else min(left_s, _SLICE_S)
            try:
                raw = self._client.blocking_key_value_get_bytes(
                    self._key(self._round, process), max(1, int(1000 * slice_s))
                )
            except jax.errors.JaxRuntimeError as error:
                if dead or left_s <= _SLICE_S or "DEADLINE_EXCEEDED" not in str(error):
                    raise HeapError(self._absence(process, dead, error)) from error
                # If so, one more look for the record: it may have posted it, then died, since the last.
                dead = _is_dead(self._identities.get(process), self._identities[self._me])
                continue
            record: _Record = json.loads(raw)
            if "identity" in record:
                self._identities[process] = record["identity"]
            return record

    def _absence(self, process: int, dead: bool, error: Exception) -> str:
        step = f"step {self._round} of the creation"
        if dead:
            return f"SymmetricHeap: process {process} has died before {step}"
        return (
            f"SymmetricHeap: process {process} did not take part in {step} within "
            f"{self.timeout_s:g} s; create the heap on every process of the mesh, in the same order "
            f"({error})"
        )

    def _delete(self, round_: int) -> None:
        if round_ >= 0 and self._client is not None and len(self._processes) > 1:
            self._client.key_value_delete(self._key(round_, self._me))


def failures(records: Mapping[int, _Record]) -> dict[int, str]:
    """The failures among records of {"failure": text or None, ...}, by process index."""
    return {p: r["failure"] for p, r in records.items() if r["failure"] is not None}


def _identity() -> dict[str, Any]:
    """Names this process among all that this host and others ever run, and says where it may run."""
    return {
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "pid": str(os.getpid()),
        "started": _stat(str(os.getpid()))[1],
        "cores": sorted(os.sched_getaffinity(0)),
    }


def _is_dead(identity: Mapping[str, Any] | None, own: Mapping[str, Any]) -> bool:
    """True if this process can see that the other has ended."""
    if identity is None or any(identity[k] != own[k] for k in ("boot_id", "pid_namespace")):
        return False
    try:
        state, started = _stat(identity["pid"])
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or started != identity["started"]


def _stat(pid: str) -> tuple[str, str]:
    """State and start time of a process of this host."""
    # Fields from the third on, since the second is a name that may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]

"""Mapping the peers' slabs. Agreement by doing: each rank maps, reads and writes, then all tell."""

from __future__ import annotations

import secrets
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import jax
import numpy as np

from jax_symmkv import _core
from jax_symmkv.rendezvous import Rendezvous, failures


class Context(Protocol):
    """One rank's end of a mapped transport: `_core.ShmContext` or `_cuda.CudaContext`.

    Attributes:
      address: what the peers need to map its slab.
      nbytes: bytes of its slab.
    """

    @property
    def address(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    def map(self, addresses: Any, nonces: Any) -> None: ...
    def verify_greetings(self) -> None: ...
    def unlink(self) -> None: ...
    def undrained(self) -> str | None: ...
    def poisoned(self) -> tuple[str, int, tuple[int, ...], int, str] | None: ...
    def register(self, heap_id: int, device: int) -> None: ...
    def unregister(self, heap_id: int, device: int) -> None: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


# (rank, device, nonce) -> the context, its slab allocated.
CreateContext = Callable[[int, jax.Device, int], Context]


def map_slabs(
    rendezvous: Rendezvous,
    groups: np.ndarray,
    create: CreateContext,
    contexts: MutableMapping[int, Context],
) -> dict[int, str]:
    """Creates this process's slabs and maps the peers'.

    Args:
      groups: the devices, [groups, cp_size].
      contexts: gets this process's contexts, by jax device id; also those of a mapping that fails.

    Returns:
      the failures by process, the same on every process; empty when all could.
    """
    me = jax.process_index()
    hosts = rendezvous.hosts
    first = min(hosts)
    strangers = [p for p, host in hosts.items() if host != hosts[first]]
    if strangers:
        return {p: f"not on the host of process {first}" for p in strangers}

    own: dict[str, Any] = {}
    failure = None
    try:
        _core.sweep_stale_segments()
        for group in groups:
            for rank, device in enumerate(group):
                if device.process_index != me:
                    continue
                nonce = secrets.randbits(64)
                context = contexts[device.id] = create(rank, device, nonce)
                own[str(device.id)] = [context.address, nonce]
    except RuntimeError as error:
        failure = str(error)
    records = rendezvous.exchange({"failure": failure, "slabs": own})
    if failed := failures(records):
        return failed

    every: dict[str, tuple[str, int]] = {}
    for record in records.values():
        every.update(record["slabs"])
    try:
        for group in groups:
            addresses, nonces = zip(*(every[str(d.id)] for d in group), strict=True)
            for device in group:
                if device.process_index == me:
                    contexts[device.id].map(addresses, nonces)
    except RuntimeError as error:
        failure = str(error)
    if failed := rendezvous.agree(failure):
        return failed

    # Everybody has mapped, so the names have served; a process killed from here on leaves nothing.
    try:
        for context in contexts.values():
            context.unlink()
            context.verify_greetings()
    except RuntimeError as error:
        failure = str(error)
    return rendezvous.agree(failure)

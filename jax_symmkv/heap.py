"""The symmetric heap: sizing, creation, agreement, check, close."""

from __future__ import annotations

import atexit
import collections
import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jax_symmkv import _core, compat
from jax_symmkv.errors import HeapError, PeerError
from jax_symmkv.mapping import Context, CreateContext, map_slabs
from jax_symmkv.rendezvous import Rendezvous
from jax_symmkv.sizing import Page, Sizing, size_heap

_log = logging.getLogger("jax_symmkv")

_TRANSPORTS = ("auto", "shm", "cuda-ipc", "cuda-p2p", "collective")
_MEMORY = {True: "shared memory", False: "the peers' GPU memory"}
# A wait polls this long before it sleeps, where every rank of the host has a core of its own.
_SPIN_US = 100
# Years: as good as no limit, and far from where clocks and counters overflow.
_MAX_TIMEOUT_S = 1e8
# Exchanges done when a heap is new.
_FIRST_EPOCH = 0

# How often this process has created a heap on a mesh and axis; the same on every process of the mesh.
_serials: collections.Counter[str] = collections.Counter()
_open_heaps: dict[int, SymmetricHeap] = {}


class SymmetricHeap:
    """Symmetric memory of the groups along one axis of a mesh: staging and flags, mapped once.

    Creation is collective over the processes of the mesh, and so is its outcome: every rank gets the
    transport or none does, and what fails on one rank is an error on all. Usable as a context manager.

    Args:
      mesh: the mesh of the programs that will use the heap. Every index of its other axes is a group of
        its own.
      axis_name: the context-parallel axis.
      page: this device's shard of one page as a `jax.ShapeDtypeStruct`, or a tuple of them (K, V, …) for
        a tuple of dense buffers. Each page's size must be a multiple of 16 bytes.
      max_current_pages: slots, the most current pages of a batch (`current_page_cap`). `SYMMKV_HEAP_MB`
        can lower it; the agreed value is the attribute of this name.
      max_prefix_pages: further slots, reserved for prefix pages; calls exchange current pages alone.
      transport: "auto", or "shm" (CPUs), "cuda-ipc" (GPUs of several processes), "cuda-p2p" (GPUs of
        one) or "collective" to accept nothing else. "auto" falls back to
        "collective" with one logged line. `SYMMKV_TRANSPORT` overrides it.
      timeout_s: how long a rank waits for the others, in creation and in every exchange.
        `SYMMKV_TIMEOUT_S` overrides it.

    Attributes:
      transport: what the ranks agreed on.
      cp_size: ranks in a group.
      max_current_pages, max_prefix_pages: slots that it has.
      closed: whether `close` was called.
      nbytes: bytes of one rank's slab: flags and `2 * (max_current_pages + max_prefix_pages)` pages; 0 for
        "collective".

    Raises:
      HeapError: an argument is unusable or differs between processes, a process did not take part within
        the deadline, or the demanded transport can't be had.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str,
        *,
        page: Page,
        max_current_pages: int,
        max_prefix_pages: int = 0,
        transport: str = "auto",
        timeout_s: float = 300.0,
    ) -> None:
        groups = _groups(mesh, axis_name)
        self.mesh = mesh
        self.axis_name = axis_name
        self.cp_size = int(groups.shape[1])
        self._closed = False
        self._contexts: dict[int, Context] = {}  # by jax device id
        self._handler_devices = {d.id: compat.handler_device(d) for d in mesh.local_devices}
        name = _rendezvous_name(mesh, axis_name)
        processes = [d.process_index for d in groups.flat]
        # What can fail on one process alone does so in the rendezvous, where the others learn of it.
        with Rendezvous(name, processes) as rendezvous, self._undone_on_error():
            self.timeout_s = rendezvous.timeout_s = _timeout_s(timeout_s)
            compat.register_targets()
            wanted = _transport(transport, groups)
            sizing = size_heap(page, max_current_pages, max_prefix_pages)
            sizing = _agree_sizing(rendezvous, sizing, wanted)
            self.page = sizing.page
            self.is_tuple = sizing.is_tuple
            self.max_current_pages = sizing.max_current_pages
            self.max_prefix_pages = sizing.max_prefix_pages
            self.heap_id = _heap_id(name, sizing)
            self.transport = self._agree_transport(rendezvous, groups, sizing, wanted)
        self.nbytes = max((c.nbytes for c in self._contexts.values()), default=0)
        if self.max_current_pages < sizing.requested_current_pages:
            _log.warning(
                "SymmetricHeap: SYMMKV_HEAP_MB bounds the heap to %d current pages of %d; raise it if a "
                "batch needs more",
                self.max_current_pages,
                sizing.requested_current_pages,
            )
        for device, context in self._contexts.items():
            context.register(self.heap_id, self._handler_devices[device])
        if not _open_heaps:
            # After jax's own handlers, so it runs before them.
            atexit.unregister(_close_at_exit)
            atexit.register(_close_at_exit, os.getpid())
        _open_heaps[self.heap_id] = self

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_local_devices(self) -> int:
        """Devices of the mesh that this process drives."""
        return sum(d.process_index == jax.process_index() for d in self.mesh.devices.flat)

    def check(self) -> None:
        """Raises what went wrong so far; a sound heap returns.

        Exact when this process's programs have ended (`block_until_ready`). The heap is drained if,
        after a synchronisation of all ranks, it returns on every one.

        Raises:
          PeerError: an exchange failed, with its rank, missing ranks, epoch and phase.
          HeapError: the heap is closed, or a rank arrived at an exchange that this rank does not know.
        """
        if self._closed:
            raise HeapError("check: the heap is closed; check it before close()")
        for context in self._contexts.values():
            poisoned = context.poisoned()
            if poisoned is not None:
                message, rank, missing, epoch, phase = poisoned
                raise PeerError(message, rank=rank, missing=missing, epoch=epoch, phase=phase)
            undrained = context.undrained()
            if undrained is not None:
                raise HeapError(f"check: {undrained}; dispatch the same programs on every rank")

    def close(self) -> None:
        """Ends the heap: waits for this process's call in progress, tells the peers, unmaps. Idempotent.

        Block on the results of the last program first. A peer's program that needs this rank after that
        fails with a message that says so. Shared memory stays with the peers until they close too.
        """
        if self._closed:
            return
        self._closed = True
        _open_heaps.pop(self.heap_id, None)
        for device, context in self._contexts.items():
            context.unregister(self.heap_id, self._handler_devices[device])
        # In two steps, since ranks of one process may be peers.
        for context in self._contexts.values():
            context.leave()
        for context in self._contexts.values():
            context.close()

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            compat.drain()  # programs dispatched in the block may not have started yet
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.transport
        return (
            f"SymmetricHeap({self.axis_name!r}, cp_size={self.cp_size}, {state}, "
            f"max_current_pages={self.max_current_pages}, nbytes={self.nbytes}, id={self.heap_id})"
        )

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # Ctrl-C too must leave no name in /dev/shm
            self._undo()
            if isinstance(error, OSError):
                raise HeapError(f"SymmetricHeap: {error}") from error
            raise

    def _undo(self) -> None:
        """Undoes a creation that came to nothing."""
        for context in self._contexts.values():
            context.leave()
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
        _core.sweep_stale_segments()  # of a process that died in the middle

    def _agree_transport(
        self, rendezvous: Rendezvous, groups: np.ndarray, sizing: Sizing, wanted: str
    ) -> str:
        if wanted == "collective":
            return wanted
        crowded = groups.size > rendezvous.num_cores
        create = self._create_context(sizing, crowded)
        failed = map_slabs(rendezvous, groups, create, self._contexts)
        if not failed:
            return _mapped_transport(groups)
        self._undo()
        process, why = min(failed.items())
        text = (
            f"{_MEMORY[groups.flat[0].platform == 'cpu']} can't be used: process {process}: {why}"
        )
        if wanted != "auto":
            raise HeapError(
                f"SymmetricHeap: {text}; transport='auto' would fall back to collectives"
            )
        if process == jax.process_index():
            _log.warning("SymmetricHeap: %s; falling back to collectives", text)
        return "collective"

    def _create_context(self, sizing: Sizing, crowded: bool) -> CreateContext:
        """How this process makes its end of the transport for one of its devices."""

        def create(rank: int, device: jax.Device, nonce: int) -> Context:
            shared: dict[str, Any] = {
                "rank": rank,
                "cp_size": self.cp_size,
                "num_slots": sizing.num_slots,
                "page_nbytes": sizing.page_nbytes,
                "nonce": nonce,
                "first_epoch": _FIRST_EPOCH,
                "timeout_ms": max(1, int(self.timeout_s * 1000)),
            }
            if device.platform == "cpu":
                return _core.ShmContext(**shared, spin_us=0 if crowded else _SPIN_US)
            context: Context = compat.cuda_module().CudaContext(
                **shared, device=device.local_hardware_id, max_blocks=0
            )
            return context

        return create


def _groups(mesh: jax.sharding.Mesh, axis_name: str) -> np.ndarray:
    """The devices as [groups, cp_size], ranks along the axis."""
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"SymmetricHeap: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}"
        )
    if axis_name not in mesh.axis_names:
        raise HeapError(
            f"SymmetricHeap: the mesh has axes {mesh.axis_names}, none is {axis_name!r}; "
            "pass the name of its context-parallel axis"
        )
    axis = mesh.axis_names.index(axis_name)
    groups = np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.devices.shape[axis])
    if all(d.process_index != jax.process_index() for d in groups.flat):
        raise HeapError(
            f"SymmetricHeap: process {jax.process_index()} drives no device of the mesh; "
            "create the heap on the processes of the mesh alone"
        )
    return groups


def _mapped_transport(groups: np.ndarray) -> str:
    """The transport that these devices have if they can map each other's memory."""
    if groups.flat[0].platform == "cpu":
        return "shm"
    crosses = any(d.process_index != group[0].process_index for group in groups for d in group)
    return "cuda-ipc" if crosses else "cuda-p2p"


def _transport(transport: str, groups: np.ndarray) -> str:
    """What is wanted, once it is known to be possible: "auto", a mapped transport, or "collective"."""
    wanted = os.environ.get("SYMMKV_TRANSPORT", transport)
    platform = groups.flat[0].platform
    if wanted not in _TRANSPORTS:
        raise HeapError(f"SymmetricHeap: transport must be one of {_TRANSPORTS}, got {wanted!r}")
    if wanted == "collective":
        return wanted
    mapped = _mapped_transport(groups) if platform in ("cpu", "gpu") else None
    why = None
    if mapped is None or wanted not in ("auto", mapped):
        why = f"the devices of the mesh, {platform}, have {mapped or 'none'}"
    elif groups.shape[1] > _core.MAX_RANKS:
        why = f"a mapped transport takes {_core.MAX_RANKS} ranks a group, the axis has {groups.shape[1]}"
    elif platform == "gpu" and compat.cuda_module_error() is not None:
        why = f"{compat.cuda_module_error()}"
    if why is None:
        return wanted
    if wanted != "auto":
        raise HeapError(f"SymmetricHeap: transport {wanted!r} can't be had: {why}")
    _log.warning("SymmetricHeap: %s; falling back to collectives", why)
    return "collective"


def _rendezvous_name(mesh: jax.sharding.Mesh, axis_name: str) -> str:
    """Names this creation: the same on every process, and never again in their lives."""
    key = json.dumps(
        [[d.id for d in mesh.devices.flat], mesh.devices.shape, mesh.axis_names, axis_name]
    )
    _serials[key] += 1
    return f"{hashlib.sha256(key.encode()).hexdigest()[:16]}/{_serials[key]}"


def _heap_id(name: str, sizing: Sizing) -> int:
    """63 bits that name heap and geometry: a program traced for another of either finds no context.

    Stable from run to run, since it stands in the compiled program and so in the compilation cache's key.
    """
    key = json.dumps([name, sizing.record(), _core.LAYOUT_VERSION])
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def _agree_sizing(rendezvous: Rendezvous, sizing: Sizing, wanted: str) -> Sizing:
    own = {
        "layout version": _core.LAYOUT_VERSION,
        "transport": wanted,
        "first epoch": _FIRST_EPOCH,
        **sizing.record(),
    }
    records = rendezvous.exchange(own | {"bounded": sizing.max_current_pages})
    first = min(records)
    for what in own:
        for process, record in records.items():
            if record[what] != records[first][what]:
                raise HeapError(
                    f"SymmetricHeap: {what} differs: process {first} has {records[first][what]}, "
                    f"process {process} has {record[what]}; pass the same on every process"
                )
    return sizing.with_slots(min(r["bounded"] for r in records.values()))


def _timeout_s(timeout_s: float) -> float:
    given = os.environ.get("SYMMKV_TIMEOUT_S", timeout_s)
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        raise HeapError(f"SymmetricHeap: timeout_s must be a number above 0, got {given!r}")
    return min(seconds, _MAX_TIMEOUT_S)


def _abandon_in_child() -> None:
    """In a forked child: lets go of the parent's heaps, which live on without it."""
    for heap in _open_heaps.values():
        heap._closed = True
        for context in heap._contexts.values():
            context.abandon()
    _open_heaps.clear()


os.register_at_fork(after_in_child=_abandon_in_child)


def _close_at_exit(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the heaps are its parent's
    compat.drain()
    for heap in list(_open_heaps.values()):
        heap.close()

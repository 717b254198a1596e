"""Watches the processes of a run: pumps their output, and sees to it that all of them end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO

TERM_S = 5.0  # from SIGTERM to SIGKILL
_DRAIN_S = 1.0  # for output of what outlived its rank by leaving the rank's process group
_CHUNK_NBYTES = 1 << 16
_FORWARDED = (signal.SIGINT, signal.SIGTERM)

Emit = Callable[[int, str, str], None]
"""Takes a whole line of output: rank, "stdout" or "stderr", the line without its end."""


class Rank:
    """One process of the run, leader of a process group of its own.

    Its own group, so that Ctrl-C at a terminal reaches it once, through the launcher, and so that
    what it spawned can be ended with it.
    """

    def __init__(
        self, number: int, argv: Sequence[str], env: Mapping[str, str], *, piped: bool
    ) -> None:
        pipe = subprocess.PIPE if piped else None
        self.number = number
        self.exit_code: int | None = None  # negative: the signal that ended it
        self._process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            process_group=0,
        )
        self.pidfd = os.pidfd_open(self._process.pid)
        self.streams: dict[str, IO[bytes]] = {}
        if self._process.stdout and self._process.stderr:
            self.streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}

    def send(self, signum: int) -> None:
        if self.exit_code is None:
            os.killpg(self._process.pid, signum)

    def reap(self) -> int:
        """Waits for the process and ends what is left of its group; returns the exit code."""
        if self.exit_code is None:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            # Not reaped yet, so the number of the group still cannot be anybody else's.
            os.killpg(self._process.pid, signal.SIGKILL)
            self.exit_code = self._process.wait()
            os.close(self.pidfd)
        return self.exit_code


@dataclass
class Supervisor:
    """Runs its ranks to their end.

    When a rank fails the others get `grace_s` to say what they have to say (that their peer is gone,
    for instance), then SIGTERM, then SIGKILL. When `timeout_s` is over they get SIGTERM at once.
    """

    emit: Emit
    note: Callable[[str], None]
    timeout_s: float | None
    grace_s: float
    ranks: list[Rank] = field(default_factory=list)
    first_failed: Rank | None = None
    timed_out: bool = False
    received: int | None = None  # the signal that was forwarded

    def run(self, spawn: Iterator[Rank]) -> None:
        """Takes the ranks as `spawn` starts them. Whatever happens, none is left running."""
        self._deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s
        self._stop_at: float | None = None
        self._stop_with = signal.SIGTERM
        self._pumps: set[_Pump] = set()
        with selectors.DefaultSelector() as self._selector, self._signals_forwarded():
            try:
                for rank in spawn:
                    self.ranks.append(rank)
                    self._watch(rank)
                while self._running():
                    self._handle_events(until=self._next_due())
                    self._climb_ladder(time.monotonic())
                self._drain()
            finally:
                for rank in self.ranks:
                    rank.send(signal.SIGKILL)
                for rank in self.ranks:
                    rank.reap()
                    for stream in rank.streams.values():
                        stream.close()

    def _running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    # --- events ----------------------------------------------------------------------------------

    def _watch(self, rank: Rank) -> None:
        self._selector.register(rank.pidfd, selectors.EVENT_READ, partial(self._end, rank))
        for name, stream in rank.streams.items():
            pump = _Pump(stream, partial(self.emit, rank.number, name))
            self._pumps.add(pump)
            self._selector.register(stream, selectors.EVENT_READ, partial(self._pump, pump))

    def _handle_events(self, until: float | None) -> None:
        wait_s = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            key.data()

    def _end(self, rank: Rank) -> None:
        self._selector.unregister(rank.pidfd)
        code = rank.reap()
        if code == 0 or self.first_failed is not None:
            return
        self.first_failed = rank
        what = f"rank {rank.number} {describe_exit(code)}"
        if (others := self._running()) and self._stop_at is None:
            what += f"; {_names(others)} may go on for {self.grace_s:g} s"
        self.note(what)
        self._stop_after(self.grace_s)

    def _pump(self, pump: _Pump) -> None:
        if not pump.read():
            self._selector.unregister(pump.stream)
            self._pumps.remove(pump)

    def _drain(self) -> None:
        """Pumps what is left; not for long, since a process that left its group may hold a pipe."""
        until = time.monotonic() + _DRAIN_S
        while self._pumps and time.monotonic() < until:
            self._handle_events(until)
        for pump in self._pumps:
            pump.close()

    # --- the kill ladder -------------------------------------------------------------------------

    def _stop_after(self, after_s: float) -> None:
        due = time.monotonic() + after_s
        self._stop_at = due if self._stop_at is None else min(due, self._stop_at)

    def _next_due(self) -> float | None:
        return min((t for t in (self._deadline, self._stop_at) if t is not None), default=None)

    def _climb_ladder(self, now: float) -> None:
        running = self._running()
        if self._deadline is not None and now >= self._deadline and running:
            self._deadline = None
            self.timed_out = True
            self.note(f"not done after {self.timeout_s:g} s; still running: {_names(running)}")
            self._stop_after(0.0)
        if self._stop_at is not None and now >= self._stop_at:
            for rank in running:
                rank.send(self._stop_with)
            self._stop_with = signal.SIGKILL
            self._stop_at = now + TERM_S

    # --- signals ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may take signals
            return
        with contextlib.ExitStack() as undo:
            sent, came = (undo.enter_context(end) for end in socket.socketpair())
            for end in (sent, came):
                end.setblocking(False)
            # The handlers do nothing, so they interrupt nothing: the loop reads the numbers that
            # Python writes to this socket.
            undo.callback(
                signal.set_wakeup_fd,
                signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False),
            )
            for signum in _FORWARDED:
                undo.callback(signal.signal, signum, signal.signal(signum, lambda *_: None))
            self._selector.register(came, selectors.EVENT_READ, partial(self._forward, came))
            yield

    def _forward(self, came: socket.socket) -> None:
        for signum in came.recv(_CHUNK_NBYTES):
            if signum not in _FORWARDED:
                continue
            if self.received is not None:  # a second time: somebody is out of patience
                self._stop_with = signal.SIGKILL
            for rank in self._running():
                rank.send(signum)
            self._stop_after(self.grace_s if self.received is None else 0.0)
            self.received = signum


class _Pump:
    """Cuts a stream into whole lines, so that lines of several ranks never mix."""

    def __init__(self, stream: IO[bytes], emit: Callable[[str], None]) -> None:
        self.stream = stream
        self._emit = emit
        self._partial = b""

    def read(self) -> bool:
        """Emits the lines that are complete; False at the end of the stream."""
        data = os.read(self.stream.fileno(), _CHUNK_NBYTES)
        if not data:
            self.close()
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._emit(line.decode(errors="replace"))
        return True

    def close(self) -> None:
        """Emits a last line that has no end."""
        if self._partial:
            self._emit(self._partial.decode(errors="replace"))
            self._partial = b""


def describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def _names(ranks: Sequence[Rank]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(
        str(rank.number) for rank in ranks
    )

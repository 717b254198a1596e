"""What holds for every test: it leaves nothing behind, and a run without a test has failed."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

SHM = Path("/dev/shm")
SETTLE_S = 2.0  # an ended process may still be on its way out
_PR_SET_CHILD_SUBREAPER = 36

_T = TypeVar("_T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if a test is skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ci(declared): what register_ci says of the file")
    config.pluginmanager.register(Outcomes(config), "symmkv-outcomes")
    # Orphans come to this process instead of init, so that a launcher that leaks its ranks is seen.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Outcomes:
    """Fails a run in which no test ran, and with --no-skips one in which a test was skipped."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ran = 0
        self._skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped.append(report.nodeid)
        elif report.when == "call":
            self._ran += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK or self._config.option.collectonly:
            return
        if self._skipped and self._config.option.no_skips:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif not self._ran:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._skipped and self._config.option.no_skips:
            terminalreporter.section("skipped, which --no-skips forbids")
            for nodeid in self._skipped:
                terminalreporter.line(nodeid)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No shared memory of ours and no child process outlives a test."""
    before = set(_child_processes())
    yield
    segments = _settled(abandoned_segments)
    children = _settled(lambda: [pid for pid in _child_processes() if pid not in before])
    # Away with them, whoever is to blame, so that the next test doesn't fail for this one.
    for segment in segments:
        segment.unlink(missing_ok=True)
    commands = [f"{pid} ({_command(pid)})" for pid in children]
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    assert not segments, f"left in {SHM}: {', '.join(segment.name for segment in segments)}"
    assert not commands, f"child processes still running: {', '.join(commands)}"


def _settled(look: Callable[[], list[_T]]) -> list[_T]:
    deadline = time.monotonic() + SETTLE_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def abandoned_segments() -> list[Path]:
    """Names in /dev/shm that no living process owns, or that this process still holds.

    Owners hold a lock on their segment; other test runs of this machine may have some, rightly.
    """
    held = {os.path.realpath(fd) for fd in Path("/proc/self/fd").glob("*")}
    found = []
    for segment in SHM.glob("symmkv-*"):
        try:
            with segment.open("rb") as file:
                # struct flock: type, whence, start, length, pid
                asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked)
        except FileNotFoundError:
            continue
        if struct.unpack("hhqqi4x", answer)[0] == fcntl.F_UNLCK or str(segment) in held:
            found.append(segment)
    return found


def _child_processes() -> list[int]:
    """The running children of this process; not those that have ended and wait to be reaped."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = rest.split()[:2]
        if int(parent) == os.getpid() and state != "Z":
            children.append(int(stat.parent.name))
    return children


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"

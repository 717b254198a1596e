"""The supervisor, over shell processes: no JAX, so that each case takes a fraction of a second."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from jax_symmkv.cli import supervise
from jax_symmkv.cli.supervise import Rank, Supervisor
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", ranks=3, est_s=6)

ENV = {"PATH": os.environ["PATH"]}
STUBBORN = "trap '' TERM INT; while :; do sleep 0.05; done"


class Run:
    """Supervises one shell script a rank, to the end."""

    def __init__(
        self, *scripts: str, timeout_s: float | None = 20.0, grace_s: float = 20.0
    ) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.notes: list[str] = []
        self.supervisor = Supervisor(
            lambda *line: self.lines.append(line), self.notes.append, timeout_s, grace_s
        )
        start = time.monotonic()
        self.supervisor.run(
            Rank(number, ["sh", "-c", script], ENV, piped=True)
            for number, script in enumerate(scripts)
        )
        self.took_s = time.monotonic() - start
        self.codes = [rank.exit_code for rank in self.supervisor.ranks]

    def first_failed(self) -> int | None:
        rank = self.supervisor.first_failed
        return None if rank is None else rank.number


def send_when(exists: Sequence[Path], *signums: int) -> threading.Thread:
    """Sends this process signals, 0.1 s apart, when all the files are there."""

    def body() -> None:
        deadline = time.monotonic() + 10.0
        while not all(path.exists() for path in exists) and time.monotonic() < deadline:
            time.sleep(0.01)
        for signum in signums:
            os.kill(os.getpid(), signum)
            time.sleep(0.1)

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def ends(pid: int) -> bool:
    """The process has ended, or does so within two seconds."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_all_succeed() -> None:
    run = Run("echo a", "echo b >&2", "exit 0")
    assert run.codes == [0, 0, 0]
    assert sorted(run.lines) == [(0, "stdout", "a"), (1, "stderr", "b")]
    assert run.first_failed() is None
    assert run.notes == []


def test_lines_of_pieces_are_emitted_whole_and_a_last_one_without_end_too() -> None:
    run = Run("for i in 1 2 3; do printf 'he'; sleep 0.05; printf 'llo\\n\\n'; done; printf 'end'")
    assert [line for _, _, line in run.lines] == ["hello", "", "hello", "", "hello", "", "end"]


def test_bytes_that_are_no_utf8_are_no_error() -> None:
    assert Run("printf '\\377x\\n'").lines == [(0, "stdout", "\ufffdx")]


def test_first_failure_is_the_first_in_time() -> None:
    run = Run("sleep 1.5; exit 3", "sleep 0.1; exit 7", "exit 0")
    assert run.codes == [3, 7, 0]
    assert run.first_failed() == 1
    assert run.notes == ["rank 1 failed with exit code 7; rank 0 may go on for 20 s"]


def test_others_get_grace_after_a_failure_to_report() -> None:
    run = Run("exit 1", "sleep 0.3; echo my peer is gone")
    assert run.codes == [1, 0]
    assert run.lines == [(1, "stdout", "my peer is gone")]


def test_others_are_terminated_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "TERM_S", 0.3)
    run = Run("kill -9 $$", "sleep 60", STUBBORN, grace_s=0.3)
    assert run.codes == [-9, -15, -9]
    assert run.first_failed() == 0
    assert run.notes == ["rank 0 was ended by SIGKILL; ranks 1, 2 may go on for 0.3 s"]
    assert 0.6 <= run.took_s < 5.0


def test_deadline_ends_the_run_and_says_who_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "TERM_S", 0.3)
    run = Run("sleep 60", "exit 0", STUBBORN, timeout_s=0.5)
    assert run.codes == [-15, 0, -9]
    assert run.supervisor.timed_out
    assert run.notes[0] == "not done after 0.5 s; still running: ranks 0, 2"
    assert run.took_s < 5.0


def test_deadline_in_the_grace_of_a_failure_is_kept() -> None:
    run = Run("exit 1", "sleep 60", timeout_s=0.5)
    assert run.supervisor.timed_out
    assert run.took_s < 5.0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_forwarded_once_to_every_rank(signum: signal.Signals, tmp_path: Path) -> None:
    ready = [tmp_path / "0", tmp_path / "1"]
    script = (
        f"trap 'echo got it; got=1' {signum.name[3:]}; touch %s; "
        "while [ -z $got ]; do sleep 0.05; done; sleep 0.3"
    )
    thread = send_when(ready, signum)
    run = Run(*(script % path for path in ready))
    thread.join()
    # On stderr the shell may say that its own child was terminated with it.
    assert sorted(line for line in run.lines if line[1] == "stdout") == [
        (0, "stdout", "got it"),
        (1, "stdout", "got it"),
    ]
    assert run.supervisor.received == signum
    assert run.codes == [0, 0]


def test_signal_ends_ranks_that_ignore_it_after_the_grace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervise, "TERM_S", 0.2)
    thread = send_when([tmp_path / "0"], signal.SIGINT)
    run = Run(f"trap '' INT TERM; touch {tmp_path / '0'}; {STUBBORN}", grace_s=0.2)
    thread.join()
    assert run.codes == [-9]
    assert run.took_s < 5.0


def test_second_signal_kills_at_once(tmp_path: Path) -> None:
    thread = send_when([tmp_path / "0"], signal.SIGINT, signal.SIGINT)
    run = Run(f"trap '' INT TERM; touch {tmp_path / '0'}; {STUBBORN}")
    thread.join()
    assert run.codes == [-9]
    assert run.took_s < 5.0


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    Run("exit 0")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_works_outside_of_the_main_thread() -> None:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(Run("exit 5")))
    thread.start()
    thread.join()
    assert runs[0].codes == [5]


@pytest.mark.parametrize("exit_code", [0, 1])
def test_what_a_rank_leaves_running_is_ended_with_it(exit_code: int) -> None:
    run = Run(f"sleep 60 & echo $!; exit {exit_code}")
    assert run.codes == [exit_code]
    assert ends(int(run.lines[0][2]))
    assert run.took_s < 5.0


def test_process_outside_of_the_group_holds_the_run_up_for_a_moment_only() -> None:
    run = Run("setsid sleep 30 & echo -n $!")
    assert run.codes == [0]
    assert run.took_s < 10.0
    os.kill(int(run.lines[0][2]), signal.SIGKILL)


def test_error_while_starting_ends_the_ranks_that_have_started() -> None:
    supervisor = Supervisor(lambda *_: None, lambda _: None, None, 1.0)

    def spawn():  # type: ignore[no-untyped-def]
        yield Rank(0, ["sleep", "60"], ENV, piped=True)
        yield Rank(1, ["./there-is-no-such-program"], ENV, piped=True)

    with pytest.raises(FileNotFoundError, match="there-is-no-such-program"):
        supervisor.run(spawn())
    assert [rank.exit_code for rank in supervisor.ranks] == [-9]


def test_error_while_printing_ends_the_ranks() -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError

    supervisor = Supervisor(broken, lambda _: None, None, 1.0)
    with pytest.raises(BrokenPipeError):
        supervisor.run(iter([Rank(0, ["sh", "-c", "echo x; sleep 60"], ENV, piped=True)]))
    assert [rank.exit_code for rank in supervisor.ranks] == [-9]

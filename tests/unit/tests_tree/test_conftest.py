"""What every test is checked for: that it leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.registry import TESTS, register_ci

pytestmark = register_ci(suite="unit", est_s=10)

HEADER = "import fcntl, os, struct, subprocess, sys\n"
NAME = "shm/symmkv-x"  # not in the real place, where other test runs look
LOCKED_ELSEWHERE = f"""
import fcntl, os, struct, sys
file = open({NAME!r}, "wb")
fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
print("locked", flush=True)
sys.stdin.read()
"""


def run(tmp_path: Path, test: str) -> tuple[int, str]:
    """Runs one test under the real conftest, in a process of its own."""
    (tmp_path / "shm").mkdir(exist_ok=True)
    conftest = (TESTS / "conftest.py").read_text()
    assert conftest.count('"/dev/shm"') == 1
    shm = repr(str(tmp_path / "shm"))
    (tmp_path / "conftest.py").write_text(conftest.replace('"/dev/shm"', shm))
    body = "\n".join(f"    {line}" for line in test.splitlines())
    (tmp_path / "test_it.py").write_text(f"{HEADER}def test_it():\n{body}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # for speed
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stdout


def test_segment_left_behind_fails_the_test_and_is_removed(tmp_path: Path) -> None:
    code, output = run(tmp_path, f"open({NAME!r}, 'wb').close()")
    assert code == 1
    assert f"left in {tmp_path / 'shm'}: symmkv-x" in output
    assert not (tmp_path / NAME).exists()


def test_segment_that_the_test_process_holds_is_left_behind_too(tmp_path: Path) -> None:
    lock = "fcntl.fcntl(f, fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))"
    code, output = run(tmp_path, f"global f; f = open({NAME!r}, 'wb')\n{lock}")
    assert code == 1
    assert f"left in {tmp_path / 'shm'}: symmkv-x" in output
    assert not (tmp_path / NAME).exists()


def test_segment_of_another_living_process_is_its_own_affair(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", LOCKED_ELSEWHERE],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "locked\n"
            code, output = run(tmp_path, "pass")
        finally:
            other.communicate()
    assert code == 0, output
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "command",
    [["sleep", "60"], ["sh", "-c", "sleep 60 & exit"]],
    ids=["child", "orphaned-grandchild"],
)
def test_process_left_running_fails_the_test_and_is_ended(
    command: list[str], tmp_path: Path
) -> None:
    start = f"global p; p = subprocess.Popen({command!r}, stdout=subprocess.DEVNULL)"
    code, output = run(tmp_path, f"{start}\nimport time; time.sleep(0.2)")
    assert code == 1
    assert "child processes still running" in output
    assert "(sleep 60)" in output


def test_process_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    code, output = run(tmp_path, "subprocess.Popen(['sleep', '0.5'])")
    assert code == 0, output


def test_children_are_found() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in conftest._child_processes()
        child.kill()

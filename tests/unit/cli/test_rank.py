"""What a rank does before the user's program runs; no JAX, and no launcher but one of the test's own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=6)

# The process in the middle plays the launcher; it ends by its stdin, the rank prints to its stdout.
PLAYS_RANK = """
import os, sys, time
from jax_symmkv.cli.rank import die_with_launcher
die_with_launcher(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""
PLAYS_LAUNCHER = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
sys.stdin.read()
"""


def test_rank_dies_with_a_launcher_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PLAYS_LAUNCHER, PLAYS_RANK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        launcher.kill()
        # Ends when the rank does; the rank would sleep for a minute.
        assert launcher.communicate(timeout=50) == ("", None)


def test_rank_whose_launcher_has_ended_already_dies_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PLAYS_RANK, "1"], capture_output=True, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


REPORT = """
import os, sys
print(sys.argv, sys.path, __name__, __file__, sys.modules["__main__"].__dict__ is globals())
import beside
sys.exit(3)
"""


@pytest.mark.parametrize("argv", [["sub/script.py", "a", "-b"], ["-m", "sub.script", "a", "-m"]])
def test_program_sees_what_python_would_show_it(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(REPORT)
    for place in (tmp_path, tmp_path / "sub"):
        (place / "beside.py").write_text("print('beside', __file__)")
    # A rank is `python -m jax_symmkv.cli.rank ...`; without its connection, it is this module.
    (tmp_path / "as_rank.py").write_text(
        "import sys; from jax_symmkv.cli.rank import run_as_python_would as f; f(sys.argv[1:])"
    )
    outputs = []
    for command in (argv, ["-m", "as_rank", *argv]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        assert done.returncode == 3
        outputs.append(done.stdout.splitlines())
    assert outputs[0] == outputs[1]

"""What the command line makes of its arguments, and what a rank is given."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import pytest

from jax_symmkv import __main__
from jax_symmkv.cli import launch
from jax_symmkv.cli.launch import RankResult, RunResult
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=8)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Takes the place of starting ranks: the arguments of each call."""
    calls: list[dict[str, Any]] = []

    def record(argv: list[str], num_ranks: int, **options: Any) -> RunResult:
        calls.append({"argv": argv, "num_ranks": num_ranks, **options})
        return result_of(0)

    monkeypatch.setattr(launch, "run_ranks", record)
    return calls


def result_of(*codes: int, first_failed: int | None = None, timed_out: bool = False) -> RunResult:
    ranks = tuple(RankResult(rank, code, "") for rank, code in enumerate(codes))
    return RunResult(ranks, first_failed, timed_out, signal=None, notes=())


def test_everything_after_the_script_is_the_scripts(started: list[dict[str, Any]]) -> None:
    assert __main__.main(["launch", "-n", "3", __file__, "-n", "1", "--timeout-s", "--", "x"]) == 0
    assert started[0]["argv"] == [__file__, "-n", "1", "--timeout-s", "--", "x"]
    assert started[0]["num_ranks"] == 3


def test_double_dash_before_the_program_is_dropped(started: list[dict[str, Any]]) -> None:
    assert __main__.main(["launch", "-n", "2", "--", "-m", "pkg.mod", "--flag", "--", "x"]) == 0
    assert started[0]["argv"] == ["-m", "pkg.mod", "--flag", "--", "x"]


def test_options(started: list[dict[str, Any]]) -> None:
    options = ["--devices-per-rank", "2", "--timeout-s", "1.5", "--grace-s", "3", "--no-prefix"]
    assert __main__.main(["launch", "--ranks", "2", *options, __file__]) == 0
    assert started[0] == {
        "argv": [__file__],
        "num_ranks": 2,
        "devices_per_rank": 2,
        "timeout_s": 1.5,
        "grace_s": 3.0,
        "prefix": False,
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-n", "0", __file__], "ranks must be at least 1, got 0"),
        (["-n", "-2", __file__], "ranks must be at least 1, got -2"),
        (["-n", "2", "--devices-per-rank", "0", __file__], "devices per rank must be at least 1"),
        (["-n", "2", "--timeout-s", "0", __file__], "timeout must be above 0 s, got 0"),
        (["-n", "2", "--grace-s", "-1", __file__], "grace must be from 0 s on, got -1"),
        (["-n", "2", "no/such/script.py"], "script 'no/such/script.py' is no file"),
        (["-n", "2", "/"], "script '/' is no file"),
        (["-n", "2"], "a program is required"),
        (["-n", "2", "--"], "a program is required"),
        (["-n", "2", "--", "-m"], "-m requires the name of a module"),
        (["-n", "2", "--", "-c", "print()"], "got the option '-c'"),
    ],
)
def test_bad_input_is_refused_and_starts_nothing(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "Rank", None)
    assert __main__.main(["launch", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["-n", "two", "x.py"], ["x.py"], ["--ranks"]])
def test_what_argparse_refuses_is_exit_code_2_too(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        __main__.main(["launch", *argv])
    assert exit.value.code == 2


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (result_of(0, 0), 0),
        (result_of(3, 7, first_failed=1), 7),
        (result_of(1, -9, first_failed=1), 137),
        (result_of(-2, -2, first_failed=0), 130),
        (result_of(-15, 0, first_failed=0, timed_out=True), 124),
    ],
)
def test_exit_code_is_that_of_the_first_failure(result: RunResult, code: int) -> None:
    assert result.exit_code == code


def test_rank_environment() -> None:
    env = launch._rank_env({"XLA_FLAGS": "--a=1", "HOME": "/h"}, "127.0.0.1:9", 1, 2, devices=3)
    assert env["XLA_FLAGS"] == "--a=1 --xla_force_host_platform_device_count=3"
    assert env["HOME"] == "/h"
    assert env["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:9"
    assert (env["JAX_PROCESS_ID"], env["JAX_NUM_PROCESSES"]) == ("1", "2")
    assert env["JAX_LOCAL_DEVICE_IDS"] == "3,4,5"


def test_rank_environment_leaves_the_users_choice_alone() -> None:
    env = launch._rank_env({"JAX_LOCAL_DEVICE_IDS": "0"}, "a:1", 1, 2, devices=None)
    assert env["JAX_LOCAL_DEVICE_IDS"] == "0"
    assert "XLA_FLAGS" not in env


def test_commands_import_only_what_they_need() -> None:
    code = (
        "import sys\n"
        "from jax_symmkv import __main__\n"
        "assert __main__.main(['launch', '-n', '0', 'x']) == 2\n"
        "loaded = [m for m in sys.modules if m.startswith('jax_symmkv.cli.')]\n"
        "assert not [m for m in loaded if 'demo' in m or 'bench' in m], loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_without_a_command_it_is_bad_input(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        __main__.main(argv)
    assert exit.value.code == 2


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        __main__.main(["--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in __main__.COMMANDS)


def test_launch_help_says_how_to_run_a_module() -> None:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    assert "-- -m module" in parser.format_help()

"""Runs a function of a test file on several ranks; also what each of those ranks executes.

    result = run_ranks_of(__file__, "check_compose", ranks=2, dtype="bfloat16")

The function is a plain function of the file, its name not starting with `test_`. On every rank it
runs with jax.distributed connected, on CPU devices. The ranks cost about 1.5 s a spawn on 2 cores, so
let one spawn check several things.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jax_symmkv.cli.launch import RunResult, run_ranks

ROOT = Path(__file__).resolve().parent.parent
SHOWN_LINES = 100  # of each rank, when a test fails


def run_ranks_of(
    file: str,
    function: str,
    *,
    ranks: int,
    devices_per_rank: int = 1,
    timeout_s: float = 60.0,
    expect: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
    **json_args: Any,
) -> RunResult:
    """Calls `function(**json_args)` of `file` on every rank, and fails the test if a rank fails.

    Args:
      file: the test's own `__file__`.
      timeout_s: deadline of the whole run; ranks that are still running print their stacks and end.
      expect: exit codes of the ranks that are meant to fail, negative for a signal: `{1: -9}`. The
        others then have until the deadline to end as they should.
      env: environment variables of the ranks, on top of this process's.
      json_args: arguments of the function; whatever survives JSON.
    """
    expected = {rank: 0 for rank in range(ranks)} | dict(expect or {})
    result = run_ranks(
        ["-m", "tests.run_rank", file, function, json.dumps(json_args)],
        ranks,
        devices_per_rank=devices_per_rank,
        timeout_s=timeout_s,
        grace_s=timeout_s if expect else 10.0,
        env={
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *_paths(os.environ.get("PYTHONPATH"))]),
            "PYTHONFAULTHANDLER": "1",  # a crash in native code says where
            **(env or {}),
        },
        capture=True,
    )
    if result.signal is not None:  # Ctrl-C ends the ranks first, then the test run as ever
        signal.raise_signal(result.signal)
    actual = {rank.rank: rank.exit_code for rank in result.ranks}
    if result.timed_out or actual != expected:
        pytest.fail(_failure(function, result, expected), pytrace=False)
    return result


def _failure(function: str, result: RunResult, expected: Mapping[int, int]) -> str:
    lines = [f"{function} on {len(result.ranks)} ranks failed"]
    lines += [
        f"rank {rank.rank}: exit code {rank.exit_code}, expected {expected[rank.rank]}"
        for rank in result.ranks
        if rank.exit_code != expected[rank.rank]
    ]
    lines += result.notes
    for rank in result.ranks:
        output = rank.output.splitlines()
        left_out = max(0, len(output) - SHOWN_LINES)
        lines.append(f"--- rank {rank.rank}" + (f", {left_out} lines left out" if left_out else ""))
        lines += [f"[{rank.rank}] {line}" for line in output[left_out:]]
    return "\n".join(lines)


def _paths(value: str | None) -> list[str]:
    return value.split(os.pathsep) if value else []


def main(file: str, function: str, json_args: str) -> None:
    """What a rank executes."""
    faulthandler.register(signal.SIGTERM, chain=True)  # past the deadline: says where, and ends
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the file look themselves up there
    spec.loader.exec_module(module)
    getattr(module, function)(**json.loads(json_args))


if __name__ == "__main__":
    main(*sys.argv[1:])

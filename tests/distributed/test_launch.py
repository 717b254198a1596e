"""The launcher with real ranks: connected by jax.distributed, and ended one way or another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.registry import register_ci
from tests.run_rank import ROOT, run_ranks_of

pytestmark = register_ci(suite="distributed", ranks=3, est_s=25)


# --- what ranks execute --------------------------------------------------------------------------


def check_connected(process_count: int, local_devices: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax._src import xla_bridge
    from jax.sharding import PartitionSpec as P

    assert not xla_bridge.backends_are_initialized()  # the program may still configure JAX
    # A program that also runs under Slurm or mpirun initializes; here that is done already.
    jax.distributed.initialize()
    jax.distributed.initialize(num_processes=process_count)
    with pytest.raises(ValueError, match="passes num_processes=7"):
        jax.distributed.initialize(num_processes=7)
    assert jax.process_count() == process_count
    assert jax.process_index() == int(os.environ["JAX_PROCESS_ID"])
    assert jax.local_device_count() == local_devices

    total = jax.device_count()
    mesh = jax.make_mesh((total,), ("x",))
    sharding = jax.NamedSharding(mesh, P("x"))
    values = np.arange(total, dtype=np.float32)
    x = jax.make_array_from_callback((total,), sharding, lambda index: values[index])
    psum = jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    np.testing.assert_array_equal(jax.jit(psum)(x), jnp.array([values.sum()]))


def check_survivor(pid_file: str) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    victim = Path(pid_file)
    if jax.process_index() == 1:
        victim.write_text(str(os.getpid()))
    multihost_utils.sync_global_devices("up")
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while Path(f"/proc/{victim.read_text()}").exists():
        time.sleep(0.01)
    time.sleep(1.0)  # time for JAX to hear of it
    assert jax.jit(lambda x: x + 1)(jnp.ones(())) == 2.0
    print("rank 0 goes on")


def check_rank_that_fails() -> None:
    if os.environ["JAX_PROCESS_ID"] == "1":
        raise ValueError("what the harness must show")


def check_rank_that_is_terminated() -> None:
    def here_it_hangs() -> None:
        signal.raise_signal(signal.SIGTERM)  # as the deadline has the launcher do

    if os.environ["JAX_PROCESS_ID"] == "0":
        here_it_hangs()


# --- through the harness -------------------------------------------------------------------------


def test_ranks_are_connected_and_nothing_is_printed_that_they_do_not_print() -> None:
    result = run_ranks_of(
        __file__,
        "check_connected",
        ranks=2,
        devices_per_rank=2,
        process_count=2,
        local_devices=2,
    )
    assert [rank.output for rank in result.ranks] == ["", ""]


def test_survivor_of_a_killed_rank_goes_on(tmp_path: Path) -> None:
    result = run_ranks_of(
        __file__, "check_survivor", ranks=2, expect={1: -9}, pid_file=str(tmp_path / "pid")
    )
    assert result.ranks[0].output == "rank 0 goes on\n"
    assert result.first_failed == 1
    assert result.exit_code == 128 + 9


def test_harness_fails_with_the_output_of_the_rank_that_fails() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks_of(__file__, "check_rank_that_fails", ranks=2)
    assert "rank 1: exit code 1, expected 0" in str(failure.value)
    assert "[1] ValueError: what the harness must show" in str(failure.value)


def test_harness_shows_where_a_rank_hangs() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks_of(__file__, "check_rank_that_is_terminated", ranks=2)
    assert "rank 0: exit code -15, expected 0" in str(failure.value)
    assert "in here_it_hangs" in str(failure.value)


def test_harness_fails_past_the_deadline() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        run_ranks_of(__file__, "check_survivor", ranks=2, timeout_s=0.3, pid_file="")
    assert "not done after 0.3 s; still running: ranks 0, 1" in str(failure.value)


# --- through the command -------------------------------------------------------------------------


def launch(tmp_path: Path, script: str, *options: str) -> subprocess.Popen[str]:
    """`python -m jax_symmkv launch` of a script on 2 ranks; `rank` is defined there."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, signal, sys, time\nrank = os.environ['JAX_PROCESS_ID']\n{script}"
    )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "jax_symmkv", "launch", "-n", "2", *options, str(program)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids_printed(launcher: subprocess.Popen[str]) -> list[int]:
    assert launcher.stdout is not None
    return [int(launcher.stdout.readline().split()[1]) for _ in range(2)]


def test_command_prefixes_lines_and_returns_the_first_failing_code(tmp_path: Path) -> None:
    pid = str(tmp_path / "pid")
    launcher = launch(
        tmp_path,
        f"""
if rank == "1":
    open({pid!r} + "~", "w").write(str(os.getpid()))
    os.rename({pid!r} + "~", {pid!r})
for word in ("one ", "line\\nand ", "another"):
    sys.stdout.write(word); sys.stdout.flush()
    sys.stderr.write(word.upper()); sys.stderr.flush()
    time.sleep(0.1)
if rank == "1":
    sys.exit(5)
while not os.path.exists({pid!r}) or os.path.exists("/proc/" + open({pid!r}).read()):
    time.sleep(0.01)
sys.exit(3)
""",
    )
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 5
    assert sorted(out.splitlines()) == [
        f"[{r}] {s}" for r in "01" for s in ("and another", "one line")
    ]
    note = "launch: rank 1 failed with exit code 5; rank 0 may go on for 10 s"
    said = [f"[{r}] {s}" for r in "01" for s in ("AND ANOTHER", "ONE LINE")]
    assert sorted(err.splitlines()) == sorted([*said, note])


def test_command_without_prefix_passes_output_through(tmp_path: Path) -> None:
    launcher = launch(
        tmp_path, "print('x' if rank == '0' else '', end='', flush=True)", "--no-prefix"
    )
    assert launcher.communicate(timeout=60) == ("x", "")
    assert launcher.returncode == 0


def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "print(os.getpid()); time.sleep(60)")
    pids_printed(launcher)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT
    assert err.count("KeyboardInterrupt") == 2


def test_deadline_of_the_command(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "time.sleep(60 if rank == '1' else 0)", "--timeout-s", "4")
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 124
    # On a busy machine rank 0 may not have come so far as to end.
    assert re.match(r"launch: not done after 4 s; still running: (rank|ranks 0,) 1\n", err), err


def test_closed_stdout_ends_the_run(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "while True: print('on and on'); time.sleep(0.05)")
    assert launcher.stdout is not None and launcher.stderr is not None
    launcher.stdout.close()
    assert launcher.wait(timeout=60) == 128 + signal.SIGPIPE
    assert launcher.stderr.read() == ""


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "print(os.getpid()); time.sleep(60)")
    pids = pids_printed(launcher)
    launcher.kill()
    launcher.communicate(timeout=60)  # the pipes end, since nobody is left to hold them
    deadline = time.monotonic() + 5.0
    while running := [pid for pid in pids if re.search(r"State:\s+[^Z]", status(pid))]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.02)


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""

"""Names in /dev/shm: those of the dead are swept, those of the living never."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jax_symmkv import _core
from tests.conftest import SHM
from tests.registry import register_ci
from tests.run_rank import ROOT

pytestmark = register_ci(suite="faults", ranks=2, est_s=5)

OWNER = """
import signal
from tests.faults.test_segments import create
context = create()
print(context.address, flush=True)
signal.pause()
"""
SWEEPER = """
from jax_symmkv import _core
print("", flush=True)
while True:
    _core.sweep_stale_segments()
"""


def create() -> _core.ShmContext:
    """A slab that nobody has mapped yet, so it still has a name."""
    return _core.ShmContext(
        rank=0,
        cp_size=2,
        num_slots=1,
        page_nbytes=[16],
        nonce=1,
        first_epoch=0,
        timeout_ms=1000,
        spin_us=0,
    )


def path_of(name: str) -> Path:
    return SHM / name.strip().lstrip("/")


@contextmanager
def python(program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and its first line; killed in the end."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def test_the_segment_of_a_killed_owner_is_swept_and_that_of_a_living_one_not() -> None:
    with python(OWNER) as (owner, name):
        own = create()
        own_name = own.address
        for _ in range(2):
            assert _core.sweep_stale_segments() == 0
        assert path_of(name).exists()
        assert path_of(own_name).exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert path_of(name).exists()
        assert _core.sweep_stale_segments() == 1
        assert not path_of(name).exists()
        assert path_of(own_name).stat().st_mode & 0o777 == 0o600
        own.close()
        assert not path_of(own_name).exists()


def test_a_sweep_never_takes_a_segment_that_is_being_created() -> None:
    with python(SWEEPER):
        for _ in range(5000):
            context = create()
            assert path_of(context.address).exists()
            context.close()

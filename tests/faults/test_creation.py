"""Creations that fail: on all ranks, for the same reason, with nothing left, and the next one works."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest

import jax_symmkv as symmkv
from jax_symmkv.rendezvous import Rendezvous
from tests.conftest import abandoned_segments
from tests.rank_end import LONG_S, SOON_S, RankEnd, die, sync
from tests.registry import register_ci
from tests.run_rank import ROOT, run_ranks_of

pytestmark = register_ci(suite="faults", ranks=5, est_s=22)

NUM_STEPS = 4  # of a creation


# --- what ranks execute --------------------------------------------------------------------------


def check_deaths() -> None:
    """At each step of a creation the last rank dies; the others learn of it, and create a heap."""
    ranks = list(range(jax.process_count()))
    for step in range(NUM_STEPS):
        last = ranks.pop()
        if jax.process_index() == last:
            die_before_step(step)
        # Before its first record nobody knows whose death to look for, so there the deadline counts.
        timeout_s, says = (LONG_S, "has died before") if step else (1.0, "did not take part in")
        start = time.monotonic()
        with pytest.raises(symmkv.HeapError, match=f"process {last} {says} step {step}") as failed:
            RankEnd([*ranks, last], timeout_s=timeout_s)
        assert time.monotonic() - start < SOON_S
        sync(f"failed at step {step}", ranks)
        # `failed` still holds the traceback, and so the heap that came to nothing.
        assert not abandoned_segments(), failed
        with RankEnd(ranks) as end:
            end.compose_tokens(step)


def die_before_step(step: int) -> None:
    steps = iter(range(NUM_STEPS))
    exchange = Rendezvous.exchange

    def exchange_or_die(self: Rendezvous, record: Mapping[str, Any]) -> Any:
        if next(steps) == step:
            die()
        return exchange(self, record)

    Rendezvous.exchange = exchange_or_die  # type: ignore[method-assign]
    RankEnd(range(jax.process_count() - step))


def check_descriptors() -> None:
    """Rank 1 has no file descriptor left."""
    ranks = range(jax.process_count())
    with RankEnd() as end:  # what jax opens once is open now
        end.compose_tokens(1)
    # With room for one it can read what it must, and create its segment, but not map the other.
    for room, transport in ((0, "shm"), (0, "auto"), (1, "shm")):
        with few_descriptors(room), pytest.raises(symmkv.HeapError, match="Too many open files"):
            RankEnd(transport=transport)
        sync(f"failed with {room}, {transport}", ranks)
        assert not abandoned_segments()
    with few_descriptors(1), RankEnd(transport="auto") as end:
        assert end.heap.transport == "collective"
    with RankEnd() as end:
        end.compose_tokens(1)


@contextlib.contextmanager
def few_descriptors(room: int) -> Iterator[None]:
    """On rank 1: no more than `room` file descriptors can be opened."""
    if jax.process_index() != 1:
        yield
        return
    used = {
        n for n in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{n}")
    }
    free = (n for n in itertools.count() if n not in used)
    limit = next(itertools.islice(free, room, None))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_full_memory() -> None:
    """/dev/shm has 256 KiB here: room for a small heap alone."""
    with pytest.raises(symmkv.HeapError) as failed:
        RankEnd(max_current_pages=1000)
    assert "cannot reserve" in str(failed.value)
    assert "lower max_current_pages or SYMMKV_HEAP_MB): No space left on device" in str(
        failed.value
    )
    with RankEnd(max_current_pages=1000, transport="auto") as end:
        assert end.heap.transport == "collective"
    with RankEnd() as end:
        end.compose_tokens(1)
    sync("closed", range(2))
    assert not os.listdir("/dev/shm")


# --- tests ---------------------------------------------------------------------------------------


def test_a_rank_that_dies_at_any_step_is_named_and_leaves_nothing() -> None:
    killed = {rank: -9 for rank in range(1, 1 + NUM_STEPS)}
    run_ranks_of(__file__, "check_deaths", ranks=1 + NUM_STEPS, expect=killed)


def test_without_descriptors_every_rank_fails_and_with_them_it_works_again() -> None:
    run_ranks_of(__file__, "check_descriptors", ranks=2)


def test_full_shared_memory_is_an_error_or_a_fallback_on_every_rank() -> None:
    unshare = [shutil.which("unshare") or "", "--mount", "--propagation", "private"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount, which root has")
    run = f"from tests.run_rank import run_ranks_of; run_ranks_of({__file__!r}, 'check_full_memory', ranks=2)"
    small = 'mount -t tmpfs -o size=256k none /dev/shm && exec "$@"'
    done = subprocess.run(
        [*unshare, "sh", "-c", small, "sh", sys.executable, "-c", run],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

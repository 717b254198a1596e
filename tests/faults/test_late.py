"""Ranks that are late: within the deadline nothing happens, and after it all the others say who."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import jax_symmkv as symmkv
from tests.rank_end import NO_TICKET, SOON_S, RankEnd, share, sync
from tests.registry import register_ci
from tests.run_rank import run_ranks_of

pytestmark = register_ci(suite="faults", ranks=3, est_s=14)

RANKS = range(3)


# --- what ranks execute --------------------------------------------------------------------------


def check_late() -> None:
    never_there()
    late_but_there()
    stopped_and_continued()
    patient_forever()
    deadline_of_the_operator()


def never_there() -> None:
    """The absent rank comes after the deadline; it fails at once, by the others' cause."""
    for absent, says in {
        (
            2,
        ): "barrier of exchange 2: rank 2 did not arrive within 1 s (ranks 0,1 did). The heap is",
        (
            1,
            2,
        ): "barrier of exchange 2: ranks 1,2 did not arrive within 1 s (rank 0 did). The heap is",
    }.items():
        with RankEnd(timeout_s=1.0) as end:
            end.compose_tokens(1)
            sync(f"met without {absent}", RANKS)
            if end.rank in absent:
                sync(f"waited for {absent}", RANKS)
            start = time.monotonic()
            error = end.assert_poisoned(lambda: end.barrier(NO_TICKET), says)
            took_s = time.monotonic() - start
            if end.rank not in absent:
                assert 0.9 < took_s < 1.0 + SOON_S
                sync(f"waited for {absent}", RANKS)
            assert (error.rank, error.missing) == (absent[0], absent)
            assert (error.epoch, error.phase) == (2, "barrier")
            assert len(set(share(f"message without {absent}", str(error), RANKS))) == 1


def late_but_there() -> None:
    with RankEnd(timeout_s=10.0) as end:
        for exchange in (1, 2, 3):
            if end.rank == exchange % 3:
                time.sleep(0.5)
            end.compose_tokens(exchange)
        sync("late", RANKS)
        end.heap.check()


def stopped_and_continued() -> None:
    """A process that does not run is not dead."""
    with RankEnd() as end:
        pids = share("pids", str(os.getpid()), RANKS)
        start = time.monotonic()
        for exchange in range(20):
            end.compose_tokens(exchange)
            if exchange == 10 and end.rank == 1:
                os.kill(int(pids[2]), signal.SIGSTOP)
                threading.Timer(1.5, os.kill, (int(pids[2]), signal.SIGCONT)).start()
        assert time.monotonic() - start > 1.4
        sync("continued", RANKS)
        end.heap.check()


def patient_forever() -> None:
    for timeout_s in (float("inf"), 1e18):
        with RankEnd(timeout_s=timeout_s) as end:
            if end.rank == 0:
                time.sleep(0.3)  # so that the others' deadlines come to be computed
            end.compose_tokens(1)


def deadline_of_the_operator() -> None:
    """SYMMKV_TIMEOUT_S replaces the argument; one rank's bad value is an error on all, at once."""
    rank = int(os.environ["JAX_PROCESS_ID"])
    os.environ["SYMMKV_TIMEOUT_S"] = "0.5"
    with RankEnd() as end:
        assert end.heap.timeout_s == 0.5
    for bad in ("soon", "0", "nan"):
        os.environ["SYMMKV_TIMEOUT_S"] = bad if rank == 1 else "60"
        start = time.monotonic()
        with pytest.raises(symmkv.HeapError, match=f"must be a number above 0, got '{bad}'"):
            RankEnd()
        assert time.monotonic() - start < SOON_S
    del os.environ["SYMMKV_TIMEOUT_S"]
    with RankEnd() as end:
        end.compose_tokens(1)


# --- tests ---------------------------------------------------------------------------------------


def test_a_late_rank_is_waited_for_until_the_deadline_and_then_named() -> None:
    run_ranks_of(__file__, "check_late", ranks=3)

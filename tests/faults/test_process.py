"""What happens to a rank's process (a fork, Ctrl-C, its end) and to what a heap holds of it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

import jax_symmkv as symmkv
from tests.rank_end import SOON_S, RankEnd, die, share, sync
from tests.registry import register_ci
from tests.run_rank import run_ranks_of
from tests.tokens import misreads

pytestmark = register_ci(suite="faults", ranks=3, est_s=20)

_kept: list[Any] = []  # until the interpreter ends


# --- what ranks execute --------------------------------------------------------------------------


def check_nothing_accumulates() -> None:
    ranks = range(jax.process_count())

    def held() -> tuple[int, int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            mappings = sum("symmkv-" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mappings, len(os.listdir("/proc/self/task"))

    before = None
    for creation in range(103):
        with RankEnd() as end:
            if creation < 3:
                end.compose_tokens(creation)
            assert held()[1] == 2  # its own slab, and its peer's
        if creation == 2:  # what jax opens at first use is open
            sync("warm", ranks)
            before = held()
    assert held() == before


def check_forks() -> None:
    """Rank 1 forks: a child that ends takes nothing along, one that lives on hides no death."""
    with RankEnd() as end:
        end.compose_tokens(1)
        if end.rank == 1:
            assert os.waitpid(fork(end), 0)[1] == 0
        for exchange in (2, 3):
            end.compose_tokens(exchange)
        sync("ended", range(3))
        end.heap.check()

        orphan = fork(end, lives_on=True) if end.rank == 1 else 0
        orphan = max(map(int, share("orphan", str(orphan), range(3))))
        if end.rank == 1:
            die()
        try:
            end.assert_poisoned(end.compose_anything, "rank 1 has died")
            sync("told", (0, 2))
        finally:
            if end.rank == 0:
                os.kill(orphan, signal.SIGKILL)


def fork(end: RankEnd, *, lives_on: bool = False) -> int:
    child = os.fork()
    if child:
        return child
    # Whatever happens, the child must not run on as a second rank.
    code = 1
    try:
        os.setsid()  # out of the group that the launcher kills with its rank
        with contextlib.suppress(symmkv.HeapError):
            end.heap.check()
            os._exit(2)
        end.heap.close()
        if lives_on:
            time.sleep(60)
        code = 0
    finally:
        os._exit(code)


def check_exits(way: str) -> None:
    """Rank 1 ends with its heap open; rank 0 needs it once more."""
    end = RankEnd()
    _kept.append(end)
    end.compose_tokens(1)
    if end.rank == 0:
        how = "has died" if way == "_exit" else "has closed its heap"
        end.assert_poisoned(end.compose_anything, f"rank 1 {how}")
    elif way == "_exit":
        os._exit(3)
    elif way == "exception":
        raise RuntimeError("a rank's own bug")


def check_exit_in_flight() -> None:
    """Rank 0 ends while its program waits for rank 1: the exchange is done first."""
    end = RankEnd()
    end.compose_tokens(1)
    dense, plan = end.batch(2)
    if end.rank == 1:
        end.compose.lower(dense, plan, end.new_ticket()).compile()
        time.sleep(1.0)
    ticket = end.new_ticket()
    start = time.monotonic()
    dense, ticket = end.compose(dense, plan, ticket)
    _kept.append((end, dense, plan))
    if end.rank == 0:
        # Runs before jax_symmkv's own, which was registered earlier.
        atexit.register(lambda: print("in flight:", not dense.is_ready(), flush=True))
        return
    assert not misreads(np.asarray(dense), plan, 2)
    assert time.monotonic() - start < SOON_S


def check_interrupt() -> None:
    """Ctrl-C in a wait for a rank that does not come: heard when the wait ends, at its deadline."""
    timeout_s = 2.0
    with RankEnd(timeout_s=timeout_s) as end:
        end.compose_tokens(1)
        pids = share("pids", str(os.getpid()), range(2))
        if end.rank == 1:
            time.sleep(0.5)
            os.kill(int(pids[0]), signal.SIGINT)
            sync("heard", range(2))
            return
        start = time.monotonic()
        with pytest.raises((KeyboardInterrupt, jax.errors.JaxRuntimeError)):
            jax.block_until_ready(end.compose_anything())
            while True:
                time.sleep(0.01)
        print(f"interrupted after {time.monotonic() - start:.1f} s")
        assert time.monotonic() - start < timeout_s + SOON_S
        sync("heard", range(2))


# --- tests ---------------------------------------------------------------------------------------


def test_a_hundred_creations_hold_nothing() -> None:
    run_ranks_of(__file__, "check_nothing_accumulates", ranks=2)


def test_a_forked_child_neither_harms_a_heap_nor_hides_a_death() -> None:
    run_ranks_of(__file__, "check_forks", ranks=3, expect={1: -9})


@pytest.mark.parametrize(("way", "code"), [("return", 0), ("exception", 1), ("_exit", 3)])
def test_a_rank_that_ends_with_its_heap_open_is_missed_at_once(way: str, code: int) -> None:
    run_ranks_of(__file__, "check_exits", ranks=2, expect={1: code}, way=way)


def test_a_program_in_flight_at_exit_ends_its_exchange() -> None:
    result = run_ranks_of(__file__, "check_exit_in_flight", ranks=2)
    assert "in flight: True" in result.ranks[0].output


def test_an_interrupt_in_a_wait_is_heard_by_the_deadline() -> None:
    run_ranks_of(__file__, "check_interrupt", ranks=2)

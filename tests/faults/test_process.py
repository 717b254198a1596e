"""What happens to a rank's process (a fork, Ctrl-C, its end) and to what a heap holds of it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_symmkv as symmkv
from tests.rank_end import SOON_S, RankEnd, die, share, sync
from tests.registry import register_ci
from tests.run_rank import run_ranks_of
from tests.tokens import misreads

pytestmark = register_ci(suite="faults", ranks=4, est_s=26)

_kept: list[Any] = []  # until the interpreter ends


# --- what ranks execute --------------------------------------------------------------------------


def check_nothing_accumulates() -> None:
    ranks = range(jax.process_count())

    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("symmkv-" in line for line in maps)

    def held() -> tuple[int, int, int]:
        gc.collect()
        return mapped(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = None
    for creation in range(103):
        with RankEnd() as end:
            if creation < 3:
                end.compose_tokens(creation)
            assert mapped() == 2  # its own slab, and its peer's
        if creation == 2:  # what jax opens at first use is open
            sync("warm", ranks)
            before = held()
    assert before is not None and before[0] == 0
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


def check_exits() -> None:
    """The others end with a heap of theirs and rank 0's open; rank 0 needs them once more."""
    me = jax.process_index()
    for other in (1, 2, 3):
        if me not in (0, other):
            continue
        end = RankEnd([0, other])
        _kept.append(end)
        end.compose_tokens(1)
        if me == 0:
            how = "has died" if other == 3 else "has closed its heap"
            end.assert_poisoned(end.compose_anything, f"rank 1 {how}")
    if me == 2:
        raise RuntimeError("a rank's own bug")
    if me == 3:
        os._exit(3)


def check_exit_in_flight() -> None:
    """Rank 0 ends while its program waits for rank 1: all of its exchanges are done first."""
    end = RankEnd()
    end.compose_tokens(1)
    dense, plan = end.batch(2)

    @jax.jit
    def program(dense: Any, plan: symmkv.ComposePlan, x: jax.Array) -> Any:
        ticket = symmkv.new_ticket(end.heap)
        for _ in range(3):
            dense, ticket = symmkv.compose(dense, plan, ticket, heap=end.heap)
        # So much work that XLA doesn't run the program in the thread that dispatches it.
        return dense, ticket, jax.lax.fori_loop(0, 10, lambda _, x: jnp.sin(x @ x), x)

    sync("met", range(2))
    if end.rank == 1:
        time.sleep(2.0)
    dense, *rest = program(dense, plan, np.ones((256, 256), np.float32))
    _kept.append((end, dense, rest))
    if end.rank == 0:
        # Runs before jax_symmkv's own, which was registered earlier.
        atexit.register(lambda: print("in flight:", not dense.is_ready(), flush=True))
    else:
        assert not misreads(np.asarray(dense), plan, 2)


def check_waits() -> None:
    check_call_in_progress()
    check_interrupt()


def check_call_in_progress() -> None:
    """Threads that check and close the heap wait for the call in progress, and no other thread does."""
    with RankEnd() as end:
        end.compose_tokens(1)
        if end.rank == 1:
            time.sleep(1.5)
            end.compose_tokens(2)
            return

        def check() -> None:
            with contextlib.suppress(symmkv.HeapError):  # closed in the meantime
                end.heap.check()

        with ThreadPoolExecutor() as threads:
            composing = threads.submit(end.compose_tokens, 2)
            time.sleep(0.3)
            checking = threads.submit(check)
            start = time.monotonic()
            for _ in range(20):
                time.sleep(0.01)
            assert time.monotonic() - start < 0.8
            assert not composing.done()
            assert not checking.done()
            end.heap.close()
            composing.result()
            checking.result()


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
        with pytest.raises((KeyboardInterrupt, jax.errors.JaxRuntimeError)) as stopped:
            jax.block_until_ready(end.compose_anything())
            while True:
                time.sleep(0.01)
        print(f"interrupted by {type(stopped.value).__name__}, {time.monotonic() - start:.1f} s")
        assert time.monotonic() - start < timeout_s + SOON_S
        sync("heard", range(2))


# --- tests ---------------------------------------------------------------------------------------


def test_a_hundred_creations_hold_nothing() -> None:
    run_ranks_of(__file__, "check_nothing_accumulates", ranks=2)


def test_a_forked_child_neither_harms_a_heap_nor_hides_a_death() -> None:
    run_ranks_of(__file__, "check_forks", ranks=3, expect={1: -9})


def test_a_rank_that_ends_with_its_heap_open_is_missed_at_once() -> None:
    run_ranks_of(__file__, "check_exits", ranks=4, expect={2: 1, 3: 3})


def test_a_program_in_flight_at_exit_ends_its_exchanges() -> None:
    result = run_ranks_of(__file__, "check_exit_in_flight", ranks=2)
    assert "in flight: True" in result.ranks[0].output


def test_close_check_and_an_interrupt_wait_for_the_call_in_progress() -> None:
    run_ranks_of(__file__, "check_waits", ranks=2)

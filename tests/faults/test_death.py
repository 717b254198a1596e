"""A rank is killed: the others learn of it at once, whatever both were at, and go on with a new heap."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import jax_symmkv as symmkv
from tests.rank_end import RankEnd, die, share
from tests.registry import register_ci
from tests.run_rank import run_ranks_of
from tests.tokens import misreads

pytestmark = register_ci(suite="faults", ranks=4, est_s=18)

KILLED = -9


# --- what ranks execute --------------------------------------------------------------------------


def check_deaths(phases: list[str]) -> None:
    """In each phase the last of the ranks dies; the others meet again on a heap of their own."""
    ranks = list(range(jax.process_count()))
    for phase in phases:
        with RankEnd(ranks) as end:
            for exchange in (1, 2):
                end.compose_tokens(exchange)
            cause = DEATHS[phase](end, end.rank == end.cp_size - 1)
            ranks.pop()
            assert len(set(share(phase, cause, ranks))) == 1


def before_publish(end: RankEnd, dies: bool) -> str:
    if dies:
        die()
    return assert_lost(end, end.compose_anything, "exchange", 3)


def before_barrier(end: RankEnd, dies: bool) -> str:
    ticket = end.publish(*end.batch(3), end.new_ticket()).block_until_ready()
    if dies:
        die()
    return assert_lost(end, lambda: end.barrier(ticket), "barrier", 3)


def before_gather(end: RankEnd, dies: bool) -> str:
    """What the dead rank has published is there to the last page."""
    dense, plan = end.batch(3)
    ticket = end.publish(dense, plan, end.new_ticket())
    ticket = end.barrier(ticket).block_until_ready()
    if dies:
        die()
    dense, ticket = end.gather(dense, plan, ticket)
    assert not misreads(np.asarray(dense), plan, 3)
    return assert_lost(end, lambda: end.barrier(ticket), "barrier", 4)


def in_a_loop(end: RankEnd, dies: bool) -> str:
    """At a random point of a program that never ends by itself."""

    def loop(dense: jax.Array, plan: symmkv.ComposePlan, ticket: jax.Array) -> Any:
        def exchange(_: jax.Array, carry: Any) -> Any:
            return symmkv.compose(carry[0], plan, carry[1], heap=end.heap)

        return jax.lax.fori_loop(0, 2**30, exchange, (dense, ticket))

    def die_in_it() -> None:
        while end.context.epoch < 100:
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.2))
        die()

    if dies:
        threading.Thread(target=die_in_it).start()
    return assert_lost(end, lambda: jax.jit(loop)(*end.batch(3), end.new_ticket()), "exchange", 100)


def after_the_last_exchange(end: RankEnd, dies: bool) -> str:
    """Nobody needs it any more, so nothing has gone wrong."""
    if dies:
        die()
    end.heap.check()
    end.heap.close()
    return ""


def after_close(end: RankEnd, dies: bool) -> str:
    if dies:
        end.heap.close()
        die()
    return assert_lost(end, end.compose_anything, "exchange", 3, "has closed its heap")


DEATHS: dict[str, Callable[[RankEnd, bool], str]] = {
    death.__name__: death
    for death in (
        before_publish,
        before_barrier,
        before_gather,
        in_a_loop,
        after_the_last_exchange,
        after_close,
    )
}


def assert_lost(
    end: RankEnd, call: Callable[[], Any], phase: str, epoch: int, how: str = "has died"
) -> str:
    lost = end.cp_size - 1
    error = end.assert_poisoned(call, f"rank {lost} {how}")
    assert (error.rank, error.phase) == (lost, phase)
    assert lost in error.missing
    assert error.epoch == epoch if epoch < 100 else error.epoch > epoch
    return str(error)


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(["before_publish", "before_barrier", "before_gather"], id="between calls"),
        pytest.param(["in_a_loop", "after_the_last_exchange", "after_close"], id="around them"),
    ],
)
def test_a_killed_rank_is_named_at_once_and_the_others_go_on(phases: Sequence[str]) -> None:
    run_ranks_of(
        __file__, "check_deaths", ranks=4, expect=dict.fromkeys((1, 2, 3), KILLED), phases=phases
    )

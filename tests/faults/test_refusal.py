"""Calls that can't be right: every rank learns at once which rank made one, and what to do instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jax_symmkv as symmkv
from jax_symmkv import ComposePlan
from tests.rank_end import NO_TICKET, RankEnd, share, sync
from tests.registry import register_ci
from tests.run_rank import run_ranks_of
from tests.tokens import NUM_DENSE_PAGES, NUM_SLOTS, token_plan

pytestmark = register_ci(suite="faults", ranks=3, est_s=14)


# --- what ranks execute --------------------------------------------------------------------------


def check_calls() -> None:
    check_order()
    check_closed()


def check_order() -> None:
    """Rank 1 calls in a wrong order; rank 0 waits for it in the barrier of the next exchange."""
    for name, (misuse, phase, says) in MISUSES.items():
        with RankEnd() as end:
            dense, plan = end.batch(1)

            def waiting(end: RankEnd = end, plan: ComposePlan = plan, dense: Any = dense) -> Any:
                ticket = end.publish(dense, plan, NO_TICKET)
                for _ in range(3):
                    ticket = end.barrier(ticket).block_until_ready()

            call = (lambda end=end, misuse=misuse: misuse(end)) if end.rank == 1 else waiting
            error = end.assert_poisoned(call, says)
            assert (error.rank, error.missing, error.phase) == (1, (), phase), name
            assert len(set(share(name, str(error), (0, 1)))) == 1


def gather_first(end: RankEnd) -> Any:
    return end.gather(*end.batch(1), NO_TICKET)


def gather_without_barrier(end: RankEnd) -> Any:
    dense, plan = end.batch(1)
    return end.gather(dense, plan, end.publish(dense, plan, NO_TICKET))


def gather_without_publish(end: RankEnd) -> Any:
    dense, plan = end.batch(1)
    ticket = end.barrier(end.publish(dense, plan, NO_TICKET))
    return end.gather(dense, plan, end.barrier(ticket))


def gather_of_another_plan(end: RankEnd) -> Any:
    ticket = end.barrier(end.publish(*end.batch(1), NO_TICKET))
    return end.gather(*end.batch(2), ticket)


def publish_twice(end: RankEnd) -> Any:
    dense, plan = end.batch(1)
    return end.publish(dense, plan, end.publish(dense, plan, NO_TICKET))


def compose_after_publish(end: RankEnd) -> Any:
    dense, plan = end.batch(1)
    return end.compose(dense, plan, end.publish(dense, plan, NO_TICKET))


MISUSES: dict[str, tuple[Callable[[RankEnd], Any], str, str]] = {
    "gather first": (gather_first, "gather", "rank 1: no publish in this exchange; call publish,"),
    "no barrier": (gather_without_barrier, "gather", "rank 1: no barrier since publish; call"),
    "no publish": (gather_without_publish, "gather", "rank 1: no publish in this exchange; call"),
    "other plan": (gather_of_another_plan, "gather", "rank 1: another plan than publish's; pass"),
    "twice": (publish_twice, "publish", "rank 1: published already in this exchange; call barrier"),
    "compose": (compose_after_publish, "exchange", "rank 1: published already in this exchange;"),
}


def check_batches() -> None:
    check_bad_plans()
    check_disagreement()


def check_bad_plans() -> None:
    """Rank 1 passes a plan that build_plan would not make; it neither crashes nor hangs the others."""
    good = token_plan(1, jax.process_count())
    for name, (field, index, value, says) in BAD_PLANS.items():
        with RankEnd() as end:
            array = np.array(getattr(good, field))
            array[index] = value
            bad = dataclasses.replace(good, **{field: array})
            dense, _ = end.batch(1)
            plan = bad if end.rank == 1 else good
            error = end.assert_poisoned(lambda: end.compose(dense, plan, NO_TICKET), says)  # noqa: B023
            assert (error.rank, error.epoch, error.phase) == (1, 1, "exchange"), name
            assert len(set(share(name, str(error), range(end.cp_size)))) == 1


_PAGE = f"rank 1: slot 0 has dense page {{}}, must be below {NUM_DENSE_PAGES}"
_WRITER = "rank 1: slot 0 has writer {}, must be below 3"
_COUNT = f"rank 1: the plan has {{}} current pages, its arrays and the heap hold {NUM_SLOTS}"
BAD_PLANS = {
    "page -1": ("current_page", 0, -1, _PAGE.format(-1)),
    "page beyond the buffer": ("current_page", 0, NUM_DENSE_PAGES, _PAGE.format(NUM_DENSE_PAGES)),
    "page far away": ("current_page", 0, 2**31 - 1, _PAGE.format(2**31 - 1)),
    "writer -1": ("current_writer", 0, -1, _WRITER.format(-1)),
    "writer beyond the group": ("current_writer", 0, 3, _WRITER.format(3)),
    "count beyond the arrays": ("num_current", 0, NUM_SLOTS + 1, _COUNT.format(NUM_SLOTS + 1)),
    "count below 0": ("num_current", 0, -1, _COUNT.format(-1)),
}


def check_disagreement() -> None:
    """Rank 2 has another batch, then none: nobody gets a byte of the wrong one."""
    for name, odd_one in {
        "other batch": lambda end: end.compose(*end.batch(2), end.new_ticket()),
        "no batch": lambda end: end.barrier(end.new_ticket()),
    }.items():
        with RankEnd() as end:
            sync(name, range(end.cp_size))

            def even_one(end: RankEnd = end) -> Any:
                return end.compose(*end.batch(1), end.new_ticket())

            call = (lambda end=end, odd=odd_one: odd(end)) if end.rank == 2 else even_one
            error = end.assert_poisoned(call, "its batch differs from another rank")
            assert "make the same calls with the same plan on every rank" in str(error)
            assert error.epoch == 1
            assert len(set(share(name, str(error), range(end.cp_size)))) == 1


def check_closed() -> None:
    """Rank 1 closes its heap: its own calls say so, and rank 0, which waits, learns of it at once."""
    with RankEnd() as end:
        end.compose_tokens(1)
        if end.rank == 1:
            end.heap.close()
            for call in (end.compose_anything, end.new_ticket):
                with pytest.raises(jax.errors.JaxRuntimeError, match=r"heap \d+ is closed"):
                    jax.block_until_ready(call())
            with pytest.raises(symmkv.HeapError, match="the heap is closed"):
                end.heap.check()
        else:
            error = end.assert_poisoned(end.compose_anything, "rank 1 has closed its heap")
            assert (error.rank, error.missing, error.epoch) == (1, (1,), 2)


# --- tests ---------------------------------------------------------------------------------------


def test_wrong_calls_say_what_to_do_on_every_rank() -> None:
    run_ranks_of(__file__, "check_calls", ranks=2)


def test_wrong_batches_are_refused_and_wake_the_others() -> None:
    run_ranks_of(__file__, "check_batches", ranks=3)

"""The protocol under adversarial timing: no rank ever sees a page of an older or a newer exchange.

Ranks are delayed one at a time, in every gap of an exchange, and every page says who wrote it and when.
A heap with one half, which is wrong, must be found out by the same exchanges.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jax_symmkv as symmkv
from jax_symmkv import ComposePlan, heap
from tests.group import cpu_mesh, put, sharded
from tests.rank_end import RankEnd, sync, use_core
from tests.registry import register_ci
from tests.run_rank import run_ranks_of
from tests.tokens import (
    LARGE_PAGE,
    NUM_SLOTS,
    SMALL_PAGE,
    Misread,
    misreads,
    token_plan,
    tokens,
)

pytestmark = register_ci(suite="distributed", ranks=4, est_s=40)

NUM_EXCHANGES = 200
DELAY_S = 0.01
PAGES = {"small": SMALL_PAGE, "large": LARGE_PAGE}
# The gaps of an exchange of three calls in which a rank may fall behind.
BEFORE_PUBLISH, BEFORE_BARRIER, BEFORE_GATHER = range(3)


# --- what ranks execute --------------------------------------------------------------------------


def check_tokens(first_epoch: int, page: str) -> None:
    heap._FIRST_EPOCH = first_epoch
    with RankEnd(page=PAGES[page]) as end:
        wrong = three_calls(end) + fused(end)
        assert not wrong, f"{len(wrong)} pages of other exchanges; the first ones: {wrong[:3]}"
        newest, oldest = in_one_program(end, 500)()
        assert newest == oldest == 0, f"pages up to {newest} newer and {-oldest} older"
        sync("done", range(end.cp_size))
        end.heap.check()
        assert end.context.epoch == first_epoch + 2 * NUM_EXCHANGES + 500


def check_one_half_is_found_out() -> None:
    use_core("_core_one_half")
    with RankEnd() as end:
        late = [delay_of(e, end.cp_size) for e in range(NUM_EXCHANGES)]
        wrong = three_calls(end)
        # A delay before gather is time for a peer to publish into the half that is still to be read.
        assert any(late[w.exchange] == (end.rank, BEFORE_GATHER) for w in wrong)
        assert {w.newer_by for w in wrong} == {1}


def check_sleep(num_exchanges: int) -> None:
    mesh = cpu_mesh()
    cp_size = mesh.size
    with symmkv.SymmetricHeap(mesh, "cp", page=SMALL_PAGE, max_current_pages=NUM_SLOTS) as heap:

        def body(dense: jax.Array, plan: ComposePlan) -> jax.Array:
            def exchange(carry: Any, _: None) -> Any:
                dense, ticket = carry
                return symmkv.compose(dense, plan, ticket, heap=heap), None

            carry = (dense, symmkv.new_ticket(heap))
            return jax.lax.scan(exchange, carry, length=num_exchanges)[0][0]

        run = sharded(body, heap)
        plan = token_plan(0, cp_size)
        dense = np.concatenate([tokens(SMALL_PAGE, plan, rank, 0) for rank in range(cp_size)])
        dense = put(dense, mesh, PartitionSpec("cp"))
        jax.block_until_ready(run(dense, plan))
        sync("warm", range(jax.process_count()))
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        composed = jax.block_until_ready(run(dense, plan))
        wall_ms = (time.monotonic() - start_s) * 1e3 / num_exchanges
        cpu_ms = (time.process_time() - start_cpu_s) * 1e3 / num_exchanges / 4
        assert not any(misreads(np.asarray(s.data), plan, 0) for s in composed.addressable_shards)
        # Ranks that polled would need a time slice of the scheduler, milliseconds, to let others come.
        assert cpu_ms < 0.5, f"{cpu_ms:.3f} ms of CPU time a rank and exchange"
        # A lost wake-up costs a slice of the sleep, 50 ms.
        assert wall_ms < 20, f"{wall_ms:.3f} ms an exchange"


def delay_of(exchange: int, cp_size: int) -> tuple[int, int]:
    """The rank that is late in the exchange, and in which gap: every pair in turn."""
    return exchange % cp_size, exchange // cp_size % 3


def three_calls(end: RankEnd) -> list[Misread]:
    """Exchanges of three programs, with sleeps of the host between them."""
    wrong = []
    ticket = end.new_ticket()
    for exchange in range(NUM_EXCHANGES):
        late = delay_of(exchange, end.cp_size)
        dense, plan = end.batch(exchange)

        def delay(gap: int, late: tuple[int, int] = late) -> None:
            if late == (end.rank, gap):
                time.sleep(DELAY_S)

        delay(BEFORE_PUBLISH)
        ticket = end.publish(dense, plan, ticket).block_until_ready()
        delay(BEFORE_BARRIER)
        ticket = end.barrier(ticket).block_until_ready()
        delay(BEFORE_GATHER)
        dense, ticket = end.gather(dense, plan, ticket)
        wrong += misreads(np.asarray(dense), plan, exchange)
    return wrong


def fused(end: RankEnd) -> list[Misread]:
    """Exchanges of one call, a program each, with sleeps of the host between them."""
    wrong = []
    ticket = end.new_ticket()
    for exchange in range(NUM_EXCHANGES):
        if exchange % end.cp_size == end.rank:
            time.sleep(DELAY_S)
        dense, plan = end.batch(exchange)
        dense, ticket = end.compose(dense, plan, ticket)
        wrong += misreads(np.asarray(dense), plan, exchange)
    return wrong


def in_one_program(end: RankEnd, num_exchanges: int) -> Callable[[], tuple[int, int]]:
    """A loop of exchanges of one batch: how much newer and older than its exchange a page was, at most."""
    plan = token_plan(0, end.cp_size)
    current = np.asarray(plan.current_page)[: int(plan.num_current[0])]
    own = end.batch(0)[0] >= 0

    @jax.jit
    def loop(plan: ComposePlan) -> tuple[jax.Array, jax.Array]:
        def body(ticket: jax.Array, exchange: jax.Array) -> tuple[jax.Array, jax.Array]:
            dense = jnp.where(own, exchange, -1_000_000)
            dense, ticket = symmkv.compose(dense, plan, ticket, heap=end.heap)
            return ticket, dense[current] - exchange

        ticket = symmkv.new_ticket(end.heap)
        _, newer_by = jax.lax.scan(body, ticket, jnp.arange(num_exchanges, dtype=jnp.int32))
        return newer_by.max(), newer_by.min()

    return lambda: tuple(int(extreme) for extreme in loop(plan))


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "first_epoch", "page"),
    [
        pytest.param(2, 0, "large", id="2 ranks"),
        pytest.param(3, 2**32 - NUM_EXCHANGES // 2, "small", id="3 ranks, epoch crosses 2^32"),
        pytest.param(4, 2**47 - NUM_EXCHANGES // 2, "large", id="4 ranks, epoch crosses 2^47"),
    ],
)
def test_exchanges_with_a_rotating_delay_see_their_own_pages(
    ranks: int, first_epoch: int, page: str
) -> None:
    run_ranks_of(__file__, "check_tokens", ranks=ranks, first_epoch=first_epoch, page=page)


def test_one_half_sees_pages_of_the_next_exchange() -> None:
    run_ranks_of(__file__, "check_one_half_is_found_out", ranks=3)


def test_more_ranks_than_cores_wait_asleep() -> None:
    run_ranks_of(__file__, "check_sleep", ranks=2, devices_per_rank=4, num_exchanges=200)

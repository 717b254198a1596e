"""The kernels, byte for byte: ranks are streams of one process, on one GPU."""

from __future__ import annotations

import importlib
import time

import numpy as np
import pytest

from jax_symmkv import ComposePlan, build_plan
from tests.kernels.streams import CALLS, Group, require_gpu
from tests.registry import register_ci

pytestmark = register_ci(suite="kernels-1-gpu", est_s=90)

LOST = 0xFF


@pytest.fixture(autouse=True)
def gpu() -> None:
    require_gpu()


def a_plan(
    group: Group, num_pages: int, rng: np.random.Generator, *, requests: int = 1
) -> ComposePlan:
    """`num_pages` current pages, scattered over the dense buffer; page_size 1, so a token is a page."""
    lens = [num_pages // requests + (i < num_pages % requests) for i in range(requests)]
    return build_plan(
        [0] * requests,
        lens,
        page_size=1,
        cp_size=group.cp_size,
        max_current_pages=group.num_slots,
        num_dense_pages=group.num_dense_pages,
        dense_page=rng.permutation(group.num_dense_pages)[:num_pages],
    )


def check_call(group: Group, plan: ComposePlan, call: str, rng: np.random.Generator) -> None:
    """One exchange of fresh random bytes; every byte of every rank's buffers and guards."""
    _, after = fill(group, plan, rng)
    CALLS[call](group)
    group.synchronize()
    assert_composed(group, after, call)


def fill(group, plan, rng):
    group.write_plan(plan)
    before = [
        [rng.integers(0, 256, (group.num_dense_pages, n), np.uint8) for n in group.page_nbytes]
        for _ in range(group.cp_size)
    ]
    after = [[b.copy() for b in buffers] for buffers in before]
    for slot in range(int(plan.num_current[0])):
        page, writer = int(plan.current_page[slot]), int(plan.current_writer[slot])
        for rank in range(group.cp_size):
            for b in range(len(group.page_nbytes)):
                after[rank][b][page] = before[writer][b][page]
    for rank in range(group.cp_size):
        group.write(rank, before[rank])
    return before, after


def assert_composed(group, after, what):
    poisoned = [cause for context in group.contexts if (cause := context.poisoned())]
    assert not poisoned, f"{what}: {poisoned}"
    for rank in range(group.cp_size):
        for b, (got, want) in enumerate(zip(group.read(rank), after[rank], strict=True)):
            wrong = np.flatnonzero((got != want).any(axis=1))
            assert not wrong.size, f"{what}: rank {rank}, buffer {b}: pages {wrong.tolist()} differ"


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "page_nbytes, num_slots",
    [
        ([16], 9),
        ([16], 3000),  # several windows of the plan
        ([528], 1500),
        ([73728], 40),
        ([73728, 8448], 24),
        ([16, 1024], 70),
        ([1 << 20], 9),
    ],
)
def test_bytes(cp_size: int, page_nbytes: list[int], num_slots: int) -> None:
    rng = np.random.default_rng(1)
    with Group(cp_size, num_slots, page_nbytes, num_slots + 3) as group:
        counts = (0, 1, num_slots // 2 | 1, num_slots, 2, num_slots)
        for call in ("exchange", "three calls", "exchange"):
            for count in counts:
                for requests in (1, max(1, count // 2)):
                    plan = a_plan(group, count, rng, requests=requests)
                    check_call(group, plan, call, rng)
        group.assert_sound()


@pytest.mark.parametrize("call", CALLS)
def test_staging_is_written_only_where_pages_go(call: str) -> None:
    """Random bytes avoid one value; the slots that hold another one were written, and must be a page's."""
    rng = np.random.default_rng(12)
    untouched = 0x5A
    with Group(3, 24, [73728, 528], 40) as group:
        for num_pages in (17, 20):  # above the packets' limit
            group.fill_halves(untouched)
            group.write_plan(plan := a_plan(group, num_pages, rng))
            for rank in range(3):
                random = (rng.integers(0, 255, (40, n), np.uint8) for n in group.page_nbytes)
                group.write(rank, [values + (values >= untouched) for values in random])
            CALLS[call](group)
            group.synchronize()
            writer = np.asarray(plan.current_writer)[:num_pages]
            for rank in range(3):
                pulled = writer == rank if call == "three calls" else writer != rank
                slots = set(np.flatnonzero(pulled).tolist())
                assert group.written(rank, untouched) == [slots, slots]
        group.assert_sound()


@pytest.mark.parametrize("first_epoch", [2**16 - 3, 2**32 - 3, 2**33 - 2])
def test_epoch_wraps(first_epoch: int) -> None:
    rng = np.random.default_rng(2)
    with Group(2, 16, [73728], 20, first_epoch=first_epoch) as group:
        for count in (3, 16, 4, 16, 2, 1, 16, 5):  # packets and pieces
            check_call(group, a_plan(group, count, rng), "exchange", rng)
        assert group.contexts[0].epoch == first_epoch + 8
        group.assert_sound()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("num_pages", [4, 32])
def test_adversarial_delays(call: str, num_pages: int) -> None:
    """200 exchanges without a wait in between: each layer a buffer of its own, a rank delayed."""
    rng = np.random.default_rng(3)
    with Group(3, 32, [73728], 32) as group:
        plan = a_plan(group, num_pages, rng)
        _, after = fill(group, plan, rng)
        for i in range(200):
            group.streams[i % 3].delay(10_000 if i % 10 == 0 else 30)
            CALLS[call](group)
        group.synchronize()
        assert_composed(group, after, call)
        group.assert_sound()


@pytest.mark.parametrize("call", CALLS)
def test_late_hosts(call: str) -> None:
    """A rank's host is 10 ms late, in turn; the others' kernels wait on the GPU."""
    rng = np.random.default_rng(13)
    with Group(3, 32, [73728], 32) as group:
        for i in range(60):
            _, after = fill(group, a_plan(group, (32, 5, 0, 31)[i % 4], rng), rng)
            late = i % 3
            CALLS[call](group, {0, 1, 2} - {late})
            time.sleep(0.01)
            CALLS[call](group, [late])
            group.synchronize()
            assert_composed(group, after, f"{call} {i}, rank {late} late")
        group.assert_sound()


@pytest.mark.parametrize("call", CALLS)
def test_every_exchange_brings_new_bytes(call: str) -> None:
    """Old bytes of two exchanges ago would show: the bytes change every time, and so does the size."""
    rng = np.random.default_rng(4)
    with Group(2, 24, [73728], 24) as group:
        for i in range(60):
            group.write_plan(plan := a_plan(group, int(rng.integers(0, 25)), rng))
            _, after = fill(group, plan, rng)
            group.streams[i % 2].delay(int(rng.integers(0, 500)))
            CALLS[call](group)
            group.synchronize()
            assert_composed(group, after, f"{call} {i}")
        group.assert_sound()


def test_graph_replays() -> None:
    rng = np.random.default_rng(5)
    with Group(2, 24, [73728], 24) as group:
        for rank, stream in enumerate(group.streams):
            stream.begin_capture()
            for call in CALLS.values():
                call(group, [rank])
            stream.end_capture()
        for count in (24, 3, 0, 17):
            _, after = fill(group, a_plan(group, count, rng), rng)
            group.streams[count % 2].delay(20_000)
            for stream in group.streams:
                stream.replay()
            group.synchronize()
            assert_composed(group, after, f"replay with {count} pages")
        group.assert_sound()
        before, _ = fill(group, a_plan(group, 24, rng), rng)
        group.close()
        for stream in group.streams:
            stream.replay()
        group.synchronize()
        assert_composed(group, before, "a replay after close touches nothing")


def lost_pages(group: Group, rank: int, plan: ComposePlan) -> np.ndarray:
    of_peers = np.asarray(plan.current_writer)[: int(plan.num_current[0])] != rank
    pages = np.asarray(plan.current_page)[: int(plan.num_current[0])][of_peers]
    return group.read(rank)[0][pages]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("num_pages", [4, 24])
def test_a_rank_that_never_comes(call: str, num_pages: int) -> None:
    rng = np.random.default_rng(6)
    with Group(2, 24, [73728], 24, timeout_s=0.3) as group:
        plan = a_plan(group, num_pages, rng)
        fill(group, plan, rng)
        CALLS[call](group, [0])
        group.streams[0].synchronize()
        message, rank, missing, epoch, _ = group.await_poison(0)
        assert "rank 1 did not arrive within 0.3 s" in message
        assert (rank, missing, epoch) == (1, (1,), 1)
        assert (lost_pages(group, 0, plan) == LOST).all()
        # The late rank hears of it, and gets no page either, nor does a later call.
        group.await_poison(1)
        for _ in range(3):
            CALLS[call](group)
        group.synchronize()
        assert (lost_pages(group, 1, plan) == LOST).all()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "change, message",
    [
        ({"page": (3, 24)}, "slot 3 has dense page 24, must be below 24"),
        ({"page": (3, -1)}, "slot 3 has dense page -1, must be below 24"),
        ({"page": (3, -(2**31))}, "slot 3 has dense page -2147483648"),
        ({"writer": (5, 2)}, "slot 5 has writer 2, must be below 2"),
        ({"writer": (5, -7)}, "slot 5 has writer -7, must be below 2"),
        ({"num_current": 25}, "25 current pages"),
        ({"num_current": -1}, "-1 current pages"),
        ({"num_current": 2**31 - 1}, "2147483647 current pages"),
    ],
)
@pytest.mark.parametrize("num_pages", [6, 24])
def test_plans_out_of_bounds(call: str, change: dict, message: str, num_pages: int) -> None:
    rng = np.random.default_rng(7)
    with Group(2, 24, [73728], 24, timeout_s=2) as group:
        plan = a_plan(group, num_pages, rng)
        fill(group, plan, rng)
        page = np.asarray(plan.current_page).copy()
        writer = np.asarray(plan.current_writer).copy()
        if "page" in change:
            page[change["page"][0]] = change["page"][1]
        if "writer" in change:
            writer[change["writer"][0]] = change["writer"][1]
        count = change.get("num_current", num_pages)
        for rank in range(2):
            group.write_plan_arrays(rank, page, writer, count, int(plan.fingerprint[0]))
        CALLS[call](group)
        group.synchronize()
        for rank in range(2):
            assert message in group.await_poison(rank)[0]
            group.read(rank)  # the guards


def test_disagreement() -> None:
    rng = np.random.default_rng(8)
    for call in CALLS:
        with Group(2, 24, [73728], 24, timeout_s=5) as group:
            group.write_plan(a_plan(group, 24, rng), [0])
            group.write_plan(a_plan(group, 23, rng), [1])
            CALLS[call](group)
            group.synchronize()
            for rank in range(2):
                assert "batch differs" in group.await_poison(rank)[0]


def test_different_calls_disagree() -> None:
    rng = np.random.default_rng(9)
    with Group(2, 24, [73728], 24, timeout_s=5) as group:
        fill(group, a_plan(group, 24, rng), rng)
        group.exchange([0])
        group.three_calls([1])
        group.synchronize()
        for rank in range(2):
            assert "batch differs" in group.await_poison(rank)[0]


def test_misuse() -> None:
    rng = np.random.default_rng(10)
    for calls, message in (
        (("publish", "publish"), "published already in this exchange"),
        (("gather",), "no publish in this exchange"),
        (("publish", "gather"), "no barrier since publish"),
    ):
        with Group(2, 24, [73728], 24) as group:
            fill(group, a_plan(group, 24, rng), rng)
            for call in calls:
                getattr(group.streams[0], call)(group.contexts[0], group.operands[0])
            group.synchronize()
            assert message in group.await_poison(0)[0]


@pytest.mark.parametrize("name", ["_cuda", "_cuda_one_half"])
def test_two_halves_are_needed(name: str) -> None:
    """A rank publishes its next pages while a slow peer still gathers; with one half the peer sees them."""
    module = importlib.import_module(f"jax_symmkv.{name}")
    rng = np.random.default_rng(11)
    with Group(2, 8, [73728], 8, module=module) as group:
        plan = a_plan(group, 8, rng)
        _, after = fill(group, plan, rng)
        calls = list(zip(group.streams, group.contexts, group.operands, strict=True))
        for stream, context, operands in calls:
            stream.publish(context, operands)
            stream.barrier(context)
        (fast, fast_context, fast_operands), (slow, slow_context, slow_operands) = calls
        slow.delay(200_000)
        slow.gather(slow_context, slow_operands)
        fast.synchronize()
        group.write(0, [rng.integers(0, 256, (8, 73728), np.uint8)])
        fast.publish(fast_context, fast_operands)
        group.synchronize()
        is_right = bool((group.read(1)[0] == after[1][0]).all())
        assert is_right == (name == "_cuda")

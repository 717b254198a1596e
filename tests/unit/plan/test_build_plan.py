"""build_plan against plain loops; what every plan must hold; the plan as a pytree.

Guards against the silent bugs of a plan: a page with two writers or none, ranks that disagree, and
two batches with one fingerprint.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_symmkv.plan import ComposePlan, build_plan, interleaved
from tests.registry import register_ci
from tests.unit.plan.reference import (
    Batch,
    batches,
    block_sizes,
    examples,
    padded,
    page_writers,
    remapped_batches,
)

pytestmark = register_ci(suite="unit", est_s=6)

ARRAYS = (
    "current_page",
    "current_writer",
    "prefix_page",
    "prefix_owner",
    "prefix_pool_page",
    "num_current",
    "num_prefix",
)

# Two requests with prefixes on two ranks: logical pages 0, 1 | 2, 3, 4 and 5 | 6.
ARGUMENTS: dict[str, Any] = {
    "prefix_lens": [8, 4],
    "extend_lens": [9, 4],
    "page_size": 4,
    "cp_size": 2,
    "max_current_pages": 6,
    "max_prefix_pages": 4,
    "num_dense_pages": 9,
    "dense_page": [8, 7, 6, 5, 4, 3, 2],
    "prefix_owner": [0, 1, 1],
    "prefix_pool_page": [5, 0, 9],
}


def fingerprint(plan: ComposePlan) -> int:
    return int(plan.fingerprint[0])


def plan_of(batch: Batch, **arguments: Any) -> ComposePlan:
    """With room for any batch of the strategies, unless told."""
    room = {"max_current_pages": 300, "num_dense_pages": 400}
    return build_plan(*batch.lens, **batch.sizes, **(room | arguments))


# --- the arrays ----------------------------------------------------------------------------------


def test_build_plan_worked_example() -> None:
    plan = build_plan(**ARGUMENTS)
    # Request 0: blocks of 1, 1, 1, 0 pages for ranks 0, 1, 1, 0. Request 1, rotated: rank 1.
    assert plan.current_page.tolist() == [6, 5, 4, 2, -1, -1]
    assert plan.current_writer.tolist() == [0, 1, 1, 1, -1, -1]
    assert plan.prefix_page.tolist() == [8, 7, 3, -1]
    assert plan.prefix_owner.tolist() == [0, 1, 1, -1]
    assert plan.prefix_pool_page.tolist() == [5, 0, 9, -1]
    assert (plan.num_current.tolist(), plan.num_prefix.tolist()) == ([4], [3])
    assert (plan.page_size, plan.cp_size, plan.num_dense_pages) == (4, 2, 9)


@examples
@given(remapped_batches(), st.integers(0, 3), st.data())
def test_build_plan_any_batch_equals_reference(
    case: tuple[Batch, int, list[int] | None], spare: int, data: st.DataObject
) -> None:
    batch, num_dense_pages, dense_page = case
    current, prefix = batch.lay_out()
    to_dense = dense_page or list(range(num_dense_pages))
    n = len(prefix)
    owner = data.draw(st.lists(st.integers(0, batch.cp_size - 1), min_size=n, max_size=n))
    pool_page = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
    c, p = len(current) + spare or 1, n + spare
    plan = build_plan(
        *batch.lens,
        **batch.sizes,
        max_current_pages=c,
        max_prefix_pages=p,
        num_dense_pages=num_dense_pages,
        dense_page=dense_page,
        prefix_owner=owner,
        prefix_pool_page=pool_page,
    )
    expected = {
        "current_page": padded([to_dense[page.logical] for page in current], c),
        "current_writer": padded([page.writer for page in current], c),
        "prefix_page": padded([to_dense[page] for page in prefix], p),
        "prefix_owner": padded(owner, p),
        "prefix_pool_page": padded(pool_page, p),
        "num_current": [len(current)],
        "num_prefix": [n],
    }
    assert {name: getattr(plan, name).tolist() for name in ARRAYS} == expected
    assert {getattr(plan, name).dtype for name in ARRAYS} == {np.dtype(np.int32)}
    assert (plan.fingerprint.dtype, plan.fingerprint.shape) == (np.uint32, (1,))
    statics = (plan.page_size, plan.cp_size, plan.num_dense_pages)
    assert statics == (batch.page_size, batch.cp_size, num_dense_pages)


@examples
@given(remapped_batches())
def test_build_plan_no_page_has_two_writers(case: tuple[Batch, int, list[int] | None]) -> None:
    batch, num_dense_pages, dense_page = case
    plan = plan_of(batch, num_dense_pages=num_dense_pages, dense_page=dense_page)
    n = int(plan.num_current[0])
    pages, writers = plan.current_page[:n], plan.current_writer[:n]
    assert len(set(pages.tolist())) == n
    assert np.all((pages >= 0) & (pages < num_dense_pages))
    assert np.all((writers >= 0) & (writers < batch.cp_size))
    assert np.all(plan.current_page[n:] == -1) and np.all(plan.current_writer[n:] == -1)


def test_build_plan_takes_no_rank_and_repeats_itself() -> None:
    assert "rank" not in inspect.signature(build_plan).parameters
    first, second = build_plan(**ARGUMENTS), build_plan(**ARGUMENTS)
    for name in (*ARRAYS, "fingerprint"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@examples
@given(batches())
def test_build_plan_without_room_for_prefixes_only_shifts(batch: Batch) -> None:
    plan = plan_of(batch)
    current, _ = batch.lay_out()
    assert plan.current_page[: len(current)].tolist() == [page.logical for page in current]
    assert plan.num_prefix.tolist() == [0]
    for name in ("prefix_page", "prefix_owner", "prefix_pool_page"):
        assert getattr(plan, name).shape == (0,)


@pytest.mark.parametrize("lens", [[], [0, 0]], ids=["no requests", "empty requests"])
def test_build_plan_empty_batch_is_all_padding(lens: list[int]) -> None:
    plan = build_plan(
        lens,
        lens,
        page_size=4,
        cp_size=2,
        max_current_pages=3,
        max_prefix_pages=2,
        num_dense_pages=1,
    )
    assert plan.current_page.tolist() == plan.current_writer.tolist() == [-1] * 3
    assert plan.prefix_page.tolist() == plan.prefix_owner.tolist() == [-1] * 2
    assert (plan.num_current.tolist(), plan.num_prefix.tolist()) == ([0], [0])


def test_build_plan_full_to_the_last_page_fits() -> None:
    exact = ARGUMENTS | {"max_current_pages": 4, "max_prefix_pages": 3, "num_dense_pages": 9}
    assert build_plan(**exact).current_page.tolist() == [6, 5, 4, 2]
    exact |= {"dense_page": None, "num_dense_pages": 7}
    assert build_plan(**exact).current_page.tolist() == [2, 3, 4, 6]


def test_build_plan_accepts_numpy_and_jax_integers() -> None:
    plan = build_plan(**ARGUMENTS)
    as_numpy = {k: np.array(v, np.uint16) for k, v in ARGUMENTS.items()}
    as_jax = ARGUMENTS | {"extend_lens": jax.numpy.array(ARGUMENTS["extend_lens"])}
    assert fingerprint(build_plan(**as_numpy)) == fingerprint(plan)
    assert fingerprint(build_plan(**as_jax)) == fingerprint(plan)
    # Arithmetic in the caller's own dtype would wrap at 256.
    narrow = build_plan(
        np.array([0] * 3, np.uint8),
        np.array([200] * 3, np.uint8),
        page_size=1,
        cp_size=2,
        max_current_pages=600,
        num_dense_pages=600,
    )
    assert narrow.current_page.tolist() == list(range(600))


# --- the split -----------------------------------------------------------------------------------


@examples
@given(st.integers(1, 8), st.integers(0, 200), st.integers(0, 9))
def test_split_shares_of_a_request_differ_by_two_pages_at_most(
    cp_size: int, num_pages: int, request: int
) -> None:
    writers = _writers_of_last([0] * request + [num_pages], cp_size)
    shares = np.bincount(writers, minlength=cp_size)
    least = 2 * (num_pages // (2 * cp_size))
    assert least <= shares.min() and shares.max() <= least + 2
    # No rank has more than two stretches of pages, which are what it attends from.
    for rank in range(cp_size):
        mine = np.flatnonzero(writers == rank)
        assert np.sum(np.diff(mine) > 1) <= 1


@examples
@given(st.integers(1, 8), st.integers(1, 800), st.integers(0, 9))
def test_split_causal_work_is_balanced(cp_size: int, num_pages: int, request: int) -> None:
    """Page i attends to i + 1 pages. Rounding to pages costs a rank at most 2 pages' work.

    Contiguous equal parts would differ by (cp_size - 1) / cp_size**2 * num_pages**2.
    """
    writers = _writers_of_last([0] * request + [num_pages], cp_size)
    work = np.bincount(writers, weights=np.arange(num_pages) + 1, minlength=cp_size)
    assert work.max() - work.min() <= 2 * num_pages
    if num_pages % (2 * cp_size) == 0:
        assert work.max() == work.min()


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_split_short_requests_spread_over_the_ranks(cp_size: int) -> None:
    plan = plan_of(Batch([0] * cp_size, [1] * cp_size, 4, cp_size))
    assert plan.current_writer[:cp_size].tolist() == list(range(cp_size))


def test_reference_is_the_designs() -> None:
    """The oracle itself, by hand: 11 pages of request 1 on 2 ranks, blocks of 3, 3, 3, 2."""
    assert block_sizes(11, 2) == [3, 3, 3, 2]
    assert page_writers(1, 11, 2) == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]


def _writers_of_last(pages: list[int], cp_size: int) -> np.ndarray:
    plan = build_plan(
        [0] * len(pages),
        pages,
        page_size=1,
        cp_size=cp_size,
        max_current_pages=800,
        num_dense_pages=800,
    )
    return np.asarray(plan.current_writer)[: pages[-1]]


# --- the fingerprint -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"prefix_lens": [4, 8]},
        {"extend_lens": [4, 9]},
        {"page_size": 2, "extend_lens": [5, 2], "prefix_lens": [4, 2]},  # the same pages
        {"max_current_pages": 7},
        {"max_prefix_pages": 5},
        {"num_dense_pages": 10},
        {"dense_page": [8, 7, 6, 5, 4, 2, 3]},
        {"prefix_owner": [0, 1, 0]},
        {"prefix_pool_page": [5, 0, 8]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_fingerprint_changes_with(changed: dict[str, Any]) -> None:
    assert fingerprint(build_plan(**(ARGUMENTS | changed))) != fingerprint(build_plan(**ARGUMENTS))


def test_fingerprint_changes_with_cp_size_alone() -> None:
    one_page = {"page_size": 4, "max_current_pages": 2, "num_dense_pages": 2}
    plans = [build_plan([0], [4], cp_size=cp, **one_page) for cp in range(1, 9)]
    assert len({fingerprint(plan) for plan in plans}) == len(plans)


@examples
@given(batches(), batches())
def test_fingerprint_is_equal_exactly_where_plans_are(one: Batch, other: Batch) -> None:
    plans = [plan_of(one), plan_of(other)]
    contents = [
        [(plan.page_size, plan.cp_size), *(getattr(plan, name).tolist() for name in ARRAYS)]
        for plan in plans
    ]
    assert (contents[0] == contents[1]) == (fingerprint(plans[0]) == fingerprint(plans[1]))


# --- the pytree ----------------------------------------------------------------------------------


def test_plan_round_trips_through_tree_util() -> None:
    plan = build_plan(**ARGUMENTS)
    leaves, tree = jax.tree_util.tree_flatten(plan)
    assert len(leaves) == len(ARRAYS) + 1
    again = jax.tree_util.tree_unflatten(tree, leaves)
    assert isinstance(again, ComposePlan)
    for field in dataclasses.fields(ComposePlan):
        assert getattr(again, field.name) is getattr(plan, field.name)


def test_plan_of_another_batch_reuses_the_program() -> None:
    traces = 0

    @jax.jit
    def passed_on(plan: ComposePlan) -> ComposePlan:
        nonlocal traces
        traces += 1
        assert isinstance(plan.page_size, int)
        return plan

    for extend_lens in ([9, 4], [1, 4], [12, 0]):
        arguments = ARGUMENTS | {"extend_lens": extend_lens, "dense_page": None}
        plan = build_plan(**arguments)
        out = passed_on(plan)
        assert (out.page_size, out.cp_size, out.num_dense_pages) == (4, 2, 9)
        for name in (*ARRAYS, "fingerprint"):
            np.testing.assert_array_equal(getattr(out, name), getattr(plan, name))
            assert getattr(out, name).dtype == getattr(plan, name).dtype
    assert traces == 1
    passed_on(build_plan(**(ARGUMENTS | {"num_dense_pages": 10})))
    assert traces == 2


def test_plan_cannot_be_changed_under_its_fingerprint() -> None:
    plan = build_plan(**ARGUMENTS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.page_size = 8  # type: ignore[misc]
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, name)[0] = 1


def test_planning_touches_no_backend() -> None:
    """With a platform that doesn't exist, the first touch of a backend would raise."""
    program = (
        "from jax_symmkv.plan import build_plan\n"
        "build_plan([0], [9], page_size=4, cp_size=2, max_current_pages=3, num_dense_pages=3)\n"
        "import jax\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('untouched')\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "untouched\n"), ended.stderr


# --- interleaved ---------------------------------------------------------------------------------


def test_interleaved_deals_pages_in_turn() -> None:
    owner, pool_page = interleaved([0, 1, 2, 3, 7, 4], 3)
    assert (owner.tolist(), pool_page.tolist()) == ([0, 1, 2, 0, 1, 1], [0, 0, 0, 1, 2, 1])
    assert (owner.dtype, pool_page.dtype) == (np.int32, np.int32)
    assert [x.shape for x in interleaved([], 3)] == [(0,), (0,)]

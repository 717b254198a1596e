"""local_tokens and dense_positions against plain loops, and against the plan they must agree with.

A token that two ranks compute, or that lies in a page which another rank publishes, is a silent
bug.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_symmkv.errors import PlanError
from jax_symmkv.plan import build_plan, dense_positions, local_tokens
from tests.registry import register_ci
from tests.unit.plan.reference import Batch, batches, examples, padded, remapped_batches

pytestmark = register_ci(suite="unit", est_s=3)


def of_ranks(batch: Batch, pad_to: int | None = None) -> list[np.ndarray]:
    return [
        local_tokens(*batch.lens, **batch.sizes, rank=rank, pad_to=pad_to)
        for rank in range(batch.cp_size)
    ]


def test_local_tokens_worked_example() -> None:
    # 10 tokens in pages 0-3 | 4-7 | 8-9 for ranks 0, 1, 1; then 2 tokens in a page of rank 1.
    lens: dict[str, Any] = {
        "prefix_lens": [4, 0],
        "extend_lens": [10, 2],
        "page_size": 4,
        "cp_size": 2,
    }
    assert local_tokens(**lens, rank=0).tolist() == [0, 1, 2, 3]
    assert local_tokens(**lens, rank=1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert local_tokens(**lens, rank=0, pad_to=8).tolist() == [0, 1, 2, 3, -1, -1, -1, -1]


@examples
@given(batches(), st.integers(0, 9))
def test_local_tokens_any_batch_equals_reference(batch: Batch, spare: int) -> None:
    current, _ = batch.lay_out()
    expected = [
        [token for page in current if page.writer == rank for token in page.tokens]
        for rank in range(batch.cp_size)
    ]
    assert [tokens.tolist() for tokens in of_ranks(batch)] == expected
    pad_to = max(map(len, expected)) + spare
    assert [t.tolist() for t in of_ranks(batch, pad_to)] == [padded(e, pad_to) for e in expected]
    assert all(tokens.dtype == np.int32 for tokens in of_ranks(batch, pad_to))


@examples
@given(batches())
def test_local_tokens_partition_the_batch(batch: Batch) -> None:
    ranks = of_ranks(batch)
    assert sorted(np.concatenate(ranks).tolist()) == list(range(sum(batch.extend_lens)))
    assert all(np.all(np.diff(tokens) > 0) for tokens in ranks)


@examples
@given(remapped_batches())
def test_local_tokens_lie_in_the_pages_that_the_rank_writes(
    case: tuple[Batch, int, list[int] | None],
) -> None:
    batch, num_dense_pages, dense_page = case
    plan = build_plan(
        *batch.lens,
        **batch.sizes,
        max_current_pages=300,
        num_dense_pages=num_dense_pages,
        dense_page=dense_page,
    )
    for rank, tokens in enumerate(of_ranks(batch)):
        page_id, row = dense_positions(
            *batch.lens, tokens, page_size=batch.page_size, dense_page=dense_page
        )
        written = plan.current_page[plan.current_writer == rank]
        assert set(page_id.tolist()) == set(written.tolist())
        assert len(set(zip(page_id.tolist(), row.tolist(), strict=True))) == tokens.size


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_local_tokens_too_many_for_pad_to_raises_on_every_rank(rank: int) -> None:
    """Rank 2 has no token; did it not raise, it would wait for the others in vain."""
    lens: dict[str, Any] = {"prefix_lens": [0], "extend_lens": [8], "page_size": 4, "cp_size": 3}
    with pytest.raises(PlanError, match="rank 0 has 4 tokens of this batch and pad_to is 3"):
        local_tokens(**lens, rank=rank, pad_to=3)
    assert local_tokens(**lens, rank=rank, pad_to=4).size == 4


@examples
@given(remapped_batches(), st.data())
def test_dense_positions_any_tokens_equal_reference(
    case: tuple[Batch, int, list[int] | None], data: st.DataObject
) -> None:
    batch, num_dense_pages, dense_page = case
    to_dense = dense_page or list(range(num_dense_pages))
    place = {-1: (-1, -1)}
    for page in batch.lay_out()[0]:
        place |= {t: (to_dense[page.logical], row) for row, t in enumerate(page.tokens)}
    tokens = data.draw(st.lists(st.sampled_from(sorted(place)), max_size=30))
    page_id, row = dense_positions(
        *batch.lens, tokens, page_size=batch.page_size, dense_page=dense_page
    )
    assert list(zip(page_id.tolist(), row.tolist(), strict=True)) == [place[t] for t in tokens]
    assert (page_id.dtype, row.dtype) == (np.int32, np.int32)


def test_dense_positions_worked_example() -> None:
    # Logical pages: 0 prefix, 1 and 2 current | 3 current.
    tokens = [-1, 0, 4, 5, 6, -1]
    page_id, row = dense_positions([4, 0], [6, 1], tokens, page_size=4, dense_page=[10, 30, 20, 40])
    assert page_id.tolist() == [-1, 30, 20, 20, 40, -1]
    assert row.tolist() == [-1, 0, 0, 1, 0, -1]

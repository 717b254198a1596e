"""current_page_cap and local_token_cap: never too low, and not much too high.

Too low, a batch that the engine admitted fails; too high, every rank computes padding.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_symmkv.plan import build_plan, current_page_cap, local_token_cap, local_tokens
from tests.registry import register_ci
from tests.unit.plan.reference import Batch, batches, examples, page_writers

pytestmark = register_ci(suite="unit", est_s=3)


# --- current pages -------------------------------------------------------------------------------


@examples
@given(batches())
def test_current_page_cap_holds_any_batch(batch: Batch) -> None:
    cap = current_page_cap(
        max(1, sum(batch.extend_lens)), max(1, len(batch.extend_lens)), batch.page_size
    )
    assert len(batch.lay_out()[0]) <= cap


def test_current_page_cap_is_attained() -> None:
    assert current_page_cap(64 + 5, 6, 64) == 7
    extend_lens = [65, 1, 1, 1, 1]  # seven pages need a sixth request
    plan = build_plan(
        [0] * 6,
        [*extend_lens, 1],
        page_size=64,
        cp_size=2,
        max_current_pages=current_page_cap(70, 6, 64),
        num_dense_pages=7,
    )
    assert plan.num_current.tolist() == [7]


# --- tokens of a rank ----------------------------------------------------------------------------


@functools.cache
def own_tokens(offset: int, extend_len: int, page_size: int, cp_size: int) -> int:
    """By plain loops: the tokens of a request of the rank at `offset` from it."""
    own = 0
    for i, writer in enumerate(page_writers(0, -(-extend_len // page_size), cp_size)):
        if writer == offset:
            own += min((i + 1) * page_size, extend_len) - i * page_size
    return own


@functools.cache
def most_own_tokens(
    max_extend_tokens: int, num_requests: int, offset: int, page_size: int, cp_size: int
) -> int:
    """Over all batches, one by one, of a rank at `offset` from their first request."""
    if num_requests == 0:
        return 0
    after = ((offset - 1) % cp_size, page_size, cp_size)
    return max(
        own_tokens(offset, e, page_size, cp_size)
        + most_own_tokens(max_extend_tokens - e, num_requests - 1, *after)
        for e in range(max_extend_tokens + 1)
    )


def optimum(max_extend_tokens: int, max_requests: int, page_size: int, cp_size: int) -> int:
    return max(
        most_own_tokens(max_extend_tokens, max_requests, offset, page_size, cp_size)
        for offset in range(cp_size)
    )


SIZES = [(1, 1), (1, 2), (1, 3), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3), (2, 4), (5, 1)]


@pytest.mark.parametrize(("page_size", "cp_size"), SIZES)
def test_local_token_cap_against_every_batch(page_size: int, cp_size: int) -> None:
    """At least the optimum of every small problem; at most a page above, and often equal."""
    excess = []
    for tokens in range(1, 41):
        for requests in (1, 2, 3, 5):
            cap = local_token_cap(tokens, requests, page_size=page_size, cp_size=cp_size)
            excess.append(cap - optimum(tokens, requests, page_size, cp_size))
    assert min(excess) >= 0
    assert max(excess) <= page_size
    assert np.mean(np.array(excess) == 0) >= 0.4


@examples
@given(batches(max_requests=12))
def test_local_token_cap_holds_any_batch(batch: Batch) -> None:
    total, requests = max(1, sum(batch.extend_lens)), max(1, len(batch.extend_lens))
    cap = local_token_cap(total, requests, **batch.sizes)
    assert cap <= total
    for rank in range(batch.cp_size):
        assert local_tokens(*batch.lens, **batch.sizes, rank=rank, pad_to=cap).size == cap


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 5])
def test_local_token_cap_is_attained_by_one_page_for_each_round(cp_size: int, rounds: int) -> None:
    """The worst batch for its size: every cp_size-th request has one page, the others are empty."""
    extend_lens = ([64] + [0] * (cp_size - 1)) * rounds
    batch = ([0] * len(extend_lens), extend_lens)
    worst = local_tokens(*batch, page_size=64, cp_size=cp_size, rank=0).size
    cap = local_token_cap(sum(extend_lens), len(extend_lens), page_size=64, cp_size=cp_size)
    assert worst == cap == 64 * rounds


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_local_token_cap_is_attained_by_a_mix_of_lengths(cp_size: int) -> None:
    """Longer requests that give the rank its share early, at every offset, in budget-bound batches.

    The batch is the greedy answer to the bound's own question, rebuilt from the reference.
    """
    page_size, rounds = 16, 3
    extend_lens, total = [], 0
    for b in range(rounds * cp_size):
        offset = -b % cp_size  # of rank 0
        n = offset + 1 if offset < cp_size / 2 else 2 * cp_size - offset
        extend_lens.append(n * page_size)
        total += n * page_size
    own = local_tokens([0] * len(extend_lens), extend_lens, page_size=16, cp_size=cp_size, rank=0)
    cap = local_token_cap(total, len(extend_lens), page_size=page_size, cp_size=cp_size)
    assert own.size <= cap <= own.size * 1.05


@examples
@given(
    st.integers(1, 10**6),
    st.integers(1, 200),
    st.sampled_from([1, 16, 64]),
    st.sampled_from([1, 2, 3, 8]),
)
def test_local_token_cap_is_a_share_and_at_most_a_page_for_each_request(
    tokens: int, requests: int, page_size: int, cp_size: int
) -> None:
    cap = local_token_cap(tokens, requests, page_size=page_size, cp_size=cp_size)
    assert -(-tokens // cp_size) <= cap + page_size
    assert cap <= min(tokens, tokens / cp_size + requests * page_size)
    assert cap <= local_token_cap(tokens + 1, requests, page_size=page_size, cp_size=cp_size)
    assert cap <= local_token_cap(tokens, requests + 1, page_size=page_size, cp_size=cp_size)


def test_local_token_cap_one_rank_has_everything() -> None:
    assert local_token_cap(1000, 7, page_size=64, cp_size=1) == 1000


def test_local_token_cap_largest_arguments_do_not_overflow() -> None:
    largest = 2**31 - 1
    assert local_token_cap(largest, largest, page_size=2**20, cp_size=8) == largest
    assert local_token_cap(largest, 1, page_size=64, cp_size=8) <= largest // 8 + 64

"""Every refusal names the function, what it requires, what it was given, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jax_symmkv.errors import PlanError
from jax_symmkv.plan import (
    build_plan,
    current_page_cap,
    dense_positions,
    interleaved,
    local_token_cap,
    local_tokens,
)
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=2)

# Good arguments of each function; a case changes some of them.
BATCH: dict[str, Any] = {"prefix_lens": [8, 0], "extend_lens": [5, 3], "page_size": 4}
GOOD: dict[Callable[..., Any], dict[str, Any]] = {
    build_plan: BATCH
    | {
        "cp_size": 2,
        "max_current_pages": 3,
        "max_prefix_pages": 2,
        "num_dense_pages": 6,
        "prefix_owner": [0, 1],
        "prefix_pool_page": [3, 3],
    },
    local_tokens: BATCH | {"cp_size": 2, "rank": 1},
    dense_positions: BATCH | {"tokens": [0, 7, -1]},
    local_token_cap: {"max_extend_tokens": 8, "max_requests": 2, "page_size": 4, "cp_size": 2},
    current_page_cap: {"max_extend_tokens": 8, "max_requests": 2, "page_size": 4},
    interleaved: {"page_ids": [0, 1], "cp_size": 2},
}
FUNCTIONS_OF_A_BATCH = [build_plan, local_tokens, dense_positions]


def check(function: Callable[..., Any], changed: dict[str, Any], *said: str) -> None:
    with pytest.raises(PlanError) as raised:
        function(**(GOOD[function] | changed))
    says(str(raised.value), function, *said)


def check_type(function: Callable[..., Any], changed: dict[str, Any], *said: str) -> None:
    with pytest.raises(TypeError) as raised:
        function(**(GOOD[function] | changed))
    says(str(raised.value), function, *said)


def says(message: str, function: Callable[..., Any], *said: str) -> None:
    assert message.startswith(f"{function.__name__}: ")
    assert re.search(r"; \S+ .*", message), f"no remedy after a semicolon: {message}"
    for part in said:
        assert part in message


@pytest.mark.parametrize("function", GOOD)
def test_good_arguments_are_accepted(function: Callable[..., Any]) -> None:
    function(**GOOD[function])


# --- any function of a batch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"prefix_lens": [8, 6]},
            ["prefix_lens", "multiples of page_size 4", "got 6", "request 1"],
        ),
        ({"prefix_lens": [-4, 0]}, ["prefix_lens must be at least 0", "got -4 at 0"]),
        ({"extend_lens": [5, -3]}, ["extend_lens must be at least 0", "got -3 at 1"]),
        ({"prefix_lens": [8]}, ["prefix_lens and extend_lens", "one entry per request", "1 and 2"]),
        ({"extend_lens": []}, ["one entry per request", "got 2 and 0"]),
        ({"extend_lens": [5, 2**31]}, ["extend_lens", "fit int32", f"got {2**31} at 1"]),
        ({"extend_lens": np.array([2**64 - 1, 0], np.uint64)}, ["int32", f"got {2**64 - 1} at 0"]),
        ({"extend_lens": [2**30, 2**30]}, ["at most 2147483647 tokens", f"got {2**31 + 8}"]),
    ],
)
def test_malformed_batch(changed: dict[str, Any], said: list[str]) -> None:
    for function in FUNCTIONS_OF_A_BATCH:
        check(function, changed, *said)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([4.0, 8.0], ["must be integers", "float64"]),
        ([True, False], ["must be integers", "bool"]),
        (["4", "8"], ["must be integers", "<U1"]),
        ([None, None], ["must be integers", "object"]),
        ([[4, 8]], ["must be 1-D", "shape (1, 2)"]),
        ([[4], [4, 8]], ["must be 1-D", "got [[4], [4, 8]]"]),
        (4, ["must be 1-D", "shape ()"]),
    ],
)
def test_lengths_that_are_not_a_list_of_integers(value: Any, said: list[str]) -> None:
    for function in FUNCTIONS_OF_A_BATCH:
        for name in ("prefix_lens", "extend_lens"):
            check_type(function, {name: value}, name, *said)


@pytest.mark.parametrize(
    ("function", "name", "least"),
    [
        (function, name, 1)
        for function, arguments in GOOD.items()
        for name in ("page_size", "cp_size", "max_extend_tokens", "max_requests")
        if name in arguments
    ]
    + [
        (build_plan, "max_current_pages", 1),
        (build_plan, "max_prefix_pages", 0),
        (build_plan, "num_dense_pages", 1),
        (local_tokens, "rank", 0),
        (local_tokens, "pad_to", 0),
    ],
)
def test_counts(function: Callable[..., Any], name: str, least: int) -> None:
    for value in (least - 1, -7, 2**31):
        check(function, {name: value}, f"{name} must be at least {least}", f"got {value}")
    for value in (2.0, "2", [2]):
        check_type(function, {name: value}, f"{name} must be an integer", f"got {value!r}")


# --- build_plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"max_current_pages": 2},
            ["3 current pages", "max_current_pages is 2", "split", "current_page_cap"],
        ),
        ({"max_prefix_pages": 1}, ["2 prefix pages", "max_prefix_pages is 1", "split the batch"]),
        ({"num_dense_pages": 4}, ["5 pages", "num_dense_pages is 4", "split the batch"]),
        ({"dense_page": [0, 1, 2, 3]}, ["dense_page", "5 pages", "got 4"]),
        ({"dense_page": [0, 1, 2, 3, 4, 5]}, ["dense_page", "5 pages", "got 6"]),
        ({"dense_page": [0, 1, 2, 3, 6]}, ["dense_page", "below 6", "got 6 at 4"]),
        ({"dense_page": [0, 1, -1, 3, 4]}, ["dense_page", "at least 0", "got -1 at 2"]),
        ({"dense_page": [0, 1, 4, 3, 1]}, ["dense_page", "twice", "got 1 at [1, 4]"]),
        ({"prefix_owner": None}, ["prefix_owner is required", "2 prefix pages", "got None"]),
        ({"prefix_pool_page": None}, ["prefix_pool_page is required", "got None"]),
        ({"prefix_owner": [0]}, ["prefix_owner", "2 prefix pages", "got 1"]),
        ({"prefix_owner": []}, ["prefix_owner", "2 prefix pages", "got 0"]),
        ({"prefix_pool_page": [3, 3, 3]}, ["prefix_pool_page", "2 prefix pages", "got 3"]),
        ({"prefix_owner": [0, 2]}, ["prefix_owner", "below 2", "got 2 at 1"]),
        ({"prefix_owner": [-1, 0]}, ["prefix_owner", "at least 0", "got -1 at 0"]),
        ({"prefix_pool_page": [3, -5]}, ["prefix_pool_page", "at least 0", "got -5 at 1"]),
        (
            {"max_prefix_pages": 0, "prefix_pool_page": None},
            ["prefix_owner", "max_prefix_pages above 0", "got 2 entries and max_prefix_pages 0"],
        ),
        ({"prefix_lens": [0, 0]}, ["prefix_owner", "0 prefix pages", "got 2"]),
    ],
)
def test_build_plan_refuses(changed: dict[str, Any], said: list[str]) -> None:
    check(build_plan, changed, *said)


@pytest.mark.parametrize("name", ["dense_page", "prefix_owner", "prefix_pool_page"])
def test_build_plan_refuses_other_than_integers(name: str) -> None:
    check_type(build_plan, {name: [0.0, 1.0]}, f"{name} must be integers", "float64")


def test_build_plan_overflow_is_found_before_anything_is_allocated() -> None:
    """Two thousand million pages would need 50 GB."""
    check(
        build_plan,
        {"prefix_lens": [0, 0], "extend_lens": [2**31 - 1, 0], "page_size": 1},
        "2147483647 current pages",
    )


def test_build_plan_without_prefixes_needs_no_page_table() -> None:
    lens = {"prefix_lens": [0, 0], "prefix_owner": None, "prefix_pool_page": None}
    assert build_plan(**(GOOD[build_plan] | lens)).num_prefix.tolist() == [0]


# --- the others ----------------------------------------------------------------------------------


def test_local_tokens_rank_beyond_the_group() -> None:
    check(local_tokens, {"rank": 2}, "rank must be below cp_size 2", "got 2")


def test_local_tokens_too_many_for_pad_to() -> None:
    check(local_tokens, {"pad_to": 3}, "has 4 tokens", "pad_to is 3", "local_token_cap")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": [0, 8]}, ["tokens", "below 8", "got 8 at 1", "local_tokens"]),
        ({"tokens": [-2]}, ["tokens", "at least -1", "got -2 at 0"]),
        ({"dense_page": [0, 1, 2]}, ["dense_page", "5 pages", "got 3"]),
        ({"dense_page": [0, 1, 2, 3, -1]}, ["dense_page", "at least 0", "got -1 at 4"]),
        ({"dense_page": [5, 1, 2, 3, 5]}, ["dense_page", "twice", "got 5 at [0, 4]"]),
        ({"extend_lens": [0, 0], "tokens": [0]}, ["tokens", "below 0", "got 0 at 0"]),
    ],
)
def test_dense_positions_refuses(changed: dict[str, Any], said: list[str]) -> None:
    check(dense_positions, changed, *said)


def test_dense_positions_tokens_that_are_not_integers() -> None:
    check_type(dense_positions, {"tokens": [0.0]}, "tokens must be integers", "float64")


def test_interleaved_negative_page_id() -> None:
    check(interleaved, {"page_ids": [3, -1]}, "page_ids must be at least 0", "got -1 at 1")

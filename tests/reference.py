"""The exchange in plain NumPy, and bytes and batches to try it on; no JAX program is involved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_symmkv import ComposePlan, build_plan

Array = npt.NDArray[Any]

# Values that a detour through arithmetic would change: bfloat16's and float32's signalling NaNs, of
# both signs, then NaNs of float8, a denormal and a negative zero.
AWKWARD = np.frombuffer(bytes.fromhex("817f81ff 0100807f 010080ff 7fff0080"), np.uint8)

PAGE_SIZE = 4  # tokens of a page in `batches`
MAX_CURRENT_PAGES = 23
NUM_DENSE_PAGES = 41


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Random bytes, no two pages alike; so a page that is read or written wrongly always shows."""
    dtype = np.dtype(dtype)
    page_nbytes = math.prod(shape[1:]) * dtype.itemsize
    raw = rng.integers(0, 256, (shape[0], page_nbytes), np.uint8)
    if dtype == np.bool_:
        return (raw & 1).view(np.bool_).reshape(shape)
    if page_nbytes > 2 * AWKWARD.size:
        raw[:, : AWKWARD.size] = AWKWARD
    return raw.view(dtype).reshape(shape)


def composed(dense: Array, plan: ComposePlan) -> Array:
    """[cp, num_dense_pages, ...] before an exchange → after it.

    Every current page is its writer's, on every rank; no other page changes.
    """
    result = dense.copy()
    for slot in range(int(plan.num_current[0])):
        page, writer = int(plan.current_page[slot]), int(plan.current_writer[slot])
        result[:, page] = dense[writer, page]
    return result


def assert_same_bytes(actual: Array, expected: Array, what: str) -> None:
    """Every byte of every page, whatever the dtype's notion of equality."""
    assert actual.shape == expected.shape, (
        f"{what}: shape {actual.shape}, expected {expected.shape}"
    )
    assert actual.dtype == expected.dtype, (
        f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    )
    pages = [np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1) for a in (actual, expected)]
    wrong = np.flatnonzero((pages[0] != pages[1]).any(axis=1))
    assert not wrong.size, f"{what}: {wrong.size} of {len(actual)} pages differ: {wrong.tolist()}"


def batches(cp_size: int, rng: np.random.Generator) -> dict[str, ComposePlan]:
    """Plans of one shape, so that one program runs them all."""

    def plan(
        prefix_pages: list[int], extend_lens: list[int], permuted: bool = False
    ) -> ComposePlan:
        pages = sum(prefix_pages) + sum(-(-n // PAGE_SIZE) for n in extend_lens)
        return build_plan(
            [n * PAGE_SIZE for n in prefix_pages],
            extend_lens,
            page_size=PAGE_SIZE,
            cp_size=cp_size,
            max_current_pages=MAX_CURRENT_PAGES,
            num_dense_pages=NUM_DENSE_PAGES,
            dense_page=rng.permutation(NUM_DENSE_PAGES)[:pages] if permuted else None,
        )

    full = MAX_CURRENT_PAGES * PAGE_SIZE
    return {
        "no request": plan([], []),
        "no page": plan([0, 3], [0, 0]),
        "one page": plan([2], [3]),
        "odd counts, prefixes between": plan([2, 0, 1], [7 * PAGE_SIZE + 1, 0, 3 * PAGE_SIZE]),
        "full": plan([0], [full]),
        "full and scattered": plan([3, 1], [PAGE_SIZE, full - PAGE_SIZE], permuted=True),
        "one-page requests, scattered": plan([1] * 9, [1] * 9, permuted=True),
    }

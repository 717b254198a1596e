"""Pages that say who wrote them, into which slot, in which exchange; so a page of any other shows."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jax_symmkv import ComposePlan, build_plan
from tests.reference import Array

PAGE_SIZE = 16
# Each row of a page repeats one token: writer, slot, and the exchange's number in two words.
TOKEN_WORDS = 4
SMALL_PAGE = jax.ShapeDtypeStruct((PAGE_SIZE, TOKEN_WORDS), np.int32)
# 4 KiB: copied past the caches (ffi/shm/stream_copy.h), by stores that are ordered otherwise.
LARGE_PAGE = jax.ShapeDtypeStruct((PAGE_SIZE, 16 * TOKEN_WORDS), np.int32)
MAX_REQUESTS = 3
NUM_SLOTS = 4 * MAX_REQUESTS
NUM_DENSE_PAGES = NUM_SLOTS + 2 * MAX_REQUESTS
UNTOUCHED = -1


@dataclasses.dataclass(frozen=True)
class Misread:
    """A current page that does not hold its token."""

    exchange: int
    slot: int
    writer: int
    found: tuple[int, int, int] | None  # writer, slot, exchange; None for rows that differ

    @property
    def newer_by(self) -> int | None:
        """How many exchanges later the same writer put this into the same slot; None for nonsense."""
        if self.found is None or self.found[:2] != (self.writer, self.slot):
            return None
        return self.found[2] - self.exchange


def token_plan(exchange: int, cp_size: int) -> ComposePlan:
    """A batch of one to three requests: another one every time, the same on every rank."""
    rng = np.random.default_rng(exchange)
    num_requests = rng.integers(1, MAX_REQUESTS + 1)
    return build_plan(
        rng.integers(0, 3, num_requests) * PAGE_SIZE,
        rng.integers(1, NUM_SLOTS // MAX_REQUESTS * PAGE_SIZE + 1, num_requests),
        page_size=PAGE_SIZE,
        cp_size=cp_size,
        max_current_pages=NUM_SLOTS,
        num_dense_pages=NUM_DENSE_PAGES,
    )


def tokens(page: jax.ShapeDtypeStruct, plan: ComposePlan, rank: int, exchange: int) -> Array:
    """The dense buffer of a rank before the exchange: its own pages hold tokens, the others nothing."""
    dense = np.full((NUM_DENSE_PAGES, *page.shape), UNTOUCHED, np.int32)
    slots = np.flatnonzero(np.asarray(plan.current_writer) == rank)
    pages = np.asarray(plan.current_page)[slots]
    words = np.broadcast_arrays(rank, slots, exchange & 0x7FFFFFFF, exchange >> 31)
    token = np.stack(words, axis=1)[:, None, :]
    dense[pages] = np.tile(token, (1, 1, page.shape[1] // TOKEN_WORDS))
    return dense


def misreads(dense: Array, plan: ComposePlan, exchange: int) -> list[Misread]:
    """The current pages that don't hold their tokens after the exchange."""
    found = []
    untouched = np.ones(NUM_DENSE_PAGES, bool)
    for slot in range(int(plan.num_current[0])):
        page, writer = int(plan.current_page[slot]), int(plan.current_writer[slot])
        untouched[page] = False
        rows = dense[page].reshape(-1, TOKEN_WORDS)
        token = (int(rows[0, 0]), int(rows[0, 1]), int(rows[0, 2]) | int(rows[0, 3]) << 31)
        if (rows != rows[0]).any():
            found.append(Misread(exchange, slot, writer, None))
        elif token != (writer, slot, exchange):
            found.append(Misread(exchange, slot, writer, token))
    assert (dense[untouched] == UNTOUCHED).all(), "a page that is no current page was written"
    return found

"""The plan of a batch in plain loops, written from the design's text; and batches to try it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

# No deadline: machines that run tests are busy.
examples = settings(deadline=None, max_examples=60)


@dataclass(frozen=True)
class Page:
    """A current page: its request, its place in the dense layout, its writer and its tokens."""

    request: int
    logical: int
    writer: int
    tokens: range


def block_sizes(num_pages: int, cp_size: int) -> list[int]:
    blocks = 2 * cp_size
    return [num_pages // blocks + (1 if k < num_pages % blocks else 0) for k in range(blocks)]


def page_writers(request: int, num_pages: int, cp_size: int) -> list[int]:
    writers = []
    for k, size in enumerate(block_sizes(num_pages, cp_size)):
        z = k if k < cp_size else 2 * cp_size - 1 - k
        writers += [(z + request) % cp_size] * size
    return writers


def lay_out(
    prefix_lens: list[int], extend_lens: list[int], page_size: int, cp_size: int
) -> tuple[list[Page], list[int]]:
    """Current pages in slot order, and the logical page of every prefix page."""
    current, prefix = [], []
    logical = first_token = 0
    for b, (prefix_len, extend_len) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        for _ in range(prefix_len // page_size):
            prefix.append(logical)
            logical += 1
        num_pages = (extend_len + page_size - 1) // page_size
        for i, writer in enumerate(page_writers(b, num_pages, cp_size)):
            begin, end = i * page_size, min((i + 1) * page_size, extend_len)
            tokens = range(first_token + begin, first_token + end)
            current.append(Page(b, logical, writer, tokens))
            logical += 1
        first_token += extend_len
    return current, prefix


def padded(values: list[int], capacity: int) -> list[int]:
    assert len(values) <= capacity
    return values + [-1] * (capacity - len(values))


@dataclass(frozen=True)
class Batch:
    prefix_lens: list[int]
    extend_lens: list[int]
    page_size: int
    cp_size: int

    @property
    def lens(self) -> tuple[list[int], list[int]]:
        return self.prefix_lens, self.extend_lens

    @property
    def sizes(self) -> dict[str, int]:
        return {"page_size": self.page_size, "cp_size": self.cp_size}

    def lay_out(self) -> tuple[list[Page], list[int]]:
        return lay_out(*self.lens, **self.sizes)

    @property
    def num_pages(self) -> int:
        current, prefix = self.lay_out()
        return len(current) + len(prefix)


@st.composite
def batches(draw: Any, max_requests: int = 6) -> Batch:
    """Small pages and few ranks, so that blocks of every kind occur: empty, of one page, uneven."""
    page_size = draw(st.sampled_from([1, 2, 3, 16]))
    cp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    prefix_pages = st.integers(0, 4)
    extend_len = st.one_of(st.integers(0, 3), st.integers(0, 5 * cp_size * page_size))
    requests = draw(st.lists(st.tuples(prefix_pages, extend_len), max_size=max_requests))
    return Batch([p * page_size for p, _ in requests], [e for _, e in requests], page_size, cp_size)


@st.composite
def remapped_batches(draw: Any) -> tuple[Batch, int, list[int] | None]:
    """A batch, num_dense_pages that hold it, and a dense_page or None."""
    batch = draw(batches())
    num_dense_pages = max(1, batch.num_pages + draw(st.integers(0, 5)))
    if draw(st.booleans()):
        return batch, num_dense_pages, None
    order = draw(st.permutations(range(num_dense_pages)))
    return batch, num_dense_pages, order[: batch.num_pages]

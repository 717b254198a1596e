"""How large a heap is: pages, slots, bytes."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
from typing import Any

import jax
import numpy as np

from jax_symmkv import _core
from jax_symmkv.errors import HeapError

Page = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]

# The address space of a process; far below where offsets into a slab would overflow.
_MAX_STAGING_NBYTES = 2**47
_SUB_BYTE = re.compile(r"u?int[124]|float[46]_\w+")


@dataclasses.dataclass(frozen=True)
class Sizing:
    page: tuple[jax.ShapeDtypeStruct, ...]
    is_tuple: bool  # whether the user gave a tuple, and so passes tuples of buffers
    requested_current_pages: int
    max_current_pages: int  # after SYMMKV_HEAP_MB
    max_prefix_pages: int

    @property
    def page_nbytes(self) -> list[int]:
        return [_nbytes(p) for p in self.page]

    @property
    def num_slots(self) -> int:
        return self.max_current_pages + self.max_prefix_pages

    def with_slots(self, max_current_pages: int) -> Sizing:
        return dataclasses.replace(self, max_current_pages=max_current_pages)

    def record(self) -> dict[str, Any]:
        """What must be equal on every process, as JSON types."""
        return {
            "page": [[list(p.shape), str(np.dtype(p.dtype))] for p in self.page],
            "max_current_pages": self.requested_current_pages,
            "max_prefix_pages": self.max_prefix_pages,
        }


def size_heap(page: Page, max_current_pages: int, max_prefix_pages: int) -> Sizing:
    """Checks the arguments of a heap and bounds its slots by SYMMKV_HEAP_MB."""
    is_tuple = isinstance(page, tuple)
    pages = page if isinstance(page, tuple) else (page,)
    if not 1 <= len(pages) <= _core.MAX_BUFFERS:
        raise HeapError(
            f"SymmetricHeap: page must name 1 to {_core.MAX_BUFFERS} buffers, got {len(pages)}"
        )
    for p in pages:
        _check_page(p)
    requested = _count("max_current_pages", max_current_pages, at_least=1)
    sizing = Sizing(
        page=tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pages),
        is_tuple=is_tuple,
        requested_current_pages=requested,
        max_current_pages=requested,
        max_prefix_pages=_count("max_prefix_pages", max_prefix_pages, at_least=0),
    )
    sizing = _bound(sizing)
    staging_nbytes = 2 * sizing.num_slots * sum(sizing.page_nbytes)
    if staging_nbytes > _MAX_STAGING_NBYTES:
        raise HeapError(
            f"SymmetricHeap: {sizing.num_slots} slots need {staging_nbytes} bytes of staging, more than "
            "a process can address; lower max_current_pages or max_prefix_pages"
        )
    return sizing


def _bound(sizing: Sizing) -> Sizing:
    heap_mb = os.environ.get("SYMMKV_HEAP_MB")
    if heap_mb is None:
        return sizing
    slot_nbytes = 2 * sum(sizing.page_nbytes)
    try:
        slots = int(float(heap_mb) * 2**20) // slot_nbytes - sizing.max_prefix_pages
    except (ValueError, OverflowError):
        raise HeapError(
            f"SymmetricHeap: SYMMKV_HEAP_MB must be a number of MiB, got {heap_mb!r}"
        ) from None
    if slots < 1:
        raise HeapError(
            f"SymmetricHeap: SYMMKV_HEAP_MB={heap_mb} leaves no slot of {slot_nbytes} bytes beside "
            f"{sizing.max_prefix_pages} for prefix pages; raise it to at least "
            f"{math.ceil((sizing.max_prefix_pages + 1) * slot_nbytes / 2**20)}"
        )
    return sizing.with_slots(min(slots, sizing.max_current_pages))


def _check_page(page: jax.ShapeDtypeStruct) -> None:
    if not isinstance(page, jax.ShapeDtypeStruct):
        raise TypeError(
            "SymmetricHeap: page must be a jax.ShapeDtypeStruct or a tuple of them, "
            f"got {type(page).__name__}"
        )
    # An extended dtype, such as a PRNG key's, is no np.dtype.
    if not isinstance(page.dtype, np.dtype) or _SUB_BYTE.fullmatch(page.dtype.name):
        raise HeapError(
            f"SymmetricHeap: a page can't have dtype {page.dtype}, whose elements are not whole bytes; "
            "view it as uint8"
        )
    nbytes = _nbytes(page)
    if nbytes == 0 or nbytes % _core.PAGE_GRANULE_NBYTES:
        raise HeapError(
            f"SymmetricHeap: a page must be a positive multiple of {_core.PAGE_GRANULE_NBYTES} bytes, "
            f"{page.dtype}{list(page.shape)} has {nbytes}; pad its last dimension, or use a larger "
            "page_size"
        )


def _nbytes(page: jax.ShapeDtypeStruct) -> int:
    return int(math.prod(page.shape) * np.dtype(page.dtype).itemsize)


def _count(name: str, value: int, *, at_least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"SymmetricHeap: {name} must be an integer, got {value!r}") from None
    if count < at_least:
        raise HeapError(f"SymmetricHeap: {name} must be at least {at_least}, got {count}")
    return count

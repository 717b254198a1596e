"""One size of the bench: which pages are exchanged, and the bytes that must come out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import jax_symmkv as symmkv

Words = npt.NDArray[np.uint32]

# A token of one layer, as latent attention caches it: 512 + 64 bfloat16. 64 tokens are 73,728 bytes.
TOKEN_ELEMS = 576
TOKEN_NBYTES = 2 * TOKEN_ELEMS
PAGE_TOKENS = 64
# A rank that publishes less has smaller pages, so that small sizes still move several.
_MIN_PAGES = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of one request, long enough for every rank to compute `pages_per_rank` pages.

    No pages at all is a case, too: an exchange that only synchronises.
    """

    cp_size: int
    page_tokens: int
    pages_per_rank: int

    @property
    def page(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.page_tokens, TOKEN_ELEMS), jnp.bfloat16)

    @property
    def page_nbytes(self) -> int:
        return self.page_tokens * TOKEN_NBYTES

    @property
    def num_pages(self) -> int:
        return self.cp_size * self.pages_per_rank

    @property
    def published_nbytes(self) -> int:
        """What a rank publishes."""
        return self.pages_per_rank * self.page_nbytes

    @property
    def received_nbytes(self) -> int:
        """What a rank gathers from its peers."""
        return (self.cp_size - 1) * self.published_nbytes

    @property
    def num_slots(self) -> int:
        return max(1, self.num_pages)  # a heap has at least one

    def plan(self, max_current_pages: int) -> symmkv.ComposePlan:
        return symmkv.build_plan(
            [0],
            [self.num_pages * self.page_tokens],
            page_size=self.page_tokens,
            cp_size=self.cp_size,
            max_current_pages=max_current_pages,
            num_dense_pages=self.num_slots,
        )

    def composed(self) -> Words:
        """uint32 [slots, words of a page]: all pages. No word comes twice in 16 GiB."""
        words = np.arange(self.num_slots * self.page_nbytes // 4, dtype=np.uint32)
        return (words * np.uint32(2654435761)).reshape(self.num_slots, -1)


def make_case(nbytes: int, cp_size: int) -> Case:
    """The case in which each rank receives about `nbytes`, in whole pages; exactly 0 for 0.

    Where that is little the pages are smaller than PAGE_TOKENS.
    """
    if nbytes == 0:
        return Case(cp_size, 1, 0)
    published_nbytes = nbytes / (cp_size - 1)
    page_tokens = PAGE_TOKENS
    while page_tokens > 1 and published_nbytes < _MIN_PAGES * page_tokens * TOKEN_NBYTES:
        page_tokens //= 2
    return _case_of_pages(published_nbytes, cp_size, page_tokens)


def make_full_page_case(nbytes: int, cp_size: int) -> Case:
    """The same in pages of PAGE_TOKENS, however little that is: one page at least, or none for 0."""
    if nbytes == 0:
        return Case(cp_size, PAGE_TOKENS, 0)
    return _case_of_pages(nbytes / (cp_size - 1), cp_size, PAGE_TOKENS)


def _case_of_pages(published_nbytes: float, cp_size: int, page_tokens: int) -> Case:
    pages = max(1, round(published_nbytes / (page_tokens * TOKEN_NBYTES)))
    return Case(cp_size, page_tokens, pages)

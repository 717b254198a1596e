"""Static sizes of the demo's programs: what every batch is padded to."""

from __future__ import annotations

import dataclasses

import jax_symmkv as symmkv
from jax_symmkv.cli.demo.attention import QUERY_BLOCK_TOKENS, key_block_pages
from jax_symmkv.cli.demo.model import ModelConfig


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Capacities, from the command line alone, so that batches of all shapes reuse one program."""

    cp_size: int
    page_size: int
    token_budget: int
    max_requests: int

    @property
    def current_page_cap(self) -> int:
        """Slots that the heap needs."""
        return symmkv.current_page_cap(self.token_budget, self.max_requests, self.page_size)

    @property
    def num_dense_pages(self) -> int:
        """Pages of a rank's dense buffer: whole blocks of keys."""
        return _round_up(self.current_page_cap, key_block_pages(self.page_size))

    @property
    def num_local_tokens(self) -> int:
        """Tokens of one rank, padding included: whole blocks of queries."""
        cap = symmkv.local_token_cap(
            self.token_budget, self.max_requests, page_size=self.page_size, cp_size=self.cp_size
        )
        return _round_up(cap, QUERY_BLOCK_TOKENS)

    def page_nbytes(self, config: ModelConfig) -> int:
        """Bytes of one page: K and V of one layer."""
        return 2 * self.page_size * config.num_kv_heads * config.head_dim * config.kv_dtype.itemsize

    def rank_nbytes(self, config: ModelConfig) -> int:
        """Bytes of a rank that grow with the budget: staging, dense buffers, records of all layers.

        Verification keeps every layer's dense buffer twice, before and after its compose, and the
        oracle's result once.
        """
        page_nbytes = self.page_nbytes(config)
        staging = 2 * self.current_page_cap * page_nbytes
        dense = self.num_dense_pages * page_nbytes
        return staging + dense * (1 + 3 * config.num_layers)

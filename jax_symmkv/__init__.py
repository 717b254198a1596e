"""Compose paged KV across context-parallel ranks inside jitted JAX programs, over symmetric memory."""

from jax_symmkv.collective import collective_compose
from jax_symmkv.compose import compose
from jax_symmkv.errors import HeapError, PeerError, PlanError
from jax_symmkv.heap import SymmetricHeap
from jax_symmkv.ops import barrier, gather, new_ticket, publish
from jax_symmkv.plan import (
    ComposePlan,
    build_plan,
    current_page_cap,
    dense_positions,
    interleaved,
    local_token_cap,
    local_tokens,
)

__all__ = [
    "ComposePlan",
    "HeapError",
    "PeerError",
    "PlanError",
    "SymmetricHeap",
    "barrier",
    "build_plan",
    "collective_compose",
    "compose",
    "current_page_cap",
    "dense_positions",
    "gather",
    "interleaved",
    "local_token_cap",
    "local_tokens",
    "new_ticket",
    "publish",
]

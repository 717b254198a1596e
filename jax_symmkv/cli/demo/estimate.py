"""What a larger run would need, from what this one took."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Sequence

from jax_symmkv.cli.demo import trace
from jax_symmkv.cli.demo.geometry import Geometry
from jax_symmkv.cli.demo.model import ModelConfig

BUDGET_FACTOR = 8

# Work that a token costs without attention, in the work of attending to one key.
_KEYS_PER_TOKEN = 4000


def peak_rank_nbytes() -> int:
    """Most memory that this process has had resident, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def larger_run(
    requests: Sequence[trace.Request], geometry: Geometry, config: ModelConfig, job_s: float
) -> str:
    """A line on the same requests under a larger budget, which cuts fewer prompts.

    Args:
      job_s: seconds that this run took, compilation aside.
    """
    larger = dataclasses.replace(geometry, token_budget=geometry.token_budget * BUDGET_FACTOR)
    ratio = _work(requests, larger) / _work(requests, geometry)
    more_nbytes = larger.rank_nbytes(config) - geometry.rank_nbytes(config)
    return (
        f"a larger run: --token-budget {larger.token_budget} needs roughly "
        f"{format_duration(ratio * job_s)} on this machine and "
        f"{(peak_rank_nbytes() + more_nbytes) / 1e9:.1f} GB a rank; more --requests need more time alone"
    )


def format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _work(requests: Sequence[trace.Request], geometry: Geometry) -> int:
    """Grows with the prompts' lengths, and with their squares for attention."""
    lens = [min(request.input_tokens, geometry.token_budget) for request in requests]
    return sum(num_tokens * (_KEYS_PER_TOKEN + num_tokens) for num_tokens in lens)

"""The demo from end to end, at a tiny size: it passes, and a wrong compose makes it fail."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp

import jax_symmkv as symmkv
from jax_symmkv.cli.demo import rank
from tests.registry import register_ci
from tests.run_rank import ROOT, run_ranks_of

pytestmark = register_ci(suite="distributed", ranks=3, est_s=45)

TINY = ["--requests=4", "--layers=2", "--page-size=16", "--token-budget=200"]


def test_demo_passes_and_prints_table_and_verdict():
    command = [sys.executable, "-m", "jax_symmkv", "demo", "--ranks=3", *TINY]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "4 batches of at most 200 tokens (4 prompts are longer and cut to that)" in result.stdout
    assert "3 ranks over shm" in result.stdout
    assert "verified: dense buffers (4 batches x 2 layers x 3 ranks)" in result.stdout
    assert "verified: outputs of 4 requests" in result.stdout
    assert "FAILED" not in result.stdout and "Gloo" not in result.stdout


def test_demo_stale_pages_fail_on_every_rank():
    result = run_ranks_of(__file__, "stale_demo", ranks=2, expect={0: 1, 1: 1}, timeout_s=180)
    assert "FAILED: dense buffers" in result.ranks[0].output
    assert "FAILED: outputs" in result.ranks[0].output


def stale_demo():
    """The demo on this rank, with a compose that brings rank 1 nothing."""
    sys.exit(rank.main(TINY, compose=stale_compose))


def stale_compose(dense, plan, ticket, *, heap):
    composed, ticket = symmkv.compose(dense, plan, ticket, heap=heap)
    wrong = jax.lax.axis_index(heap.axis_name) == 1
    return tuple(jnp.where(wrong, d, c) for d, c in zip(dense, composed, strict=True)), ticket

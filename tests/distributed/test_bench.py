"""The bench on two ranks, with sizes and samples too small to measure anything."""

from __future__ import annotations

import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_symmkv as symmkv
from jax_symmkv.__main__ import main
from jax_symmkv.cli.bench import rank, report
from tests.registry import register_ci
from tests.run_rank import run_ranks_of

pytestmark = register_ci(suite="distributed", ranks=2, est_s=20)

TINY = ["--sizes", "4kB", "64kB", "--repeats", "3"]


def test_bench_reports_every_variant_at_every_size(tmp_path, capfd):
    path = tmp_path / "result.json"
    assert main(["bench", *TINY, "--json", str(path)]) == 0
    printed = capfd.readouterr().out
    assert all(column in printed for column in report.COLUMNS)
    assert "[Gloo]" not in printed

    result = json.loads(path.read_text())
    assert result["command"] == f"python -m jax_symmkv bench --ranks 2 {' '.join(TINY)}"
    assert set(result["versions"]) == {"python", "jax", "jaxlib", "jax_symmkv"}
    assert result["transport"] == "shm" and result["ranks"] == 2 and result["repeats"] == 3
    assert result["cpu_model"] and result["cores"] >= 1 and result["placement"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*\+00:00", result["date"])
    no_data, *cases = result["cases"]
    exchanges = {"compose", "three_calls", "psum", "all_gather"}
    assert no_data["received_nbytes"] == 0 and set(no_data["variants"]) == exchanges
    assert [case["received_nbytes"] for case in cases] == [3456, 64512]
    for case in cases:
        assert case["received_nbytes"] == case["pages_published"] * case["page_nbytes"]
        assert set(case["variants"]) == exchanges | {"memcpy"}
    for case in result["cases"]:
        for variant in case["variants"].values():
            samples = variant["samples_us"]
            assert len(samples) == 3 and min(samples) > 0
            assert variant["median_us"] == pytest.approx(sorted(samples)[1], abs=2e-3)


def test_bench_wrong_bytes_on_one_rank_fail_on_every_rank(tmp_path):
    result = run_ranks_of(
        __file__, "bench_with_wrong_compose", ranks=2, expect={0: 1, 1: 1}, directory=str(tmp_path)
    )
    assert "FAILED: wrong bytes from compose, " in result.ranks[0].output
    assert not list(tmp_path.iterdir())


def bench_with_wrong_compose(directory):
    """The bench on this rank, with a compose that gets one element wrong, on rank 1."""
    sys.exit(rank.main([*TINY, "--result", f"{directory}/result.json"], compose=wrong_compose))


def wrong_compose(dense, plan, ticket, *, heap):
    dense, ticket = symmkv.compose(dense, plan, ticket, heap=heap)
    wrong = jnp.where(jax.lax.axis_index("cp") == 1, 0, dense[0, 0, 2])
    return dense.at[0, 0, 2].set(wrong), ticket

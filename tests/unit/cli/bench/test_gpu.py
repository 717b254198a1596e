"""The bench on GPUs as far as it goes without one: where it runs, its cases and its tables."""

from __future__ import annotations

import importlib.util
import types

import pytest

from jax_symmkv import compat
from jax_symmkv.__main__ import main
from jax_symmkv.cli.bench import gpu, options, platforms
from jax_symmkv.cli.bench.gpu import cases, report
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=4)

FIRST = {
    "compose": 6.0,
    "three_calls": 12.0,
    "graph": 5.0,
    "copy_engine": 3.0,
    "psum": 30.0,
    "all_gather": 24.0,
    "torch_all_gather": 9.0,
    "torch_all_reduce": 10.5,
    "torch_symm_mem": 18.0,
}


def made_up_result(*left_out):
    received = {"received_nbytes": 73728, "page_nbytes": 73728, "pages_published": 1}
    nothing = {"received_nbytes": 0, "page_nbytes": 0, "pages_published": 0}
    made = [
        sizes
        | {
            "variants": {
                name: {"median_us": us, "quartiles_us": [us, us]}
                for name, us in FIRST.items()
                if name not in left_out and (name != "copy_engine" or sizes is received)
            }
        }
        for sizes in (nothing, received)
    ]
    return {
        "command": "python -m jax_symmkv bench --platform gpu --ranks 2",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.12.3", "jax": "0.11.2", "torch": "2.11.0"},
        "platform": "gpu",
        "device_kind": "Some GPU",
        "driver_cuda": "13.0",
        "gpus": 2,
        "ranks": 2,
        "layers": 61,
        "repeats": 1,
        "transport": "cuda-ipc",
        "left_out": [f"{name}: not there" for name in left_out],
        "cases": made,
    }


def has_gpus(count, monkeypatch):
    monkeypatch.setattr(compat, "cuda_module_error", lambda: None)
    module = types.SimpleNamespace(device_count=lambda: count)
    monkeypatch.setattr(compat, "cuda_module", lambda: module)


@pytest.mark.parametrize(
    ("jax_platforms", "asked", "chosen"),
    [
        ("", None, "gpu"),
        ("cuda,cpu", None, "gpu"),
        ("cpu", None, "cpu"),
        ("", "cpu", "cpu"),
        ("", "gpu", "gpu"),
    ],
)
def test_choose_takes_gpus_where_jax_may(jax_platforms, asked, chosen, monkeypatch):
    has_gpus(2, monkeypatch)
    monkeypatch.setenv("JAX_PLATFORMS", jax_platforms)
    assert platforms.choose(asked) == chosen


def test_choose_takes_cpus_without_gpus(monkeypatch):
    has_gpus(0, monkeypatch)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert platforms.choose(None) == "cpu"
    with pytest.raises(ValueError, match="--platform gpu can't be had: no GPU is seen"):
        platforms.choose("gpu")


def test_bench_on_gpus_that_jax_may_not_use_is_refused(monkeypatch, capfd):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["bench", "--platform=gpu"]) == 2
    assert "JAX_PLATFORMS=cpu leaves GPUs out" in capfd.readouterr().err


def test_ranks_share_a_gpu_only_where_that_is_said(monkeypatch):
    has_gpus(1, monkeypatch)
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    with pytest.raises(ValueError, match="--ranks 2 needs as many GPUs, this process sees 1"):
        platforms.check_enough_gpus(2)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")
    platforms.check_enough_gpus(2)


@pytest.mark.parametrize(("cp_size", "pages"), [(2, [0, 1, 4, 128]), (8, [0, 1, 18])])
def test_make_cases_is_full_pages_and_no_case_twice(cp_size, pages):
    sizes = (73_728, 294_912, 9_437_184)
    made = cases.make_cases(options.Options(sizes, 1), cp_size)
    assert [case.pages_per_rank for case in made] == pages
    assert {case.page_nbytes for case in made} == {73_728}


def test_times_has_a_column_for_each_variant_and_a_gap_for_no_copy():
    names, nothing, received = report.times(made_up_result())
    assert names[:5] == ("received", "pages", "copy engine µs", "bare graph µs", "compose µs")
    assert len(names) == 2 + len(FIRST)
    assert nothing[:5] == ("no data", "", "", "5.0", "6.0")
    assert received[:5] == ("73.7 kB", "1 x 73.7 kB", "3.0", "5.0", "6.0")


def test_ratios_compares_with_compose():
    names, nothing, received = report.ratios(made_up_result())
    assert dict(zip(names, received, strict=True)) == {
        "received": "73.7 kB",
        "compose GB/s": "12.3",
        "of copy engine": "50%",
        "in jit over graph": "+1.00 µs",
        "vs psum": "5.00x",
        "vs all_gather": "4.00x",
        "vs torch all_gather": "1.50x",
        "vs torch all_reduce": "1.75x",
        "vs torch symm. memory": "3.00x",
    }
    assert nothing[:4] == ("no data", "", "", "+1.00 µs")


def test_show_leaves_out_what_was_not_measured_and_says_so(capsys):
    report.show(made_up_result("psum", "torch_symm_mem"))
    printed = capsys.readouterr().out
    assert "vs psum" not in printed and "vs all_gather" in printed
    assert "left out: psum: not there" in printed
    assert "2 x Some GPU, driver for CUDA 13.0; 2 ranks over cuda-ipc; 61 layers" in printed


def test_measure_without_torch_has_the_jax_variants_and_the_reason(monkeypatch):
    has_gpus(2, monkeypatch)
    of_ranks = made_up_result()
    del of_ranks["command"]
    monkeypatch.setattr(gpu.ranks, "run", lambda *args: (of_ranks, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result, exit_code = gpu.measure(options.Options((73728,), 3), 2)
    assert exit_code == 0 and result["left_out"] == ["torch: not installed"]
    assert result["command"] == (
        "python -m jax_symmkv bench --platform gpu --ranks 2 --sizes 73.728kB --repeats 3"
    )


def test_draw_of_gpus_writes_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from jax_symmkv.cli.bench import plot

    plot.draw(made_up_result("psum"), tmp_path / "bench.png")

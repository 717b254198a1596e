"""The bench's options, sizes, table, JSON and picture, from made-up measurements."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import threading

import numpy as np
import pytest

from jax_symmkv.__main__ import main
from jax_symmkv.cli.bench import case, options, report
from jax_symmkv.cli.bench.placement import Cores
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=5)

FIRST = {"compose": 50.0, "three_calls": 60.0, "psum": 500.0, "all_gather": 400.0, "memcpy": 40.0}


def made_up_result():
    cases = []
    for received, slower in ((0, 0.1), (64_512, 1.0), (1_032_192, 16.5)):
        variants = {
            name: {
                "median_us": us * slower,
                "quartiles_us": [us * slower * 0.9, us * slower * 1.2],
                "samples_us": [us * slower],
            }
            for name, us in FIRST.items()
            if received or name != "memcpy"
        }
        sizes = {"received_nbytes": received, "published_nbytes": received, "page_nbytes": 9216}
        cases.append(sizes | {"pages_published": received // 9216, "variants": variants})
    return {
        "command": "python -m jax_symmkv bench --ranks 2",
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.9", "jax": "0.10.2"},
        "cpu_model": "Some CPU",
        "cores": 2,
        "ranks": 2,
        "transport": "shm",
        "placement": "each bound to a core",
        "repeats": 1,
        "cases": cases,
    }


def test_table_row_compares_with_compose():
    row = dict(zip(report.COLUMNS, report.table_row(made_up_result()["cases"][1]), strict=True))
    assert row == {
        "received": "64.5 kB",
        "pages": "7 x 9.22 kB",
        "compose µs": "50.0",
        "3 calls µs": "60.0",
        "psum µs": "500",
        "all_gather µs": "400",
        "memcpy µs": "40.0",
        "compose GB/s": "1.29",
        "vs psum": "10.0x",
        "vs all_gather": "8.0x",
        "of memcpy": "80%",
    }


def test_table_row_without_data_has_no_bytes_to_compare():
    row = dict(zip(report.COLUMNS, report.table_row(made_up_result()["cases"][0]), strict=True))
    assert row["received"] == "no data" and row["compose µs"] == "5.0"
    assert {row[name] for name in ("pages", "memcpy µs", "compose GB/s", "of memcpy")} == {""}


@pytest.mark.parametrize("at_terminal", [True, False])
def test_show_cuts_no_column(at_terminal, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")  # fewer than the table has
    monkeypatch.setattr(sys.stdout, "isatty", lambda: at_terminal)
    report.show(made_up_result())
    printed = capsys.readouterr().out
    assert all(column in printed for column in report.COLUMNS)
    assert "$ python -m jax_symmkv bench --ranks 2" in printed
    assert "Some CPU, 2 cores; 2 ranks over shm, each bound to a core" in printed
    assert "1.03 MB" in printed and "…" not in printed


def test_to_json_gives_the_result_back_with_samples_on_one_line():
    result = made_up_result()
    text = report.to_json(result)
    assert json.loads(text) == result
    assert re.search(r'"quartiles_us": \[45.0, 60.0\]', text)


@pytest.mark.parametrize("nbytes", [1, 999, 64_000, 64_512, 1_500_000, 2_500_000_000])
def test_format_size_is_read_back_exactly(nbytes):
    assert options.parse_size(options.format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("cp_size", "nbytes", "page_nbytes", "pages"),
    [
        (2, 64_000, 9_216, 7),
        (2, 1_000_000, 73_728, 14),
        (2, 64_000_000, 73_728, 868),
        (4, 1_000_000, 73_728, 5),
        (2, 1, 1_152, 1),
        (2, 0, 1_152, 0),
    ],
)
def test_make_case_is_whole_pages_near_the_size(cp_size, nbytes, page_nbytes, pages):
    made = case.make_case(nbytes, cp_size)
    assert (made.page_nbytes, made.pages_per_rank) == (page_nbytes, pages)
    assert made.received_nbytes == (cp_size - 1) * pages * page_nbytes
    plan = made.plan(made.num_slots)
    assert plan.num_current[0] == cp_size * pages
    # Every rank publishes equally much, or the ranks' times would be of different work.
    assert np.bincount(plan.current_writer[: plan.num_current[0]], minlength=cp_size).tolist() == (
        [pages] * cp_size
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks=1"], "--ranks must be at least 2, got 1"),
        (["--repeats=0"], "--repeats must be at least 1, got 0"),
        (["--sizes", "1MiB"], "got '1MiB'"),
        (["--sizes", "0kB"], "at least 1B, got '0kB'"),
        (["--json=nowhere/result.json"], "no directory 'nowhere'"),
        (["--plot=nowhere/result.png"], "no directory 'nowhere'"),
    ],
)
def test_bench_bad_argument_is_said_in_one_line(argv, message, capfd):
    assert main(["bench", *argv]) == 2
    said = capfd.readouterr().err
    assert said.startswith("bench: ") and message in said and said.count("\n") == 1


def test_bench_plot_without_matplotlib_is_refused_before_measuring(monkeypatch, capfd):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--plot=bench.png"]) == 2
    assert "pip install 'jax_symmkv[cli]'" in capfd.readouterr().err


def test_draw_writes_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from jax_symmkv.cli.bench import plot

    plot.draw(made_up_result(), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_cores_bind_every_thread_and_give_all_cores_back():
    allowed = os.sched_getaffinity(0)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        cores = Cores(0, num_ranks=1)
        with cores.restored():
            cores.bind(True)
            assert os.sched_getaffinity(thread.native_id) == {min(allowed)}
        assert os.sched_getaffinity(thread.native_id) == allowed == os.sched_getaffinity(0)
    finally:
        ended.set()
        thread.join()


def test_cores_fewer_than_ranks_are_left_alone():
    allowed = os.sched_getaffinity(0)
    cores = Cores(0, num_ranks=len(allowed) + 1)
    cores.bind(True)
    assert os.sched_getaffinity(0) == allowed
    assert "not bound" in cores.placement

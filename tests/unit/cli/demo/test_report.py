"""What the demo prints."""

from __future__ import annotations

import io

from jax_symmkv.cli.demo import report
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=2)


def table_of(*results):
    out = io.StringIO()
    report.Report(out).table(results, num_layers=4, cp_size=3, page_nbytes=1000)
    return [line.split() for line in out.getvalue().splitlines()]


def test_table_has_a_row_per_size_of_batch_and_one_for_all():
    rows = table_of(
        report.BatchResult(num_tokens=1, num_pages=1, compose_us=10, collective_us=30),
        report.BatchResult(num_tokens=1000, num_pages=16, compose_us=20, collective_us=200),
        report.BatchResult(num_tokens=900, num_pages=9, compose_us=40, collective_us=400),
    )
    assert rows[2] == ["1", "1", "1", "4", "8.0", "kB", "10", "30", "3.0x"]
    assert rows[3] == ["9-16", "2", "1,900", "100", "200.0", "kB", "30", "300", "10.0x"]
    assert rows[5] == ["all", "3", "1,901", "104", "208.0", "kB", "20", "200", "10.0x"]


def test_plain_progress_ends_with_the_total():
    out = io.StringIO()
    with report.Report(out).progress("prefill", 3, "batches") as advance:
        for _ in range(3):
            advance()
    assert out.getvalue() == "prefill: 3/3 batches\n"


def test_report_of_another_rank_prints_nothing(capfd):
    silent = report.Report(None)
    with silent.progress("prefill", 1, "batches") as advance:
        advance()
    silent.line("text")
    assert capfd.readouterr() == ("", "")

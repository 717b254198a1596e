"""The bench's table, and its JSON. The result is what the ranks wrote, and the command."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from jax_symmkv.cli.console import plain_table

COLUMNS = (
    "received",
    "pages",
    "compose µs",
    "3 calls µs",
    "psum µs",
    "all_gather µs",
    "memcpy µs",
    "compose GB/s",
    "vs psum",
    "vs all_gather",
    "of memcpy",
)

_NOTES = (
    "One prompt's pages, an equal share computed by each rank, and one dense buffer, used again and again.",
    "received: bytes that each rank gathers from its peers; pages: what each rank publishes.",
    "µs: per operation, on the slowest rank, median of the samples, the variants taking turns.",
    "psum, all_gather: of the same pages, by XLA over Gloo, without moving them into the dense buffer.",
    "memcpy: as many bytes as are published and gathered, in two pieces, at the same time on every rank.",
    "GB/s: received. of memcpy: compose's speed as a share of memcpy's. The bytes of all were checked first.",
)


def show(result: dict[str, Any]) -> None:
    where = (
        f"{result['cpu_model']}, {result['cores']} cores; {result['ranks']} ranks over "
        f"{result['transport']}, {result['placement']}; {result['repeats']} samples each"
    )
    rows = [table_row(case) for case in result["cases"]]
    show_tables(result, where, [(COLUMNS, *rows)], _NOTES)


def show_tables(
    result: dict[str, Any],
    where: str,
    tables: Sequence[Sequence[tuple[str, ...]]],
    notes: Sequence[str],
) -> None:
    """Prints what was run, where, and the tables, each with the names of its columns as first row."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"$ {result['command']}")
    print(f"{result['date']}; {versions}")
    print(where)
    print()
    for table in tables:
        if sys.stdout.isatty() and importlib.util.find_spec("rich"):
            _print_rich(table)
        else:
            print("\n".join(plain_table(table)))
        print()
    for line in notes:
        print(line)


def table_row(case: dict[str, Any]) -> tuple[str, ...]:
    """Of COLUMNS; "" where there is nothing to compare, as without data."""
    us = {name: variant["median_us"] for name, variant in case["variants"].items()}
    compose_us, memcpy_us = us["compose"], us.get("memcpy")
    received = case["received_nbytes"]
    return (
        format_nbytes(received) if received else "no data",
        f"{case['pages_published']} x {format_nbytes(case['page_nbytes'])}" if received else "",
        *(format_us(us[name]) for name in ("compose", "three_calls", "psum", "all_gather")),
        "" if memcpy_us is None else format_us(memcpy_us),
        f"{received / compose_us / 1e3:.2f}" if received else "",
        f"{us['psum'] / compose_us:.1f}x",
        f"{us['all_gather'] / compose_us:.1f}x",
        "" if memcpy_us is None else f"{memcpy_us / compose_us:.0%}",
    )


def to_json(result: dict[str, Any]) -> str:
    """Indented, with each list of numbers on one line."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def format_nbytes(nbytes: int) -> str:
    """Three digits, in decimal units."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def format_us(us: float) -> str:
    return f"{us:,.0f}" if us >= 99.95 else f"{us:.1f}"


def _print_rich(rows: Sequence[tuple[str, ...]]) -> None:
    """The first row names the columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names, *rest = rows
    for name in names:
        style = "bold green" if name.startswith(("compose", "vs", "of")) else None
        table.add_column(name, justify="right", style=style, no_wrap=True)
    for row in rest:
        table.add_row(*row)
    console = Console()
    # A table that is cut at the edge says nothing; let the terminal wrap it.
    unlimited = console.options.update(width=1000)
    console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(table)

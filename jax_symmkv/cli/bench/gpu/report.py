"""The tables of a bench on GPUs."""

from __future__ import annotations

from typing import Any

from jax_symmkv.cli.bench.report import format_nbytes, format_us, show_tables

# By variant; those that weren't measured have no column.
_TIMES = {
    "copy_engine": "copy engine µs",
    "graph": "bare graph µs",
    "compose": "compose µs",
    "three_calls": "3 calls µs",
    "psum": "psum µs",
    "all_gather": "all_gather µs",
    "torch_all_gather": "torch all_gather µs",
    "torch_all_reduce": "torch all_reduce µs",
    "torch_symm_mem": "torch symm. memory µs",
}
_PEERS = ("psum", "all_gather", "torch_all_gather", "torch_all_reduce", "torch_symm_mem")

_NOTES = (
    "One prompt's pages, an equal share computed by each rank, and one dense buffer, used again and again.",
    "received: bytes that each rank gathers from its peers; pages: what each rank publishes.",
    "µs: per operation, on the slowest rank, median of the samples, the variants taking turns.",
    "compose, 3 calls, psum, all_gather: in jitted programs of unrolled layers, one after the other.",
    "copy engine, bare graph, torch: in replayed CUDA graphs. bare graph: compose's kernel without XLA.",
    "copy engine: one copy of the bytes received, from the peers. torch: NCCL, and its symmetric memory",
    "(barrier, copy to staging, barrier, copies from the peers). psum, all_reduce: of the compact buffer.",
    "The bytes of all were checked first.",
)


def show(result: dict[str, Any]) -> None:
    where = (
        f"{result['gpus']} x {result['device_kind']}, driver for CUDA {result['driver_cuda']}; "
        f"{result['ranks']} ranks over {result['transport']}; {result['layers']} layers, "
        f"{result['repeats']} samples each"
    )
    left_out = [f"left out: {what}" for what in result["left_out"]]
    show_tables(result, where, [times(result), ratios(result)], [*_NOTES, *left_out])


def times(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The first row names the columns; "" for what a size lacks, as the copy where there is no data."""
    names = _measured(result)
    rows = [("received", "pages", *(_TIMES[name] for name in names))]
    for case in result["cases"]:
        us = _medians_us(case)
        pages = f"{case['pages_published']} x {format_nbytes(case['page_nbytes'])}"
        rows.append(
            (
                _received(case),
                pages if case["received_nbytes"] else "",
                *(format_us(us[name]) if name in us else "" for name in names),
            )
        )
    return rows


def ratios(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """compose against each of the others; the first row names the columns."""
    peers = [name for name in _PEERS if name in _measured(result)]
    against = [f"vs {_TIMES[name].removesuffix(' µs')}" for name in peers]
    rows = [("received", "compose GB/s", "of copy engine", "in jit over graph", *against)]
    for case in result["cases"]:
        us, received = _medians_us(case), case["received_nbytes"]
        compose_us = us["compose"]
        rows.append(
            (
                _received(case),
                f"{received / compose_us / 1e3:.1f}" if received else "",
                f"{us['copy_engine'] / compose_us:.0%}" if received else "",
                f"{compose_us - us['graph']:+.2f} µs",
                *(f"{us[name] / compose_us:.2f}x" for name in peers),
            )
        )
    return rows


def _measured(result: dict[str, Any]) -> list[str]:
    """Names of the variants, in the order of the columns."""
    measured = result["cases"][-1]["variants"]
    return [name for name in _TIMES if name in measured]


def _medians_us(case: dict[str, Any]) -> dict[str, float]:
    return {name: variant["median_us"] for name, variant in case["variants"].items()}


def _received(case: dict[str, Any]) -> str:
    return format_nbytes(case["received_nbytes"]) if case["received_nbytes"] else "no data"

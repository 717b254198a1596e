"""The bench's picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # no display needed; before pyplot

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from jax_symmkv.cli.bench.report import format_nbytes

# name: label, color, line width
_Looks = dict[str, tuple[str, str, float]]
_LOOKS: _Looks = {
    "psum": ("XLA psum ({library})", "#c8553d", 1.8),
    "all_gather": ("XLA all_gather ({library})", "#e09f3e", 1.8),
    "torch_all_reduce": ("torch all_reduce", "#8f2d56", 1.8),
    "torch_all_gather": ("torch all_gather", "#b5838d", 1.8),
    "torch_symm_mem": ("torch symmetric memory", "#5f8a4e", 1.8),
    "three_calls": ("publish, barrier, gather", "#7ba7bc", 1.8),
    "compose": ("compose", "#1d4e89", 2.8),
    "memcpy": ("memcpy of the same bytes", "#8a8a8a", 1.5),
    "copy_engine": ("copy engine, the same bytes", "#8a8a8a", 1.5),
}
_COMPARED = ("psum", "all_gather", "torch_all_gather", "memcpy", "copy_engine")
# What no exchange can beat.
_BOUNDS = ("memcpy", "copy_engine")


def draw(result: dict[str, Any], path: Path) -> None:
    """Times on the left, with their quartiles; on the right how many times as fast compose is."""
    cases = [case for case in result["cases"] if case["received_nbytes"]]
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (times, ratios) = plt.subplots(
            1, 2, figsize=(12.5, 5.2), width_ratios=(1.25, 1), layout="constrained"
        )
        looks = _looks(result)
        _draw_times(times, cases, looks)
        _draw_ratios(ratios, cases, looks)
        figure.suptitle(
            f"One exchange of KV pages: {result['ranks']} ranks on {_machine(result)}, "
            f"jax {result['versions']['jax']}",
            fontsize=12,
        )
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _looks(result: dict[str, Any]) -> _Looks:
    """Of what was measured."""
    library = "NCCL" if result.get("platform") == "gpu" else "Gloo"
    measured = result["cases"][-1]["variants"]
    return {
        name: (label.format(library=library), color, width)
        for name, (label, color, width) in _LOOKS.items()
        if name in measured
    }


def _machine(result: dict[str, Any]) -> str:
    if result.get("platform") == "gpu":
        return f"{result['gpus']} x {result['device_kind']}"
    return f"{result['cores']} cores of {result['cpu_model']}"


def _draw_times(axes: Axes, cases: list[dict[str, Any]], looks: _Looks) -> None:
    nbytes = [case["received_nbytes"] for case in cases]
    for name, (label, color, width) in looks.items():
        runs = [case["variants"][name] for case in cases]
        low, high = zip(*(run["quartiles_us"] for run in runs), strict=True)
        style = "--" if name in _BOUNDS else "-"
        axes.fill_between(nbytes, low, high, color=color, alpha=0.18, linewidth=0)
        axes.plot(
            nbytes,
            [run["median_us"] for run in runs],
            style,
            color=color,
            linewidth=width,
            marker="o",
            markersize=4.5,
            label=label,
        )
    _size_axis(axes, nbytes)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: _duration(us)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("time per exchange (median, quartiles shaded)", fontsize=10, loc="left")
    axes.legend(frameon=False, loc="upper left")


def _draw_ratios(axes: Axes, cases: list[dict[str, Any]], looks: _Looks) -> None:
    nbytes = [case["received_nbytes"] for case in cases]
    for name in (name for name in _COMPARED if name in looks):
        label, color, width = looks[name]
        values = [
            case["variants"][name]["median_us"] / case["variants"]["compose"]["median_us"]
            for case in cases
        ]
        style = "--" if name in _BOUNDS else "-"
        axes.plot(nbytes, values, style, color=color, linewidth=width, marker="o", markersize=4.5)
        for x, value in zip(nbytes, values, strict=True):
            text = f"{value:.0%}" if name in _BOUNDS else f"{value:.1f}x"
            axes.annotate(
                text,
                (x, value),
                # psum and all_gather come close to each other: one's numbers above, the other's below.
                (0, -15 if name == "all_gather" else 8),
                textcoords="offset points",
                ha="center",
                color=color,
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )
        axes.annotate(
            label,
            (nbytes[-1], values[-1]),
            (14, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=9,
        )
    axes.axhline(1, color="#444444", linewidth=0.8)
    _size_axis(axes, nbytes)
    axes.margins(x=0.08)
    axes.set_yscale("log")
    axes.set_ylim(top=2 * axes.get_ylim()[1])  # room for the highest number
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}x"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("compose's speed, relative to", fontsize=10, loc="left")


def _size_axis(axes: Axes, nbytes: list[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(nbytes, [format_nbytes(n) for n in nbytes])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xlabel("received by each rank")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)


def _duration(us: float) -> str:
    return f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} µs"

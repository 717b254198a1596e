"""`python -m jax_symmkv bench`: the exchange against XLA's collectives and a plain memcpy."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from jax_symmkv.cli.bench import gpu, options, platforms, ranks, report
from jax_symmkv.cli.launch import EXIT_BAD_INPUT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times compose, the three calls it is made of, XLA's psum and all_gather of the same pages, and a "
        "memcpy of the same bytes as the bound, on the CPUs of this machine; in one run, the variants in "
        "turn. Every variant's bytes are checked first; exits with 1 if one is wrong. On GPUs the bound "
        "is a copy engine, and torch's NCCL and symmetric memory are timed where torch is installed."
    )
    parser.add_argument(
        "--platform",
        choices=options.PLATFORMS,
        help="where to measure (default: gpu where there are GPUs and the CUDA transport, else cpu)",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes that exchange (default: 2)"
    )
    options.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all samples to this file")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a PNG; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    try:
        _check(args)
        platform = platforms.choose(args.platform)
        job = options.parse(args, platform)
        measure = gpu.measure if platform == "gpu" else _measure
        result, exit_code = measure(job, args.ranks)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if exit_code:
        return exit_code
    (gpu.show if platform == "gpu" else report.show)(result)
    if args.json is not None:
        args.json.write_text(report.to_json(result))
    if args.plot is not None:
        from jax_symmkv.cli.bench import plot  # matplotlib is an extra

        plot.draw(result, args.plot)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What would otherwise fail after minutes of measuring."""
    if args.ranks < 2:
        raise ValueError(
            f"--ranks must be at least 2, got {args.ranks}; one rank exchanges nothing"
        )
    for name, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{name} {path}: no directory {str(path.parent)!r}; create it first")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install 'jax_symmkv[cli]', or leave it out")


def _measure(job: options.Options, num_ranks: int) -> tuple[dict[str, Any], int]:
    result, exit_code = ranks.run(
        "jax_symmkv.cli.bench.rank", job, num_ranks, {"JAX_PLATFORMS": "cpu"}
    )
    return {"command": options.shown_command(num_ranks, job), **result}, exit_code

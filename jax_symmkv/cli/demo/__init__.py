"""`python -m jax_symmkv demo`: real requests as context-parallel prefill, verified."""

from __future__ import annotations

import argparse
import sys

from jax_symmkv.cli.demo import options
from jax_symmkv.cli.launch import EXIT_BAD_INPUT, run_ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Replays the requests of a trace as context-parallel prefill on this machine's CPUs: a small "
        "decoder with random weights runs under jit, with one compose in every layer. Times the exchange "
        "against XLA's collectives, and verifies every byte and every output; exits with 1 on any "
        "difference. Every prompt is prefilled from its start; one longer than the token budget is cut "
        "to it."
    )
    parser.epilog = (
        "The default takes about a minute on 2 cores and 0.5 GB a rank. A larger run: time grows with "
        "--requests and with the square of the prompts' lengths, which --token-budget bounds; memory by "
        "about 1 kB a layer for each token of the budget. Each run ends with an estimate for a larger one."
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        metavar="N",
        help="processes that share a prompt (default: 2)",
    )
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        job = options.parse(args)
        if args.ranks < 1:
            raise ValueError(f"--ranks must be at least 1, got {args.ranks}")
        options.read_job(job)  # a bad trace is said once, not by every rank
        result = run_ranks(
            ["-m", "jax_symmkv.cli.demo.rank", *job.argv()],
            args.ranks,
            devices_per_rank=1,
            env={"JAX_PLATFORMS": "cpu"},
            prefix=False,
        )
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return result.exit_code

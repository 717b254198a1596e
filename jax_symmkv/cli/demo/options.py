"""The demo's arguments, shared by the parent and its ranks."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from jax_symmkv.cli.demo import trace

MAX_BATCH_REQUESTS = 8


@dataclasses.dataclass(frozen=True)
class Options:
    """The job, the same on every rank."""

    num_requests: int
    num_layers: int
    page_size: int
    token_budget: int
    trace: pathlib.Path

    def argv(self) -> list[str]:
        """The arguments that give these options again."""
        return [
            f"--requests={self.num_requests}",
            f"--layers={self.num_layers}",
            f"--page-size={self.page_size}",
            f"--token-budget={self.token_budget}",
            f"--trace={self.trace}",
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=int, default=32, metavar="N", help="the trace's first N (default: 32)"
    )
    parser.add_argument(
        "--layers", type=int, default=4, metavar="N", help="layers of the decoder (default: 4)"
    )
    parser.add_argument(
        "--page-size", type=int, default=64, metavar="TOKENS", help="tokens of a page (default: 64)"
    )
    parser.add_argument(
        "--token-budget",
        type=int,
        default=2048,
        metavar="TOKENS",
        help="most tokens of a batch; a longer prompt is cut to it (default: 2048)",
    )
    parser.add_argument(
        "--trace",
        type=pathlib.Path,
        default=trace.EXCERPT,
        metavar="PATH",
        help="requests in Mooncake's format, a JSON object a line with input_length and hash_ids "
        "(default: an excerpt of 64 that comes with the package)",
    )


def parse(args: argparse.Namespace) -> Options:
    """Checks what can be checked before any rank starts.

    Raises:
      ValueError: with the option, what it requires and what it got.
    """
    for option, value in (
        ("--requests", args.requests),
        ("--layers", args.layers),
        ("--page-size", args.page_size),
        ("--token-budget", args.token_budget),
    ):
        if value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")
    return Options(
        num_requests=args.requests,
        num_layers=args.layers,
        page_size=args.page_size,
        token_budget=args.token_budget,
        trace=args.trace,
    )


def read_job(options: Options) -> tuple[list[trace.Request], list[trace.Batch]]:
    """The requests and their batches; the same on every rank."""
    requests = trace.read_trace(options.trace, options.num_requests)
    batches = trace.make_batches(
        requests, token_budget=options.token_budget, max_requests=MAX_BATCH_REQUESTS
    )
    return requests, batches

"""What one rank of the bench runs: `python -m jax_symmkv.cli.bench.rank OPTIONS`, by the launcher."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_symmkv as symmkv
from jax_symmkv.cli.bench import environment, options, record
from jax_symmkv.cli.bench.case import Case, make_case
from jax_symmkv.cli.bench.measure import Meet, measure
from jax_symmkv.cli.bench.placement import Cores
from jax_symmkv.cli.bench.programs import Compose, Variant, make_variants
from jax_symmkv.cli.bench.report import format_nbytes
from jax_symmkv.cli.collect import from_every_process, make_meeting
from jax_symmkv.cli.console import Console, claim_stdout


def main(argv: Sequence[str], compose: Compose = symmkv.compose) -> int:
    """Measures on this rank; every rank returns the same exit code. Rank 0 writes the result.

    Args:
      compose: what the programs call for `symmkv.compose`; tests pass a wrong one.
    """
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    parser.add_argument("--result", type=Path, required=True, help="JSON, written by rank 0")
    args = parser.parse_args(argv)
    job = options.parse(args, "cpu")
    claim_stdout()
    progress = Console(sys.stderr if jax.process_index() == 0 else None)
    mesh = Mesh(np.array(jax.devices()), ("cp",))
    cases = [make_case(nbytes, mesh.size) for nbytes in (0, *job.sizes_nbytes)]
    cores = Cores(jax.process_index(), mesh.size)
    result = environment.describe() | {"placement": cores.placement}
    result |= {"ranks": mesh.size, "repeats": job.repeats}
    records: list[dict[str, Any]] = []
    with progress.progress("measuring", len(cases), "sizes") as advance:
        for case in cases:
            transport, measured, wrong = _run_case(case, mesh, compose, job.repeats, cores)
            if wrong:
                size = format_nbytes(case.received_nbytes)
                progress.line(f"FAILED: wrong bytes from {', '.join(wrong)}, {size} a rank")
                return 1
            result["transport"] = transport
            records.append(measured)
            advance()
    if jax.process_index() == 0:
        args.result.write_text(json.dumps(result | {"cases": records}))
    return 0


def _run_case(
    case: Case, mesh: Mesh, compose: Compose, repeats: int, cores: Cores
) -> tuple[str, dict[str, Any], list[str]]:
    """The transport, the record of the case, and the names of the variants that gave wrong bytes."""
    meet = make_meeting(mesh)
    with symmkv.SymmetricHeap(mesh, "cp", page=case.page, max_current_pages=case.num_slots) as heap:
        variants = list(make_variants(case, heap, compose))
        wrong = _wrong(variants, meet)
        if wrong:
            return heap.transport, {}, wrong
        times_us = measure(variants, repeats, meet, cores)
        heap.check()
        meet()  # a rank that closes early is an error to the others
        names = [variant.name for variant in variants]
        return heap.transport, record.record(case, names, times_us), []


def _wrong(variants: Sequence[Variant], meet: Meet) -> list[str]:
    """Runs each variant once, which compiles it; the names of those with a wrong byte on any rank."""
    wrong = np.zeros(len(variants), np.float32)
    for i, variant in enumerate(variants):
        meet()
        variant.run(1)
        wrong[i] = not variant.is_right()
    on_any = from_every_process(wrong).max(axis=0)
    return [variant.name for variant, bad in zip(variants, on_any, strict=True) if bad]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

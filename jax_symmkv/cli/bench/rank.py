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
import numpy.typing as npt
from jax.sharding import Mesh

import jax_symmkv as symmkv
from jax_symmkv.cli.bench import environment, options
from jax_symmkv.cli.bench.case import Case, make_case
from jax_symmkv.cli.bench.measure import Meet, measure
from jax_symmkv.cli.bench.programs import Compose, Variant, make_variants
from jax_symmkv.cli.demo.collect import from_every_process, make_meeting


def main(argv: Sequence[str], compose: Compose = symmkv.compose) -> int:
    """Measures on this rank; every rank returns the same exit code. Rank 0 writes the result.

    Args:
      compose: what the programs call for `symmkv.compose`; tests pass a wrong one.
    """
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    parser.add_argument("--result", type=Path, required=True, help="JSON, written by rank 0")
    args = parser.parse_args(argv)
    job = options.parse(args)
    mesh = Mesh(np.array(jax.devices()), ("cp",))
    meet = make_meeting(mesh)
    result: dict[str, Any] = environment.describe()
    result |= {"ranks": mesh.size, "repeats": job.repeats, "cases": []}
    for nbytes in (0, *job.sizes_nbytes):
        case = make_case(nbytes, mesh.size)
        _say(f"{options.format_size(case.received_nbytes)} a rank")
        with symmkv.SymmetricHeap(
            mesh, "cp", page=case.page, max_current_pages=case.num_slots
        ) as heap:
            result["transport"] = heap.transport
            variants = list(make_variants(case, heap, compose))
            wrong = _wrong(variants, meet)
            if wrong:
                _say(f"FAILED: wrong bytes from {', '.join(wrong)}")
                return 1
            times_us = measure(variants, job.repeats, meet)
            heap.check()
            meet()  # before a rank closes
        result["cases"].append(_record(case, variants, times_us))
    if jax.process_index() == 0:
        args.result.write_text(json.dumps(result))
    return 0


def _wrong(variants: Sequence[Variant], meet: Meet) -> list[str]:
    """Runs each variant once, which compiles it; the names of those with a wrong byte on any rank."""
    wrong = np.zeros(len(variants), np.float32)
    for i, variant in enumerate(variants):
        meet()
        variant.run(1)
        wrong[i] = not variant.is_right()
    on_any = from_every_process(wrong).max(axis=0)
    return [variant.name for variant, bad in zip(variants, on_any, strict=True) if bad]


def _record(
    case: Case, variants: Sequence[Variant], times_us: npt.NDArray[np.float64]
) -> dict[str, Any]:
    return {
        "received_nbytes": case.received_nbytes,
        "published_nbytes": case.published_nbytes,
        "page_nbytes": case.page_nbytes if case.num_pages else 0,
        "pages_published": case.pages_per_rank,
        "variants": {
            variant.name: _statistics(times_us[:, i]) for i, variant in enumerate(variants)
        },
    }


def _statistics(samples_us: npt.NDArray[np.float64]) -> dict[str, Any]:
    low, median, high = np.percentile(samples_us, (25, 50, 75))
    return {
        "median_us": round(float(median), 3),
        "quartiles_us": [round(float(low), 3), round(float(high), 3)],
        "min_us": round(float(samples_us.min()), 3),
        "max_us": round(float(samples_us.max()), 3),
        "samples_us": [round(float(sample), 3) for sample in samples_us],
    }


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What one JAX rank of the bench runs on its GPU: `python -m jax_symmkv.cli.bench.gpu.rank OPTIONS`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_symmkv as symmkv
from jax_symmkv.cli.bench import environment, operands, options, programs
from jax_symmkv.cli.bench.case import Case
from jax_symmkv.cli.bench.gpu import cases, driver
from jax_symmkv.cli.bench.gpu.graphs import CopyEngine, ExchangeGraph
from jax_symmkv.cli.bench.gpu.peers import Peers
from jax_symmkv.cli.bench.gpu.programs import make_collective, make_exchange
from jax_symmkv.cli.bench.gpu.variant import Variant, measure, wrong
from jax_symmkv.cli.bench.record import record
from jax_symmkv.cli.bench.report import format_nbytes
from jax_symmkv.cli.console import Console, claim_stdout
from jax_symmkv.rendezvous import Rendezvous


def main(argv: Sequence[str]) -> int:
    """Measures on this rank; every rank returns the same exit code. Rank 0 writes the result."""
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    parser.add_argument("--result", type=Path, required=True, help="JSON, written by rank 0")
    args = parser.parse_args(argv)
    job = options.parse(args, "gpu")
    claim_stdout()
    mesh = Mesh(np.array(jax.devices()), ("cp",))
    with Rendezvous("bench", list(range(mesh.size))) as rendezvous:
        result = _measure(job, mesh, Peers(rendezvous))
    if result is None:
        return 1
    if jax.process_index() == 0:
        args.result.write_text(json.dumps(result))
    return 0


def _measure(job: options.Options, mesh: Mesh, peers: Peers) -> dict[str, Any] | None:
    """The result; None, said on stderr, if bytes were wrong."""
    (device,) = mesh.local_devices
    gpu = device.local_hardware_id
    driver.make_current(gpu)
    num_gpus = peers.count_distinct(driver.uuid(gpu))
    shared = num_gpus < mesh.size
    layers = cases.SHARED_LAYERS if shared else cases.LAYERS
    result = environment.describe() | {
        "platform": "gpu",
        "device_kind": device.device_kind,
        "driver_cuda": driver.cuda_version(),
        "gpus": num_gpus,
        "ranks": mesh.size,
        "layers": layers,
        "repeats": job.repeats,
    }
    left_out = ["psum, all_gather: NCCL takes no two ranks of one GPU"] if shared else []
    progress = Console(sys.stderr if jax.process_index() == 0 else None)
    records = []
    todo = cases.make_cases(job, mesh.size)
    with progress.progress("measuring", len(todo), "sizes") as advance:
        for case in todo:
            heap = symmkv.SymmetricHeap(
                mesh,
                "cp",
                page=case.page,
                max_current_pages=case.num_slots,
                transport="cuda-ipc",
            )
            with heap:
                variants = list(_variants(case, heap, layers, collectives=not shared))
                if names := wrong(variants, peers):
                    size = format_nbytes(case.received_nbytes)
                    progress.line(f"FAILED: wrong bytes from {', '.join(names)}, {size} a rank")
                    return None
                times_us = measure(variants, job.repeats, peers)
                heap.check()
                peers.meet()  # a rank that closes early is an error to the others
            records.append(record(case, [variant.name for variant in variants], times_us))
            advance()
    versions = {**result["versions"], **_nccl_version()}
    return {
        **result,
        "versions": versions,
        "transport": heap.transport,
        "left_out": left_out,
        "cases": records,
    }


def _variants(
    case: Case, heap: symmkv.SymmetricHeap, layers: int, *, collectives: bool
) -> Iterator[Variant]:
    rank = operands.rank_of(heap.mesh)
    yield make_exchange("compose", symmkv.compose, case, heap, layers)
    yield make_exchange("three_calls", programs.three_calls, case, heap, layers)
    yield ExchangeGraph(case, heap, layers)
    if case.num_pages:
        yield CopyEngine(case, heap, layers)
    if collectives:
        psum, all_gather = operands.compact(case, rank), operands.published(case, rank)
        yield make_collective("psum", programs.psum, *psum, heap, layers)
        yield make_collective("all_gather", programs.all_gather, *all_gather, heap, layers)


def _nccl_version() -> dict[str, str]:
    """XLA's NCCL, where it comes as a package."""
    for cuda in ("cu13", "cu12"):
        try:
            return {"nccl": importlib.metadata.version(f"nvidia-nccl-{cuda}")}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What one rank of the demo runs: `python -m jax_symmkv.cli.demo.rank OPTIONS`, by the launcher."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_symmkv as symmkv
from jax_symmkv.cli import collect
from jax_symmkv.cli.console import claim_stdout
from jax_symmkv.cli.demo import estimate, model, options, report, timing, trace, verify
from jax_symmkv.cli.demo.geometry import Geometry
from jax_symmkv.cli.demo.replay import Replay


def main(argv: Sequence[str], compose: Callable[..., Any] = symmkv.compose) -> int:
    """Runs the job on this rank; every rank returns the same exit code.

    Args:
      compose: what the programs call for `symmkv.compose`; tests pass a wrong one.
    """
    out = claim_stdout()
    rank_report = report.Report(out if jax.process_index() == 0 else None)
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    job = options.parse(parser.parse_args(argv))
    # Some devices multiply float32 with fewer bits by default; the outputs are compared.
    jax.config.update("jax_default_matmul_precision", "float32")
    mesh = Mesh(np.array(jax.devices()), ("cp",))
    config = model.ModelConfig(num_layers=job.num_layers)
    geometry = Geometry(mesh.size, job.page_size, job.token_budget, options.MAX_BATCH_REQUESTS)
    requests, batches = options.read_job(job)
    page = config.page_struct(job.page_size)
    cap = geometry.current_page_cap
    with symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=cap) as heap:
        rank_report.line(_heading(job, heap, requests, batches))
        if heap.transport == "collective":
            rank_report.line("note: without a mapped transport, compose IS the collective path")
        start = time.perf_counter()
        replay = Replay(heap, config, geometry, compose)
        replay.warm_up(batches[0], requests)
        rank_report.line(f"compiled in {time.perf_counter() - start:.0f} s")
        start = time.perf_counter()
        run = _replay_all(replay, requests, batches, rank_report)
        heap.check()
        job_s = time.perf_counter() - start

    sizes = {"num_layers": config.num_layers, "cp_size": geometry.cp_size}
    rank_report.line()
    rank_report.table(run.results, page_nbytes=geometry.page_nbytes(config), **sizes)
    rank_report.line()
    rank_report.line(_summary(run, job_s))
    rank_report.line(estimate.larger_run(requests, geometry, config, job_s))
    rank_report.line()
    rank_report.verdict(run.verdict, num_batches=len(batches), **sizes)
    return 0 if run.verdict.ok else 1


@dataclasses.dataclass(frozen=True)
class _Run:
    """What all ranks found together; prefill_s is the sum over the batches, on each's slowest rank."""

    results: list[report.BatchResult]
    prefill_s: float
    verdict: verify.Verdict


def _replay_all(
    replay: Replay,
    requests: Sequence[trace.Request],
    batches: Sequence[trace.Batch],
    rank_report: report.Report,
) -> _Run:
    prefill_s, exchange_us = [], []
    with rank_report.progress("prefill, timed and verified", len(batches), "batches") as advance:
        for batch in batches:
            seconds, times_us = replay.run(batch, requests)
            prefill_s.append(seconds)
            exchange_us.append(times_us)
            advance()
    verifier = replay.verifier
    with rank_report.progress("one-rank run", verifier.num_kept, "requests") as advance:
        verifier.check_outputs(advance)
    slowest_s = collect.from_every_process(np.array(prefill_s, np.float32)).max(axis=0)
    slowest_us = timing.slowest_rank_median(collect.from_every_process(np.array(exchange_us)))
    results = [
        report.BatchResult(
            num_tokens=batch.num_tokens,
            num_pages=replay.num_pages(batch),
            compose_us=float(compose_us),
            collective_us=float(collective_us),
        )
        for batch, (compose_us, collective_us) in zip(batches, slowest_us, strict=True)
    ]
    return _Run(results, float(slowest_s.sum()), verifier.verdict())


def _heading(
    job: options.Options,
    heap: symmkv.SymmetricHeap,
    requests: Sequence[trace.Request],
    batches: Sequence[trace.Batch],
) -> str:
    num_cut = sum(request.input_tokens > job.token_budget for request in requests)
    return (
        f"{len(requests)} requests of {job.trace.name} in {len(batches)} batches of at most "
        f"{job.token_budget} tokens ({num_cut} prompts are longer and cut to that); "
        f"{job.num_layers} layers, pages of {job.page_size} tokens, {heap.cp_size} ranks over "
        f"{heap.transport}"
    )


def _summary(run: _Run, job_s: float) -> str:
    num_tokens = sum(result.num_tokens for result in run.results)
    return (
        f"prefill alone: {num_tokens / run.prefill_s:,.0f} tokens/s; with timing and verification "
        f"{estimate.format_duration(job_s)}, {estimate.peak_rank_nbytes() / 1e9:.1f} GB a rank"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What one rank of the demo runs: `python -m jax_symmkv.cli.demo.rank OPTIONS`, by the launcher."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jax_symmkv as symmkv
from jax_symmkv.cli.demo import collect, model, options, report, timing, trace
from jax_symmkv.cli.demo.geometry import Geometry
from jax_symmkv.cli.demo.replay import Replay


def main(argv: Sequence[str], compose: Callable[..., Any] = symmkv.compose) -> int:
    """Runs the job on this rank; every rank returns the same exit code.

    Args:
      compose: what the programs call for `symmkv.compose`; tests pass a wrong one.
    """
    out = report.claim_stdout()
    rank_report = report.Report(out if jax.process_index() == 0 else None)
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    job = options.parse(parser.parse_args(argv))
    # Some devices multiply float32 with fewer bits by default; the outputs are compared.
    jax.config.update("jax_default_matmul_precision", "float32")
    mesh = Mesh(np.array(jax.devices()), ("cp",))
    config = model.ModelConfig(num_layers=job.num_layers)
    geometry = Geometry(mesh.size, job.page_size, job.token_budget, options.MAX_BATCH_REQUESTS)
    with symmkv.SymmetricHeap(
        mesh,
        "cp",
        page=config.page_struct(job.page_size),
        max_current_pages=geometry.current_page_cap,
    ) as heap:
        return _run_job(job, heap, config, geometry, compose, rank_report)


def _run_job(
    job: options.Options,
    heap: symmkv.SymmetricHeap,
    config: model.ModelConfig,
    geometry: Geometry,
    compose: Callable[..., Any],
    rank_report: report.Report,
) -> int:
    requests, batches = options.read_job(job)
    rank_report.line(_heading(job, heap, requests, batches))
    start = time.perf_counter()
    replay = Replay(heap, config, geometry, compose)
    prompts = [
        [
            trace.prompt_tokens(requests[index], num_tokens, config.vocab_size)
            for index, num_tokens in zip(batch.requests, batch.extend_lens, strict=True)
        ]
        for batch in batches
    ]
    replay.warm_up(batches[0], prompts[0])
    rank_report.line(f"compiled in {time.perf_counter() - start:.1f} s")
    prefill_s, exchange_us = [], []
    with rank_report.progress("prefill, timed and verified", len(batches), "batches") as advance:
        for batch, batch_prompts in zip(batches, prompts, strict=True):
            seconds, times_us = replay.run(batch, batch_prompts)
            prefill_s.append(seconds)
            exchange_us.append(times_us)
            advance()
    heap.check()
    verifier = replay.verifier
    with rank_report.progress("one-rank run", verifier.num_kept, "requests") as advance:
        verifier.check_outputs(advance)
    verdict = verifier.verdict()
    slowest_s = collect.from_every_process(np.array(prefill_s, np.float32)).max(axis=0)
    slowest_us = timing.slowest_rank_median(collect.from_every_process(np.array(exchange_us)))
    results = [
        report.BatchResult(batch.num_tokens, _num_pages(batch, job.page_size), *map(float, us))
        for batch, us in zip(batches, slowest_us, strict=True)
    ]
    sizes = {"num_layers": job.num_layers, "cp_size": heap.cp_size}
    rank_report.line()
    rank_report.table(results, page_nbytes=geometry.page_nbytes(config), **sizes)
    rank_report.line()
    rank_report.line(_summary(batches, float(slowest_s.sum()), time.perf_counter() - start))
    rank_report.verdict(verdict, num_batches=len(batches), **sizes)
    return 0 if verdict.ok else 1


def _num_pages(batch: trace.Batch, page_size: int) -> int:
    return sum(-(-num_tokens // page_size) for num_tokens in batch.extend_lens)


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


def _summary(batches: Sequence[trace.Batch], prefill_s: float, wall_s: float) -> str:
    num_tokens = sum(batch.num_tokens for batch in batches)
    rss_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"prefill alone: {num_tokens / prefill_s:,.0f} tokens/s; with timing and verification "
        f"{wall_s:.0f} s, {report.format_nbytes(rss_nbytes)} of memory a rank"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

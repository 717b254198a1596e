"""What one torch rank of the bench runs: `python -m jax_symmkv.cli.bench.gpu.torch_rank OPTIONS`.

The same cases as the JAX ranks, the same number of operations in a graph, the same checks. torch brings
an NCCL of its own, hence the processes of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from jax_symmkv.cli.bench import operands, options
from jax_symmkv.cli.bench.case import Case, Words
from jax_symmkv.cli.bench.gpu import cases
from jax_symmkv.cli.bench.gpu.peers import Peers
from jax_symmkv.cli.bench.gpu.variant import Variant, measure, wrong
from jax_symmkv.cli.bench.record import record
from jax_symmkv.rendezvous import Rendezvous


class TorchGraph(Variant):
    """Operations captured one after the other in a CUDA graph, which is replayed."""

    def __init__(
        self,
        name: str,
        operation: Callable[[], None],
        result: torch.Tensor,
        expected: Words,
    ) -> None:
        self.name, self.layers = name, cases.LAYERS
        self._operation, self._result, self._expected = operation, result, expected
        self._graph = torch.cuda.CUDAGraph()

    def is_right(self, meet: Callable[[], None]) -> bool:
        """Of one operation; the graph is captured after it, since an all-reduce is in place."""
        self._operation()
        torch.cuda.synchronize()
        right = np.array_equal(self._result.cpu().numpy().view(np.uint32), self._expected.ravel())
        with torch.cuda.graph(self._graph):
            for _ in range(self.layers):
                self._operation()
        return right

    def sample_us(self, runs: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph.replay()
        begin.record()
        for _ in range(runs):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / (runs * self.layers)


def main(argv: Sequence[str]) -> int:
    """Measures on this rank. Rank 0 writes the result, or why there is none."""
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    parser.add_argument("--result", type=Path, required=True, help="JSON, written by rank 0")
    args = parser.parse_args(argv)
    job = options.parse(args, "gpu")
    rank, num_ranks = jax.process_index(), jax.process_count()
    with Rendezvous("bench torch", list(range(num_ranks))) as rendezvous:
        result = _measure(
            job, rank, num_ranks, Peers(rendezvous), args.result.with_suffix(".store")
        )
    if rank == 0:
        args.result.write_text(json.dumps(result))
    return 0


def _measure(
    job: options.Options, rank: int, num_ranks: int, peers: Peers, store: Path
) -> dict[str, Any]:
    gpus = torch.cuda.device_count()  # 0 for a torch without CUDA
    if peers.greatest(gpus < num_ranks):
        return {"unusable": f"it sees {gpus} GPUs, {num_ranks} are needed"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=num_ranks, device_id=device
    )
    records = []
    for case in cases.make_cases(job, num_ranks):
        variants = list(make_variants(case, rank, device))
        if names := wrong(variants, peers):
            return {"unusable": f"wrong bytes from {', '.join(names)}"}
        times_us = measure(variants, job.repeats, peers)
        records.append(record(case, [variant.name for variant in variants], times_us))
        del variants  # the graphs go before their communicator
    dist.destroy_process_group()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"versions": {"torch": torch.__version__, "torch_nccl": nccl}, "cases": records}


def make_variants(case: Case, rank: int, device: torch.device) -> Iterator[Variant]:
    """NCCL's collectives, and the peers' memory read by the copy engine between two barriers."""

    def put(words: Words) -> torch.Tensor:
        return torch.from_numpy(words.ravel().view(np.int32)).to(device)

    own, gathered = operands.published(case, rank)
    source = put(own)

    result = put(np.zeros_like(gathered))
    yield TorchGraph(
        "torch_all_gather",
        lambda: dist.all_gather_into_tensor(result, source),
        result,
        gathered,
    )
    compact, total = operands.compact(case, rank)
    reduced = put(compact)
    yield TorchGraph("torch_all_reduce", lambda: dist.all_reduce(reduced), reduced, total)

    composed = put(np.zeros_like(gathered))
    yield TorchGraph(
        "torch_symm_mem", _symmetric_all_gather(case, rank, source, composed), composed, gathered
    )


def _symmetric_all_gather(
    case: Case, rank: int, source: torch.Tensor, result: torch.Tensor
) -> Callable[[], None]:
    """Written to the rank's own staging, read by every peer; pages of its own are where they belong."""
    staging = symmetric_memory.empty(source.numel(), dtype=source.dtype, device=source.device)
    handle = symmetric_memory.rendezvous(staging, dist.group.WORLD)
    parts = result.chunk(case.cp_size)
    parts[rank].copy_(source)
    others = [(rank + i) % case.cp_size for i in range(1, case.cp_size)]
    peers = [(parts[r], handle.get_buffer(r, source.shape, source.dtype)) for r in others]

    def all_gather() -> None:
        handle.barrier(channel=0)  # the peers have read what the last one left here
        staging.copy_(source)
        handle.barrier(channel=0)
        for part, peer in peers:
            part.copy_(peer)

    return all_gather


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

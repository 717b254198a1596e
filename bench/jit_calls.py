"""What a custom call costs in a jitted program, on one GPU: barriers of one rank, which wait for nobody.

    python bench/jit_calls.py [--json PATH]

A row is one way to run it: unrolled or in a loop, with other settings of XLA's command buffers; and the
same kernel in a bare CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.kernels import time_us, write_json
from tests.kernels.streams import Group

# A call costs the difference between two programs: launching a program, some 100 µs, is in both.
FEW, MANY = 61, 244
REPEATS = 60

COMMAND_BUFFERS = {
    "default": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "with WHILE": "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,WHILE",
}


def program_us(shape: str, calls: int) -> float:
    import jax
    import jax.numpy as jnp

    import jax_symmkv as symmkv

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("cp",))
    page = jax.ShapeDtypeStruct((16,), jnp.uint8)
    with symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=1) as heap:

        def body(x: jax.Array) -> jax.Array:
            ticket = symmkv.new_ticket(heap)
            if shape == "unrolled":
                for _ in range(calls):
                    ticket = symmkv.barrier(ticket, heap=heap)
            else:
                ticket = jax.lax.fori_loop(
                    0, calls, lambda _, ticket: symmkv.barrier(ticket, heap=heap), ticket
                )
            return x + ticket

        spec = jax.sharding.PartitionSpec("cp")
        program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
        x = jnp.zeros(1, jnp.int32)
        samples = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            jax.block_until_ready(program(x))
            samples.append(1e6 * (time.perf_counter() - started))
        heap.check()
    return float(np.median(samples[REPEATS // 4 :]))


def jit_row(shape: str, command_buffers: str) -> dict[str, object]:
    """In a process of its own, since XLA reads its flags once."""
    result = subprocess.run(
        [sys.executable, __file__, "--measure", shape],
        env={**os.environ, "XLA_FLAGS": COMMAND_BUFFERS[command_buffers]},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    row: dict[str, object] = {"what": shape, "command_buffers": command_buffers}
    if result.returncode:
        return row | {"failed": result.stderr.strip().splitlines()[-1]}
    return row | {"us": float(result.stdout)}


def graph_row() -> dict[str, object]:
    with Group(1, 1, [16], 1) as group:
        us = time_us(group, lambda _: group.streams[0].barrier(group.contexts[0]), MANY)
        return {"what": "bare CUDA graph", "us": us}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=("unrolled", "fori_loop"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        few_us, many_us = (program_us(args.measure, calls) for calls in (FEW, MANY))
        print((many_us - few_us) / (MANY - FEW))
        return
    rows = [graph_row()]
    rows += [jit_row(s, c) for s in ("unrolled", "fori_loop") for c in COMMAND_BUFFERS]
    for row in rows:
        print(json.dumps(row))
    if args.json is not None:
        write_json(args.json, "python bench/jit_calls.py", rows, repeats=REPEATS)


if __name__ == "__main__":
    main()

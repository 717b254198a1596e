"""The kernels alone, on one GPU: ranks are streams of one process, each timed by a replayed CUDA graph.

    python bench/kernels.py [--json PATH]

No NVLink is involved, so these figures say what launches, waits and local memory cost; the bench of two
GPUs is another.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax_symmkv import build_plan
from tests.kernels.streams import Group, require_gpu

PAGE_NBYTES = 73728  # 64 tokens of 576 bfloat16
NUM_LOCAL_PAGES = 128  # 9.4 MB
CALLS = 100  # in a graph
REPLAYS = 15


def time_us(group: Group, launch: Callable[[int], None], calls: int = CALLS) -> float:
    """µs a call: the slowest rank of a replay, median of the replays."""
    for rank, stream in enumerate(group.streams):
        stream.begin_capture()
        for _ in range(calls):
            launch(rank)
        stream.end_capture()
    samples = []
    for _ in range(REPLAYS):
        for stream in group.streams:
            stream.replay()
        samples.append(max(stream.replay_us() for stream in group.streams) / calls)
    return float(np.median(samples[2:]))


def plan_of(group: Group, num_pages: int):
    return build_plan(
        [0],
        [num_pages],
        page_size=1,
        cp_size=group.cp_size,
        max_current_pages=group.num_slots,
        num_dense_pages=group.num_dense_pages,
    )


def exchanges() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with Group(2, 256, [PAGE_NBYTES], 256) as group:
        us = time_us(group, lambda r: group.streams[r].barrier(group.contexts[r]))
        rows.append({"what": "barrier, 2 ranks", "us": us})
        for num_pages in (0, 2, 8, 32, 128, 256):
            group.write_plan(plan_of(group, num_pages))
            us = time_us(group, lambda r: group.exchange([r]))
            three_us = time_us(group, lambda r: group.three_calls([r]), 20)
            nbytes = num_pages * PAGE_NBYTES // 2
            rows.append({"what": "exchange, 2 ranks", "received_nbytes": nbytes, "us": us})
            rows.append({"what": "three calls, 2 ranks", "received_nbytes": nbytes, "us": three_us})
        for context in group.contexts:
            assert context.poisoned() is None, context.poisoned()
    return rows


def local_copies() -> list[dict[str, object]]:
    """publish and gather of 9.4 MB, and a device-to-device copy of the same bytes, all within the L2 cache.

    publish is what publish and barrier of one rank take, less the barrier: a publish belongs to one
    exchange.
    """
    module = require_gpu()
    nbytes = NUM_LOCAL_PAGES * PAGE_NBYTES
    with Group(1, NUM_LOCAL_PAGES, [PAGE_NBYTES], NUM_LOCAL_PAGES) as group:
        group.write_plan(plan_of(group, NUM_LOCAL_PAGES))
        stream, context, operands = group.streams[0], group.contexts[0], group.operands[0]
        to, source = (module.DeviceArray(nbytes) for _ in range(2))

        def publish_and_barrier(rank: int) -> None:
            stream.publish(context, operands)
            stream.barrier(context)

        copy_us = time_us(group, lambda _: stream.copy(to, source, nbytes))
        barrier_us = time_us(group, lambda _: stream.barrier(context))
        publish_us = time_us(group, publish_and_barrier) - barrier_us
        assert context.poisoned() is None, context.poisoned()
    gather_us = time_gather_us()
    return [
        {"what": "copy", "nbytes": nbytes, "us": copy_us},
        {"what": "publish", "nbytes": nbytes, "us": publish_us, "of_copy": copy_us / publish_us},
        {"what": "gather", "nbytes": nbytes, "us": gather_us, "of_copy": copy_us / gather_us},
    ]


def time_gather_us() -> float:
    """Of pages that are all the other rank's; a gather may be repeated."""
    with Group(2, NUM_LOCAL_PAGES, [PAGE_NBYTES], NUM_LOCAL_PAGES) as group:
        plan = plan_of(group, NUM_LOCAL_PAGES)
        page, fingerprint = np.asarray(plan.current_page), int(plan.fingerprint[0])
        for rank in range(2):
            writers = np.ones(NUM_LOCAL_PAGES, np.int32)
            group.write_plan_arrays(rank, page, writers, NUM_LOCAL_PAGES, fingerprint)
        for rank in range(2):
            group.streams[rank].publish(group.contexts[rank], group.operands[rank])
            group.streams[rank].barrier(group.contexts[rank])
        group.synchronize()
        group.streams = group.streams[:1]
        us = time_us(group, lambda r: group.streams[r].gather(group.contexts[r], group.operands[r]))
        assert group.contexts[0].poisoned() is None, group.contexts[0].poisoned()
        return us


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpu()
    rows = exchanges() + local_copies()
    for row in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    if args.json is not None:
        write_json(args.json, "python bench/kernels.py", rows, replays=REPLAYS)


def write_json(path: Path, command: str, rows: list[dict[str, object]], **settings: object) -> None:
    result = {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        **settings,
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A measurement by ranks that the launcher starts; what it found comes in a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_symmkv.cli.bench.options import Options
from jax_symmkv.cli.launch import run_ranks


def run(
    module: str,
    job: Options,
    num_ranks: int,
    env: Mapping[str, str],
    timeout_s: float | None = None,
) -> tuple[dict[str, Any], int]:
    """What rank 0 wrote, and 0; or nothing, and the exit code of the first rank that failed.

    Args:
      module: run as `python -m module OPTIONS --result PATH` on each rank, which has one device.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "result.json")
        ranks = run_ranks(
            ["-m", module, *job.argv(), "--result", str(path)],
            num_ranks,
            devices_per_rank=1,
            timeout_s=timeout_s,
            env=env,
            prefix=False,
        )
        if ranks.exit_code:
            return {}, ranks.exit_code
        return json.loads(path.read_text()), 0

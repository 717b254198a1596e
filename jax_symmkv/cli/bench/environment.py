"""Where a measurement was made: what a reader needs to judge it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Of this process; JSON types."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("jax", "jaxlib", "jax_symmkv")},
        },
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # built beside the sources: make test-gpu
        return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":  # x86; others have no such line
            return value.strip()
    return platform.machine()

"""Code in an interpreter of its own: what imports, exits and leaves behind."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.run_rank import ROOT


def python(code: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        **kwargs,
    )

"""A case's measurements as JSON types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_symmkv.cli.bench.case import Case


def record(case: Case, names: Sequence[str], times_us: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Of `times_us`, float64 [samples, variants]."""
    return {
        "received_nbytes": case.received_nbytes,
        "published_nbytes": case.published_nbytes,
        "page_nbytes": case.page_nbytes if case.num_pages else 0,
        "pages_published": case.pages_per_rank,
        "variants": {name: _statistics(times_us[:, i]) for i, name in enumerate(names)},
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

"""The README's example runs, as it stands there, and composes what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np

from tests.registry import register_ci
from tests.run_rank import ROOT, run_ranks_of

pytestmark = register_ci(suite="distributed", ranks=2, est_s=6)


def test_readme_example_composes(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "step.py"
    script.write_text(blocks[0])
    run_ranks_of(__file__, "run_example", ranks=2, script=str(script))


def run_example(script: str) -> None:
    names = runpy.run_path(script, run_name="__main__")
    import jax

    plan = names["plan"]
    composed = np.asarray(names["dense"].addressable_shards[0].data, np.float32)
    expected = np.full(composed.shape, jax.process_index(), np.float32)
    num_current = int(plan.num_current[0])
    assert num_current == 47 + 8 and set(plan.current_writer[:num_current]) == {0, 1}
    for page, writer in zip(plan.current_page, plan.current_writer, strict=True):
        if writer >= 0:
            expected[page] = writer
    np.testing.assert_array_equal(composed, expected)
    names["heap"].check()

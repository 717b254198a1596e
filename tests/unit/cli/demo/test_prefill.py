"""The prefill program updates its dense buffers in place."""

from __future__ import annotations

import re

import jax
import numpy as np

import jax_symmkv as symmkv
from jax_symmkv.cli.demo import model, replay, trace
from jax_symmkv.cli.demo.geometry import Geometry
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=8)


def test_prefill_makes_no_copy_of_the_dense_buffer():
    config = model.ModelConfig(num_layers=2, vocab_size=64)
    geometry = Geometry(1, 16, token_budget=512, max_requests=8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("cp",))
    page, cap = config.page_struct(16), geometry.current_page_cap
    with symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=cap) as heap:
        run = replay.Replay(heap, config, geometry, symmkv.compose)
        requests = [trace.Request(500, (0,))]
        (batch,) = trace.make_batches(requests, token_budget=512, max_requests=8)
        compiled = run.compile_prefill(batch, requests).as_text()
    dense = rf"f16\[{geometry.num_dense_pages},16,2,32\]"
    made = re.findall(rf"= {dense}\S* ([\w-]+)\(", compiled)
    assert "scatter" in made  # else the search is wrong
    assert not {"copy", "convert", "bitcast-convert"} & set(made), made
    fusions = re.findall(rf"(%\S+) = {dense}\S* fusion\(", compiled)
    assert all("scatter" in name for name in fusions), fusions

"""One batch after the other: prefilled against the clock, its exchange timed alone, then verified."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from jax_symmkv.cli import collect
from jax_symmkv.cli.demo import model, prefill, timing, trace, verify
from jax_symmkv.cli.demo.geometry import Geometry
from jax_symmkv.cli.demo.inputs import BatchInputs, make_inputs
from jax_symmkv.cli.demo.prefill import Dense

_SEED = 0


class Replay:
    """Runs batches: timed, then the exchange alone, then verified; each phase in programs of its own."""

    def __init__(
        self,
        heap: symmkv.SymmetricHeap,
        config: model.ModelConfig,
        geometry: Geometry,
        compose: Callable[..., Any],
    ) -> None:
        mesh = heap.mesh
        bound = functools.partial(compose, heap=heap)
        params = model.init_params(config, _SEED)
        self._heap, self._config, self._geometry = heap, config, geometry
        self._params = jax.device_put(params, NamedSharding(mesh, P()))
        self._prefill: Any = prefill.make_prefill(mesh, config, bound, record=False)
        self._recorded_prefill = prefill.make_prefill(mesh, config, bound, record=True)
        self._timer = timing.ExchangeTimer(mesh, bound)
        self._meet = collect.make_meeting(mesh)
        self.verifier = verify.Verifier(mesh, config, params)
        self._dense = _zeros(mesh, config, geometry)
        self._ticket: jax.Array = jax.jit(
            jax.shard_map(
                lambda: symmkv.new_ticket(heap), mesh=mesh, in_specs=(), out_specs=P("cp")
            )
        )()

    def warm_up(self, batch: trace.Batch, requests: Sequence[trace.Request]) -> None:
        """Compiles the programs and runs them once, untimed."""
        inputs = self._inputs(batch, self._prompts(batch, requests))
        self._timed_prefill(inputs)
        self._time_exchange(inputs)
        self._record(inputs)

    def run(
        self, batch: trace.Batch, requests: Sequence[trace.Request]
    ) -> tuple[float, npt.NDArray[np.float32]]:
        """Prefills, times and verifies one batch.

        Returns:
          seconds of the prefill, and µs of its exchange as ExchangeTimer has it, both on this rank.
        """
        prompts = self._prompts(batch, requests)
        inputs = self._inputs(batch, prompts)
        logits, prefill_s = self._timed_prefill(inputs)
        times_us = self._time_exchange(inputs)
        self.verifier.check_dense(*self._record(inputs), inputs.plan)
        self.verifier.keep_outputs(batch, prompts, logits)
        return prefill_s, times_us

    def compile_prefill(self, batch: trace.Batch, requests: Sequence[trace.Request]) -> Any:
        """The timed prefill as a compiled program, for a look at its HLO; nothing runs."""
        inputs = self._inputs(batch, self._prompts(batch, requests))
        return self._prefill.lower(self._params, self._dense, *inputs, self._ticket).compile()

    def num_pages(self, batch: trace.Batch) -> int:
        """Current pages of a batch."""
        page_size = self._geometry.page_size
        return sum(-(-num_tokens // page_size) for num_tokens in batch.extend_lens)

    def _prompts(
        self, batch: trace.Batch, requests: Sequence[trace.Request]
    ) -> list[npt.NDArray[np.int32]]:
        return [
            trace.prompt_tokens(requests[index], num_tokens, self._config.vocab_size)
            for index, num_tokens in zip(batch.requests, batch.extend_lens, strict=True)
        ]

    def _inputs(self, batch: trace.Batch, prompts: Sequence[npt.NDArray[np.int32]]) -> BatchInputs:
        heap = self._heap
        return make_inputs(batch, prompts, self._geometry, heap.mesh, heap.max_current_pages)

    def _timed_prefill(self, inputs: BatchInputs) -> tuple[jax.Array, float]:
        self._meet()
        start = time.perf_counter()
        self._dense, self._ticket, logits, _ = jax.block_until_ready(
            self._prefill(self._params, self._dense, *inputs, self._ticket)
        )
        return logits, time.perf_counter() - start

    def _record(self, inputs: BatchInputs) -> tuple[Dense, Dense]:
        """Prefills again, for the dense buffers of every layer before and after compose."""
        self._dense, self._ticket, _, (local, composed) = jax.block_until_ready(
            self._recorded_prefill(self._params, self._dense, *inputs, self._ticket)
        )
        return local, composed

    def _time_exchange(self, inputs: BatchInputs) -> npt.NDArray[np.float32]:
        self._dense, self._ticket, times_us = self._timer.time(
            self._dense, inputs.plan, self._ticket
        )
        return times_us


def _zeros(mesh: Mesh, config: model.ModelConfig, geometry: Geometry) -> Dense:
    """The dense buffers, K and V; globally [cp * num_dense_pages, *page_shape]."""
    num_pages = mesh.size * geometry.num_dense_pages
    k, v = (
        jnp.zeros((num_pages, *page.shape), page.dtype, device=NamedSharding(mesh, P("cp")))
        for page in config.page_struct(geometry.page_size)
    )
    return k, v

"""Does the replay give the right bytes and the right outputs?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from jax_symmkv.cli import collect
from jax_symmkv.cli.demo import model, reference
from jax_symmkv.cli.demo.prefill import Dense
from jax_symmkv.cli.demo.trace import Batch

# Logits are near 1. Both runs round K and V to kv_dtype and compute in float32, in another order of
# summation: differences below 1e-4 are rounding. One stale page of 32 moves them by 0.06 to 0.1.
LOGIT_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verification's outcome, the same on every rank.

    Attributes:
      differing_pages: pages that differ from the oracle's, over all batches, layers and ranks.
      first_difference: (batch, layer, rank) of the first of them.
      largest_logit_difference: against the one-rank run; NaN if any is NaN.
      wrong_logits: requests with a difference above LOGIT_TOLERANCE.
      wrong_tokens: requests with another greedy token, though their top two logits are no near-tie.
      near_ties: requests whose top two logits are within twice the tolerance.
    """

    differing_pages: int
    first_difference: tuple[int, int, int] | None
    num_outputs: int
    largest_logit_difference: float
    wrong_logits: int
    wrong_tokens: int
    near_ties: int

    @property
    def ok(self) -> bool:
        return not (self.differing_pages or self.wrong_logits or self.wrong_tokens)


def make_oracle_check(mesh: Mesh) -> Callable[..., Any]:
    """Jits `check(local, composed, plan)`, a program of its own with XLA's collectives alone.

    Both are K and V of every layer, [num_layers, cp * num_dense_pages, ...]: before and after compose.

    Returns:
      a function that returns int32 [cp, num_layers], replicated: pages of the rank's dense buffers that
      differ in any byte from what `collective_compose` makes of `local`, untouched pages included.
    """

    def check(local: Dense, composed: Dense, plan: symmkv.ComposePlan) -> Any:
        def layer_check(_: None, layer: tuple[Dense, Dense]) -> tuple[None, jax.Array]:
            before, after = layer
            expected = symmkv.collective_compose(before, plan, axis_name="cp")
            k, v = (_pages_differ(x, y) for x, y in zip(after, expected, strict=True))
            return None, (k | v).sum(dtype=jnp.int32)

        _, differing = jax.lax.scan(layer_check, None, (local, composed))
        every_rank = jnp.zeros((mesh.size, differing.size), jnp.int32)
        return jax.lax.psum(every_rank.at[jax.lax.axis_index("cp")].set(differing), "cp")

    sharded = jax.shard_map(
        check, mesh=mesh, in_specs=(P(None, "cp"), P(None, "cp"), P()), out_specs=P()
    )
    return jax.jit(sharded)


def _pages_differ(x: jax.Array, y: jax.Array) -> jax.Array:
    """bool [pages]; by their bytes, since NaN differs from itself and -0.0 equals 0.0."""
    x, y = (jax.lax.bitcast_convert_type(pages, jnp.uint8) for pages in (x, y))
    return (x != y).any(axis=tuple(range(1, x.ndim)))


class Verifier:
    """Collects the differences of a run, batch by batch."""

    def __init__(self, mesh: Mesh, config: model.ModelConfig, params: model.Params) -> None:
        """`params`: NumPy arrays; the one-rank run gets a copy on a single device."""
        self._config = config
        self._params: model.Params = jax.device_put(params, jax.local_devices()[0])
        self._oracle_check = make_oracle_check(mesh)
        self._rank_sum = collect.make_rank_sum(mesh)
        self._differing: list[npt.NDArray[np.int32]] = []  # [cp, num_layers] each
        self._kept: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
        self._outputs: list[tuple[float, bool, bool]] = []  # difference, same token, near-tie

    def check_dense(self, local: Dense, composed: Dense, plan: symmkv.ComposePlan) -> None:
        """Compares a batch's dense buffers of all layers with the oracle's; called on every rank."""
        self._differing.append(np.asarray(self._oracle_check(local, composed, plan)))

    def keep_outputs(
        self, batch: Batch, prompts: Sequence[npt.NDArray[np.int32]], logits: jax.Array
    ) -> None:
        """Takes the last tokens' logits of a batch, for `check_outputs`; called on every rank.

        The processes share the one-rank runs: each keeps every n-th request, whole.

        Args:
          prompts: token ids of each request of the batch.
          logits: [cp * max_requests, vocab_size] from the prefill.
        """
        actual = np.asarray(self._rank_sum(logits))
        for row, (request, prompt) in enumerate(zip(batch.requests, prompts, strict=True)):
            if request % jax.process_count() == jax.process_index():
                self._kept.append((prompt, actual[row]))

    @property
    def num_kept(self) -> int:
        """Requests that this process has to check."""
        return len(self._kept)

    def check_outputs(self, advance: Callable[[], None]) -> None:
        """Compares the outputs kept with the one-rank run; calls `advance` after each request."""
        for prompt, actual in self._kept:
            expected = reference.last_token_logits(self._params, prompt, self._config)
            self._outputs.append(compare_logits(actual, expected))
            advance()

    def verdict(self) -> Verdict:
        """The outcome over all ranks; called once on every rank, with all programs blocked on."""
        differing = np.stack(self._differing)  # [batches, cp, num_layers]
        found = np.argwhere(differing.transpose(0, 2, 1))
        differences = np.array([difference for difference, _, _ in self._outputs])
        near_tie = np.array([tie for _, _, tie in self._outputs], bool)
        same = np.array([same for _, same, _ in self._outputs], bool)
        tally = np.array(
            [
                differences.size,
                differences.max(initial=0),
                (~(differences <= LOGIT_TOLERANCE)).sum(),  # a NaN is wrong, too
                (~same & ~near_tie).sum(),
                near_tie.sum(),
            ],
            np.float32,
        )
        tallies = collect.from_every_process(tally)
        num_outputs, _, wrong_logits, wrong_tokens, near_ties = tallies.sum(axis=0)
        batch, layer, rank = map(int, found[0]) if len(found) else (0, 0, 0)
        return Verdict(
            differing_pages=int(differing.sum()),
            first_difference=(batch, layer, rank) if len(found) else None,
            num_outputs=int(num_outputs),
            largest_logit_difference=float(tallies[:, 1].max()),
            wrong_logits=int(wrong_logits),
            wrong_tokens=int(wrong_tokens),
            near_ties=int(near_ties),
        )


def compare_logits(
    actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]
) -> tuple[float, bool, bool]:
    """Largest difference of the logits, same greedy token, near-tie of the expected top two."""
    second, first = np.sort(expected)[-2:]
    # Each of the two may be off by the tolerance before they change places.
    near_tie = not first - second > 2 * LOGIT_TOLERANCE
    difference = float(np.abs(actual - expected).max())
    return difference, bool(actual.argmax() == expected.argmax()), near_tie

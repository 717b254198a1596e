"""What the programs of a case move, and what must come of it; and arrays on the ranks, one device each."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_symmkv.cli.bench.case import Case, Words


def exchanged(case: Case, rank: int) -> tuple[Words, Words]:
    """uint32 [slots, words of a page]: the dense buffer before an exchange, peers' pages poisoned; after."""
    plan = case.plan(case.num_slots)
    composed = case.composed()
    mine = np.full_like(composed, 0xEEEEEEEE)
    own = np.asarray(plan.current_page)[np.asarray(plan.current_writer) == rank]
    mine[own] = composed[own]
    return mine, composed if case.num_pages else mine  # without pages nothing may move


def compact(case: Case, rank: int) -> tuple[Words, Words]:
    """The compact buffer: own pages in their slots, zeros in the others'; and the sum over the ranks."""
    expected = _words(case)
    writer = np.asarray(case.plan(case.num_slots).current_writer)
    # Of the one word that stands for no pages: rank 0.
    mine = (writer if case.num_pages else np.zeros(1)) == rank
    return np.where(mine[:, None], expected, np.uint32(0)), expected


def published(case: Case, rank: int) -> tuple[Words, Words]:
    """As many pages as the rank publishes; and those of all ranks, one after the other."""
    own = _words(case)[: max(1, case.pages_per_rank)]
    every = np.stack([own + np.uint32(other) for other in range(case.cp_size)])
    return every[rank], every.reshape(-1, own.shape[1])


def _words(case: Case) -> Words:
    """What the collectives move; one word for no pages."""
    return case.composed() if case.num_pages else np.full((1, 1), 7, np.uint32)


def rank_of(mesh: Mesh) -> int:
    """This process's rank."""
    return [d.process_index for d in mesh.devices.flat].index(jax.process_index())


# Neither of the two below uses a collective, as jax.device_put of a replicated value does: ranks that
# share a GPU have none.


def shard(mesh: Mesh, local: np.ndarray) -> jax.Array:
    """Each rank's `local`, one after the other."""
    shape = (mesh.size * local.shape[0], *local.shape[1:])
    return jax.make_array_from_callback(shape, jax.NamedSharding(mesh, P("cp")), lambda _: local)


def replicate(mesh: Mesh, values: Any) -> Any:
    """A pytree of NumPy arrays that every rank has."""
    sharding = jax.NamedSharding(mesh, P())
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda _: x), values
    )


def local_words(x: jax.Array) -> Words:
    return np.asarray(x.addressable_shards[0].data).view(np.uint32).ravel()

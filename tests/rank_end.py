"""One rank's end of a heap as process-local programs, for tests that take the ranks out of step."""

from __future__ import annotations

import importlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import jax_symmkv as symmkv
from jax_symmkv import ComposePlan, compat, heap, sizing
from tests.group import cpu_mesh
from tests.reference import Array
from tests.tokens import NUM_SLOTS, SMALL_PAGE, misreads, token_plan, tokens

SOON_S = 5.0  # "within about a second", on a machine with more ranks than cores
LONG_S = 40.0  # a deadline that no test waits for
NO_TICKET = np.zeros(1, np.int32)


class RankEnd:
    """A heap of this process's device and the other ranks' devices, and its programs.

    Args:
      ranks: the processes that take part; all by default. A rank's number in the group is its place here.
      heap_args: for SymmetricHeap.
    """

    def __init__(self, ranks: Sequence[int] | None = None, **heap_args: Any) -> None:
        ranks = range(jax.process_count()) if ranks is None else ranks
        devices = [d for r in ranks for d in jax.devices() if d.process_index == r]
        self.heap = symmkv.SymmetricHeap(
            cpu_mesh(devices=devices),
            "cp",
            **{
                "page": SMALL_PAGE,
                "max_current_pages": NUM_SLOTS,
                "transport": "shm",
                "timeout_s": LONG_S,
                **heap_args,
            },
        )
        self.rank = list(ranks).index(jax.process_index())
        self.cp_size = len(ranks)
        heap = self.heap
        self.new_ticket = jax.jit(lambda: symmkv.new_ticket(heap))
        self.publish = jax.jit(partial(symmkv.publish, heap=heap))
        self.barrier = jax.jit(partial(symmkv.barrier, heap=heap))
        self.gather = jax.jit(partial(symmkv.gather, heap=heap), donate_argnums=0)
        self.compose = jax.jit(partial(symmkv.compose, heap=heap), donate_argnums=0)

    def __enter__(self) -> RankEnd:
        return self

    def __exit__(self, *error: object) -> None:
        self.heap.close()

    @property
    def context(self) -> Any:
        (context,) = self.heap._contexts.values()
        return context

    def batch(self, exchange: int) -> tuple[Array, ComposePlan]:
        """The dense buffer with this rank's tokens, and the plan."""
        plan = token_plan(exchange, self.cp_size)
        return tokens(self.heap.page[0], plan, self.rank, exchange), plan

    def compose_tokens(self, exchange: int) -> None:
        """One fused exchange, in a program of its own; its pages are checked."""
        dense, plan = self.batch(exchange)
        dense, _ = self.compose(dense, plan, self.new_ticket())
        assert not misreads(np.asarray(dense), plan, exchange)

    def assert_poisoned(self, call: Callable[[], Any], says: str) -> symmkv.PeerError:
        """The call fails, the heap stays poisoned by the same cause, and JAX goes on."""
        start = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            jax.block_until_ready(call())
        took_s = time.monotonic() - start
        assert took_s < SOON_S, f"{took_s:.1f} s"

        with pytest.raises(symmkv.PeerError, match=re.escape(says)) as poison:
            self.heap.check()
        cause = re.escape(str(poison.value))
        assert re.search(cause, str(raised.value)), raised.value
        start = time.monotonic()
        for later in (self.new_ticket, self.compose_anything):
            with pytest.raises(jax.errors.JaxRuntimeError, match=cause):
                jax.block_until_ready(later())
        with pytest.raises(symmkv.PeerError, match=cause):
            self.heap.check()
        assert time.monotonic() - start < SOON_S
        assert jax.jit(lambda x: x + 1)(1) == 2
        return poison.value

    def compose_anything(self) -> Any:
        """A fused exchange in a program that has no guard."""
        return self.compose(*self.batch(0), NO_TICKET)


def sync(name: str, ranks: Sequence[int]) -> None:
    """A host barrier of the given processes, with no exchange."""
    compat.coordination_client().wait_at_barrier(name, 60_000, list(ranks))


def share(name: str, value: str, ranks: Sequence[int]) -> list[str]:
    """What each of the given processes passes."""
    client = compat.coordination_client()
    client.key_value_set(f"{name}/{jax.process_index()}", value)
    return [client.blocking_key_value_get(f"{name}/{rank}", 60_000) for rank in ranks]


def die() -> None:
    """Ends this process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def use_core(name: str) -> None:
    """Has the heaps of this process made by another build of the extension module; before the first."""
    core = importlib.import_module(f"jax_symmkv.{name}")
    for module in (compat, heap, sizing):
        module._core = core  # type: ignore[attr-defined]

"""From creation to close: what a heap holds, and that it lets go of all of it, however it ends."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_symmkv import HeapError, SymmetricHeap, _core
from tests import group
from tests.fresh_python import python
from tests.reference import MAX_CURRENT_PAGES, NUM_DENSE_PAGES, batches
from tests.registry import register_ci
from tests.run_rank import ROOT

pytestmark = register_ci(suite="unit", est_s=7)

SHM = Path("/dev/shm")
PAGE = jax.ShapeDtypeStruct((4,), jnp.float32)

CREATE = """
import jax, jax.numpy as jnp, numpy as np
import jax_symmkv as symmkv
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("cp",))
page = jax.ShapeDtypeStruct((4,), jnp.float32)
heap = symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=4)
print(heap.heap_id, flush=True)
"""


def create(cp_size: int = 2, **kwargs: Any) -> SymmetricHeap:
    kwargs = {"page": PAGE, "max_current_pages": MAX_CURRENT_PAGES, "timeout_s": 20.0, **kwargs}
    return SymmetricHeap(group.cpu_mesh((cp_size,)), "cp", **kwargs)


def held() -> list[str]:
    """This process's descriptors and mappings of heaps; " (deleted)" behind what has no name."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except FileNotFoundError:  # the listing's own
            continue
    mapped = [m.split(maxsplit=5)[-1] for m in Path("/proc/self/maps").read_text().splitlines()]
    return [name for name in links + mapped if "/symmkv-" in name]


def test_open_heap_has_memory_but_no_name_and_a_closed_one_nothing() -> None:
    assert held() == []
    heap = create(2)
    # Each rank holds its own slab and its peer's: 4 descriptors, 4 mappings.
    assert len(held()) == 8
    assert all(name.endswith(" (deleted)") for name in held())
    heap.close()
    assert held() == []
    heap.close()  # idempotent


def test_close_comes_with_leaving_the_context_by_an_exception_too() -> None:
    with pytest.raises(KeyError), create() as heap:
        raise KeyError
    assert heap.closed and held() == []


def test_check_of_a_closed_heap_says_so() -> None:
    with create() as heap:
        heap.check()
    with pytest.raises(HeapError, match=r"check: the heap is closed; check it before close\(\)"):
        heap.check()


def test_check_is_quiet_and_the_epochs_agree_when_all_is_drained() -> None:
    with create(4) as heap:
        program = group.sharded(group.compose_body(heap), heap)
        dense = group.put(np.zeros((4 * NUM_DENSE_PAGES, 4), np.float32), heap.mesh, P("cp"))
        for plan in batches(4, np.random.default_rng(0)).values():
            dense = program(dense, plan)
        jax.block_until_ready(dense)
        heap.check()
        assert {c.epoch for c in heap._contexts.values()} == {7}


def test_two_heaps_at_once_are_independent() -> None:
    with create() as first, create() as second:
        assert first.heap_id != second.heap_id
        second.close()
        dense = group.put(np.zeros((2 * NUM_DENSE_PAGES, 4), np.float32), first.mesh, P("cp"))
        plan = batches(2, np.random.default_rng(0))["full"]
        jax.block_until_ready(group.sharded(group.compose_body(first), first)(dense, plan))
        first.check()


def test_failed_creation_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("nothing came back")

    monkeypatch.setattr(_core.ShmContext, "verify_greetings", fail)
    with pytest.raises(HeapError, match="process 0: nothing came back") as caught:
        create(transport="shm")
    # Not by the grace of the garbage collector: the error's frames hold the heap.
    assert caught.value.__traceback__ is not None
    assert held() == []
    monkeypatch.undo()
    create(transport="shm").close()


def test_end_of_the_process_closes_the_heap_and_ids_are_those_of_the_last_run() -> None:
    """They stand in compiled programs, and so in the key of the compilation cache."""
    program = f"""{CREATE}
import sys; sys.path.insert(0, {str(ROOT)!r})
from tests import group
from tests.reference import *
plan = build_plan([0], [4], page_size=1, cp_size=2, max_current_pages=4, num_dense_pages=4)
dense = group.put(np.zeros((8, 4), np.float32), mesh, group.PartitionSpec("cp"))
def slow(dense, plan):
    dense = group.compose_body(heap)(group.slowly(dense), plan)
    return group.compose_body(heap)(dense, plan)
dense = group.sharded(slow, heap)(dense, plan)  # in flight when the interpreter ends
"""
    first, second = python(program), python(program)
    assert first.returncode == 0, first.stdout
    assert first.stdout == second.stdout  # the id, and no word of complaint at exit
    assert int(first.stdout) >= 0


def test_uncaught_exception_closes_the_heap() -> None:
    ended = python(f"{CREATE}\nraise SystemExit(3)")
    assert ended.returncode == 3, ended.stdout


def test_name_left_by_a_kill_in_the_middle_of_creation_is_swept_by_the_next() -> None:
    code = f"""{CREATE}
from jax_symmkv import _core
context = _core.ShmContext(rank=0, cp_size=2, num_slots=1, page_nbytes=[16], nonce=1,
                           first_epoch=0, timeout_ms=1000, spin_us=0)
print(context.address)
import os; os.kill(os.getpid(), {signal.SIGKILL:d})
"""
    ended = python(code, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert ended.returncode == -signal.SIGKILL, ended.stdout
    name = SHM / ended.stdout.split()[-1].lstrip("/")
    # The kernel releases the dead owner's lock before its parent can reap it.
    assert name.exists()
    mode = name.stat().st_mode
    create().close()
    assert not name.exists()
    assert stat.S_IMODE(mode) == 0o600

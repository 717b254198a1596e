"""Creation of a heap by several processes: what they agree on, and that a failure of one is one of all."""

from __future__ import annotations

import logging
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from jax_symmkv import HeapError, SymmetricHeap, _core
from jax_symmkv.rendezvous import Rendezvous
from tests import group
from tests.reference import (
    MAX_CURRENT_PAGES,
    NUM_DENSE_PAGES,
    batches,
    composed,
    random_array,
)
from tests.registry import register_ci
from tests.run_rank import run_ranks_of

pytestmark = register_ci(suite="distributed", ranks=3, est_s=15)

PAGE = jax.ShapeDtypeStruct((4, 2, 8), jnp.bfloat16)  # 128 bytes
QUICKLY_S = 20.0  # a deadline; the timeout of each creation is far beyond it


# --- what ranks execute --------------------------------------------------------------------------


def create(**kwargs: Any) -> SymmetricHeap:
    kwargs = {"page": PAGE, "max_current_pages": MAX_CURRENT_PAGES, "timeout_s": 100.0, **kwargs}
    return SymmetricHeap(group.cpu_mesh(), "cp", **kwargs)


def fails(*texts: str, **kwargs: Any) -> None:
    """A creation that fails on this rank, soon, with an error that holds all of the texts."""
    start = time.monotonic()
    with pytest.raises(HeapError) as caught:
        create(**kwargs)
    for text in texts:
        assert re.search(text, str(caught.value)), f"{text!r} is not in {caught.value}"
    assert time.monotonic() - start < QUICKLY_S
    assert held() == []


def held() -> list[str]:
    return [fd.name for fd in Path("/proc/self/fd").iterdir() if "/symmkv-" in os.path.realpath(fd)]


def check_usable(heap: SymmetricHeap) -> None:
    """The whole public API on the heap, byte for byte; inside, a scan."""
    rng = np.random.default_rng(7)
    dense = random_array(rng, (heap.cp_size * NUM_DENSE_PAGES, *PAGE.shape), PAGE.dtype)

    def body(dense: Any, plan: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            dense, ticket = symmkv.compose(*carry[:1], plan, carry[1], heap=heap)
            return group.three_calls(
                dense, plan, symmkv.barrier(ticket, heap=heap), heap=heap
            ), None

        return jax.lax.scan(step, (dense, symmkv.new_ticket(heap)), None, length=2)[0][0]

    program = group.sharded(body, heap)
    for kind, plan in batches(heap.cp_size, rng).items():
        if plan.current_page.shape[0] > heap.max_current_pages:
            continue
        wanted = composed(group.by_rank(dense, heap.cp_size), plan).reshape(dense.shape)
        group.assert_shards(program(group.put(dense, heap.mesh, P("cp")), plan), wanted, kind)
    heap.check()


def check_disagreements() -> None:
    """Each is an error on all ranks that names both values; what comes after is not disturbed."""
    me = jax.process_index()
    last = jax.process_count() - 1
    odd = me == last

    fails(
        f"max_current_pages differs: process 0 has 8, process {last} has 9",
        max_current_pages=9 if odd else 8,
    )
    with create() as heap:
        check_usable(heap)
    fails(
        f"max_prefix_pages differs: process 0 has 0, process {last} has 2",
        max_prefix_pages=2 if odd else 0,
    )
    other = jax.ShapeDtypeStruct((4, 2, 4), jnp.float32)
    fails(
        r"page differs: process 0 has \[\[\[4, 2, 8\], 'bfloat16'\]\]",
        rf"process {last} has \[\[\[4, 2, 4\], 'float32'\]\]",
        page=other if odd else PAGE,
    )
    fails("page differs", r"\], \[", page=(PAGE, PAGE) if odd else PAGE)
    fails(
        f"transport differs: process 0 has 'auto', process {last} has 'shm'".replace("'", "'?"),
        transport="shm" if odd else "auto",
    )
    # What is wrong on one rank alone.
    theirs = f"process {last} failed: HeapError: SymmetricHeap: "
    for text, kwargs in (
        ("max_current_pages must be at least 1, got 0", {"max_current_pages": 0}),
        ("a page must be a positive multiple", {"page": jax.ShapeDtypeStruct((3,), jnp.uint8)}),
        ("transport must be one of", {"transport": "nvlink"}),
        ("timeout_s must be a number above 0, got -1", {"timeout_s": -1}),
    ):
        fails(text, *([] if odd else [theirs]), **(kwargs if odd else {}))
    with create(transport="shm") as heap:
        check_usable(heap)


def check_variables() -> None:
    me = jax.process_index()
    # Slots of 2 * 128 bytes: 4096 in a MiB. The tightest bound holds for all.
    os.environ["SYMMKV_HEAP_MB"] = ("1", "0.25", "0.5")[me]
    with create(max_current_pages=2000) as heap:
        assert heap.max_current_pages == 1024
        check_usable(heap)
        check_full_staging(heap)
    if me == 1:  # bounded on some ranks only
        del os.environ["SYMMKV_HEAP_MB"]
    with create(max_current_pages=10_000) as heap:
        assert heap.max_current_pages == 2048
    os.environ["SYMMKV_HEAP_MB"] = "none" if me == 2 else "1"
    fails("SYMMKV_HEAP_MB must be a number of MiB, got 'none'")
    del os.environ["SYMMKV_HEAP_MB"]

    os.environ["SYMMKV_TRANSPORT"] = "collective"
    with create(transport="shm") as heap:
        assert heap.transport == "collective"
        check_usable(heap)
    os.environ["SYMMKV_TRANSPORT"] = "shm" if me == 0 else "collective"
    fails("transport differs: process 0 has '?shm'?, process 1 has '?collective'?")
    del os.environ["SYMMKV_TRANSPORT"]

    os.environ["SYMMKV_TIMEOUT_S"] = "0.5"
    if me == 0:
        fails("process 1 did not take part in step 0 of the creation within 0.5 s", timeout_s=200)
    del os.environ["SYMMKV_TIMEOUT_S"]
    group.synchronise("process 0 has given up")
    if me != 0:  # late for a creation that is over
        fails("process 0 failed: .*did not take part")
    with create() as heap:  # which makes them even
        check_usable(heap)


def check_full_staging(heap: SymmetricHeap) -> None:
    """Every slot of both halves is used, the last ones of the slab included."""
    slots = heap.max_current_pages
    plan = symmkv.build_plan(
        [0],
        [slots],
        page_size=1,
        cp_size=heap.cp_size,
        max_current_pages=slots,
        num_dense_pages=slots,
    )
    dense = random_array(np.random.default_rng(8), (heap.cp_size * slots, *PAGE.shape), PAGE.dtype)
    program = group.sharded(group.compose_body(heap), heap)
    wanted = composed(group.by_rank(dense, heap.cp_size), plan).reshape(dense.shape)
    for _ in range(2):
        result = program(group.put(dense, heap.mesh, P("cp")), plan)
        group.assert_shards(result, wanted, "every slot")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_fallback() -> None:
    """Shared memory that fails on one rank, at whatever step: all fall back, or all raise."""
    last = jax.process_count() - 1
    odd = jax.process_index() == last
    log = Lines()
    logging.getLogger("jax_symmkv").addHandler(log)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if odd:  # as a full /dev/shm
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    expect_fallback(
        log, last, "cannot reserve .* bytes of shared memory in /dev/shm .*File too large"
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    for method in ("map", "verify_greetings", "unlink"):
        original = getattr(_core.ShmContext, method)
        if odd:
            setattr(_core.ShmContext, method, refuse)
        expect_fallback(log, last, "not today")
        setattr(_core.ShmContext, method, original)

    with create(transport="shm") as heap:
        assert heap.transport == "shm"
        check_usable(heap)
    assert log.lines == []


def refuse(*args: Any) -> None:
    raise RuntimeError("not today")


def expect_fallback(log: Lines, failed: int, why: str) -> None:
    why = f"shared memory can't be used: process {failed}: {why}"
    fails(f"^SymmetricHeap: {why}.*transport='auto' would fall back", transport="shm")
    assert log.lines == []
    with create() as heap:
        assert (heap.transport, heap.nbytes) == ("collective", 0)
        # Logged once, where it failed.
        if jax.process_index() == failed:
            (line,) = log.lines
            assert re.search(f"^SymmetricHeap: {why}.*; falling back to collectives", line), line
        else:
            assert log.lines == []
        assert held() == []
        check_usable(heap)
        process_local = jax.jit(group.compose_body(heap))
        with pytest.raises(
            HeapError, match=r"axis 'cp' is not bound.*here are 1, and 'collective'"
        ):
            plan = batches(heap.cp_size, np.random.default_rng(0))["full"]
            process_local.trace(
                jax.ShapeDtypeStruct((NUM_DENSE_PAGES, *PAGE.shape), PAGE.dtype), plan
            )
    log.lines.clear()


def check_cores() -> None:
    """Ranks bound to a core each have them all, together: what decides whether waits may spin."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[jax.process_index() % len(cores)]
    os.sched_setaffinity(0, {mine})
    with Rendezvous("cores", list(range(jax.process_count()))) as rendezvous:
        rendezvous.exchange({})
        assert rendezvous.num_cores == min(len(cores), jax.process_count())


def check_exit() -> None:
    """The interpreter ends with an open heap, and with exchanges in flight."""
    heap = create(transport="shm")

    def body(dense: Any, plan: Any) -> Any:
        return group.compose_body(heap)(group.slowly(dense), plan)

    program = group.sharded(body, heap, donate=True)
    dense = group.put(
        np.zeros((heap.cp_size * NUM_DENSE_PAGES, *PAGE.shape), jnp.bfloat16), heap.mesh, P("cp")
    )
    for plan in list(batches(heap.cp_size, np.random.default_rng(0)).values())[:3]:
        dense = program(dense, plan)


# --- tests ---------------------------------------------------------------------------------------


def test_disagreement_is_an_error_on_every_rank_and_the_next_creation_works() -> None:
    run_ranks_of(__file__, "check_disagreements", ranks=3)


def test_variables_are_agreed_between_ranks() -> None:
    run_ranks_of(__file__, "check_variables", ranks=3)


def test_shared_memory_that_fails_on_one_rank_is_used_by_none() -> None:
    run_ranks_of(__file__, "check_fallback", ranks=2)


def test_cores_are_counted_over_all_ranks() -> None:
    run_ranks_of(__file__, "check_cores", ranks=2)


def test_end_of_the_processes_closes_the_heap() -> None:
    result = run_ranks_of(__file__, "check_exit", ranks=2)
    assert [rank.output for rank in result.ranks] == ["", ""]

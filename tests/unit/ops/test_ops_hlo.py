"""What the compiled programs copy: nothing of the dense buffer's size, if it is donated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from tests import group, hlo
from tests.reference import MAX_CURRENT_PAGES, NUM_DENSE_PAGES, batches
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=3)

Step = Callable[[Any, symmkv.ComposePlan, jax.Array], tuple[Any, jax.Array]]

CP = 2
# XLA:CPU scatters into narrow floats by way of wider ones, the whole buffer: a matter of its own.
PAGES = (
    jax.ShapeDtypeStruct((4, 2, 8), jnp.float32),
    jax.ShapeDtypeStruct((4, 36), jnp.uint8),
)
SMALLEST_DENSE_NBYTES = NUM_DENSE_PAGES * 4 * 36
PLAN = batches(CP, np.random.default_rng(0))["full and scattered"]


@pytest.fixture(scope="module")
def heap() -> Iterator[symmkv.SymmetricHeap]:
    with symmkv.SymmetricHeap(
        group.cpu_mesh((CP,)), "cp", page=PAGES, max_current_pages=MAX_CURRENT_PAGES
    ) as heap:
        yield heap


def shapes(heap: symmkv.SymmetricHeap, pages: tuple[int, ...] = (CP * NUM_DENSE_PAGES,)) -> Any:
    sharding = jax.NamedSharding(heap.mesh, P("cp"))
    return tuple(
        jax.ShapeDtypeStruct((*pages, *p.shape), p.dtype, sharding=sharding) for p in PAGES
    )


def copies(
    heap: symmkv.SymmetricHeap, step: Step, *, donate: bool = True, lead: bool = False
) -> list[str]:
    """The dense-sized copies of a scan of `step` over dense buffers, maybe with a leading axis of 1."""

    def body(dense: Any, plan: symmkv.ComposePlan) -> Any:
        def scanned(carry: Any, _: None) -> tuple[Any, None]:
            return step(carry[0], plan, carry[1]), None

        return jax.lax.scan(scanned, (dense, symmkv.new_ticket(heap)), None, length=3)[0][0]

    dense = shapes(heap, (CP, NUM_DENSE_PAGES) if lead else (CP * NUM_DENSE_PAGES,))
    compiled = group.sharded(body, heap, donate=donate).lower(dense, PLAN).compile()
    text = compiled.as_text()
    assert "symmkv_" in text and "while(" in text  # the exchange is there, in a loop
    return hlo.new_buffers(text, SMALLEST_DENSE_NBYTES)


def test_compose_in_a_scan_copies_nothing(heap: symmkv.SymmetricHeap) -> None:
    found = copies(heap, lambda d, plan, t: symmkv.compose(d, plan, t, heap=heap))
    assert found == []


def test_three_calls_in_a_scan_copy_nothing(heap: symmkv.SymmetricHeap) -> None:
    assert copies(heap, lambda d, plan, t: group.three_calls(d, plan, t, heap=heap)) == []


def test_scatter_by_index_arrays_before_compose_copies_nothing(heap: symmkv.SymmetricHeap) -> None:
    """How a layer writes its own tokens."""

    def step(dense: Any, plan: symmkv.ComposePlan, ticket: jax.Array) -> tuple[Any, jax.Array]:
        page, row = plan.current_page, plan.current_page % 4
        written = tuple(d.at[page, row].set(jnp.ones((), d.dtype), mode="drop") for d in dense)
        return symmkv.compose(written, plan, ticket, heap=heap)

    assert copies(heap, step) == []


def test_ticket_chains_the_calls(heap: symmkv.SymmetricHeap) -> None:
    """XLA orders them by nothing else; that it happened to keep an order would prove nothing."""

    def body(dense: Any, plan: symmkv.ComposePlan) -> Any:
        dense, ticket = symmkv.compose(dense, plan, symmkv.new_ticket(heap), heap=heap)
        return group.three_calls(dense, plan, ticket, heap=heap)[0]

    text = group.sharded(body, heap).lower(shapes(heap), PLAN).compile().as_text()
    order = ("gather", "barrier", "publish", "exchange", "new_ticket")
    assert hlo.call_chain(text, "symmkv_gather") == [f"symmkv_{op}" for op in order]


# --- the detector itself: what is known to copy is found -----------------------------------------


def test_compose_without_donation_copies_each_buffer_once(heap: symmkv.SymmetricHeap) -> None:
    found = copies(heap, lambda d, plan, t: symmkv.compose(d, plan, t, heap=heap), donate=False)
    assert len(found) == len(PAGES)
    assert all(" copy(" in line for line in found)


def test_leading_axis_around_compose_is_seen_to_copy(heap: symmkv.SymmetricHeap) -> None:
    def step(dense: Any, plan: symmkv.ComposePlan, ticket: jax.Array) -> tuple[Any, jax.Array]:
        stripped = tuple(d[0] for d in dense)
        composed, ticket = symmkv.compose(stripped, plan, ticket, heap=heap)
        return tuple(d[None] for d in composed), ticket

    assert len(copies(heap, step, lead=True)) >= 2 * len(PAGES)


def test_elementwise_producer_is_seen_to_rewrite_the_buffer(heap: symmkv.SymmetricHeap) -> None:
    def step(dense: Any, plan: symmkv.ComposePlan, ticket: jax.Array) -> tuple[Any, jax.Array]:
        return symmkv.compose(jax.tree.map(jnp.negative, dense), plan, ticket, heap=heap)

    assert copies(heap, step) != []


@pytest.mark.parametrize(
    "line, found",
    [
        ("  %copy.1 = bf16[41,4]{1,0} copy(%param.7)", True),
        ("  ROOT %copy.1 = f8e4m3fn[41,8]{1,0} copy(%bitcast.3)", True),
        ("  %c = (s32[1]{0}, u32[41,2]{1,0}, /*index=5*/u32[]) copy-start(%a)", True),
        ("  %c = pred[41,7]{1,0} copy(%a)", False),
        ("  %g = bf16[41,4]{1,0} get-tuple-element(%w), index=1", False),
        ("  %w = (s32[], bf16[41,4]{1,0}) while(%t), condition=%c, body=%b", False),
        ('  %f = (s32[1]{0}, bf16[41,4]{1,0}) custom-call(%a), custom_call_target="x"', True),
        ("  %f = bf16[41,4]{1,0} custom-call(%a), output_to_operand_aliasing={{}: (0, {})}", False),
    ],
)
def test_detector_reads_types_and_opcodes(line: str, found: bool) -> None:
    assert bool(hlo.new_buffers(line, math.prod((41, 8)))) == found

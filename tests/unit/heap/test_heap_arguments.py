"""What a heap is created from: arguments, environment variables, and what it says of itself."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_symmkv as symmkv
from jax_symmkv import HeapError, SymmetricHeap
from tests import group
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=3)

PAGE = jax.ShapeDtypeStruct((4, 8), jnp.float32)  # 128 bytes
VARIABLES = ("SYMMKV_TRANSPORT", "SYMMKV_HEAP_MB", "SYMMKV_TIMEOUT_S")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def create(cp_size: int = 2, axis_name: str = "cp", **kwargs: Any) -> SymmetricHeap:
    mesh = kwargs.pop("mesh", None) or group.cpu_mesh((cp_size,))
    kwargs = {"page": PAGE, "max_current_pages": 8, "timeout_s": 20.0, **kwargs}
    return SymmetricHeap(mesh, axis_name, **kwargs)


def page_of(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((64,), dtype)


@pytest.mark.parametrize(
    "error, text, kwargs",
    [
        (HeapError, "max_current_pages must be at least 1, got 0", {"max_current_pages": 0}),
        (HeapError, "max_current_pages must be at least 1, got -3", {"max_current_pages": -3}),
        (TypeError, "max_current_pages must be an integer, got 2.0", {"max_current_pages": 2.0}),
        (HeapError, "max_prefix_pages must be at least 0, got -1", {"max_prefix_pages": -1}),
        # So many bytes that a 64-bit count of them would wrap around to a small one.
        (HeapError, "slots need .* more than a process can add", {"max_current_pages": 2**57}),
        (HeapError, "slots need .* more than a process can add", {"max_prefix_pages": 2**70}),
        (
            HeapError,
            r"a page must be a positive multiple of 16 bytes, float32\[5\] has 20; pad its last",
            {"page": jax.ShapeDtypeStruct((5,), jnp.float32)},
        ),
        (HeapError, "has 0", {"page": jax.ShapeDtypeStruct((0, 4), jnp.float32)}),
        (
            HeapError,
            "float32.* has 24",
            {"page": (PAGE, jax.ShapeDtypeStruct((6,), jnp.float32))},
        ),
        (HeapError, "can't have dtype int4.*uint8", {"page": page_of(jnp.int4)}),
        (HeapError, "can't have dtype uint2", {"page": page_of(jnp.uint2)}),
        (HeapError, "can't have dtype int1", {"page": page_of(ml_dtypes.int1)}),
        (HeapError, "can't have dtype float4_e2m1fn", {"page": page_of(jnp.float4_e2m1fn)}),
        (HeapError, "page must name 1 to 8 buffers, got 0", {"page": ()}),
        (HeapError, "page must name 1 to 8 buffers, got 9", {"page": (PAGE,) * 9}),
        (TypeError, "page must be a jax.ShapeDtypeStruct .* got list", {"page": [PAGE]}),
        (TypeError, "page must be a jax.ShapeDtypeStruct .* got int", {"page": (PAGE, 16)}),
        (HeapError, r"the mesh has axes \('cp',\), none is 'tp'", {"axis_name": "tp"}),
        (TypeError, "mesh must be a jax.sharding.Mesh, got str", {"mesh": "cp"}),
        (HeapError, r"transport must be one of .*'shm'.*, got 'nccl'", {"transport": "nccl"}),
        (HeapError, "timeout_s must be a number above 0, got 0", {"timeout_s": 0}),
        (HeapError, "timeout_s must be a number above 0, got -1", {"timeout_s": -1.0}),
        (HeapError, "timeout_s must be a number above 0, got nan", {"timeout_s": math.nan}),
        (HeapError, "timeout_s must be a number above 0, got 'x'", {"timeout_s": "x"}),
    ],
)
def test_bad_argument_names_value_and_remedy(
    error: type[Exception], text: str, kwargs: dict[str, Any]
) -> None:
    with pytest.raises(error, match=f"^SymmetricHeap: .*{text}"):
        create(**kwargs)
    create().close()


def test_page_of_prng_keys_is_refused() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    with pytest.raises(HeapError, match="can't have dtype key<fry>"):
        create(page=jax.ShapeDtypeStruct((4,), key.dtype))


@pytest.mark.parametrize(
    "variable, value, text",
    [
        ("SYMMKV_TRANSPORT", "rdma", "transport must be one of .*, got 'rdma'"),
        ("SYMMKV_TRANSPORT", "", "transport must be one of .*, got ''"),
        ("SYMMKV_TIMEOUT_S", "soon", "timeout_s must be a number above 0, got 'soon'"),
        ("SYMMKV_TIMEOUT_S", "0", "timeout_s must be a number above 0, got '0'"),
        ("SYMMKV_HEAP_MB", "big", "SYMMKV_HEAP_MB must be a number of MiB, got 'big'"),
        ("SYMMKV_HEAP_MB", "nan", "SYMMKV_HEAP_MB must be a number of MiB, got 'nan'"),
        ("SYMMKV_HEAP_MB", "inf", "SYMMKV_HEAP_MB must be a number of MiB, got 'inf'"),
        ("SYMMKV_HEAP_MB", "0", "SYMMKV_HEAP_MB=0 leaves no slot of 256 bytes.*at least 1$"),
        ("SYMMKV_HEAP_MB", "-1", "SYMMKV_HEAP_MB=-1 leaves no slot"),
    ],
)
def test_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(HeapError, match=text):
        create()


def test_variables_override_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMMKV_TRANSPORT", "collective")
    monkeypatch.setenv("SYMMKV_TIMEOUT_S", "2.5")
    with create(transport="shm", timeout_s=20.0) as heap:
        assert (heap.transport, heap.timeout_s) == ("collective", 2.5)


def test_heap_mb_lowers_the_slots_and_never_raises_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # 1 MiB / (2 halves * 128 bytes) = 4096 slots, prefix slots among them.
    monkeypatch.setenv("SYMMKV_HEAP_MB", "1")
    with create(max_current_pages=10_000, max_prefix_pages=96) as heap:
        assert (heap.max_current_pages, heap.max_prefix_pages) == (4000, 96)
        assert heap.nbytes <= 2**20 + 12288
    assert "SYMMKV_HEAP_MB bounds the heap to 4000 current pages of 10000" in caplog.text
    with create(max_current_pages=4096) as heap:
        assert heap.max_current_pages == 4096
    monkeypatch.setenv("SYMMKV_HEAP_MB", "0.5")
    with create(max_current_pages=4096) as heap:
        assert heap.max_current_pages == 2048
        with pytest.raises(symmkv.PlanError, match="2049 current pages and max_current_pages is 2"):
            symmkv.build_plan(
                [0],
                [2049],
                page_size=1,
                cp_size=2,
                max_current_pages=heap.max_current_pages,
                num_dense_pages=5000,
            )


@pytest.mark.parametrize("cp_size", [1, 2, 8])
def test_nbytes_is_flags_and_two_halves(cp_size: int) -> None:
    with create(cp_size, max_current_pages=10, max_prefix_pages=6) as heap:
        assert heap.nbytes == 12288 + 2 * (10 + 6) * 128
    # Each buffer of a half begins on a line of 128 bytes.
    pages = (jax.ShapeDtypeStruct((12,), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.uint8))
    with create(cp_size, page=pages, max_current_pages=3) as heap:
        assert heap.nbytes == 12288 + 2 * (256 + 128)
    with create(cp_size, transport="collective") as heap:
        assert heap.nbytes == 0


def test_attributes_and_repr_say_what_was_agreed() -> None:
    heap = create(3, max_prefix_pages=2)
    assert (heap.transport, heap.cp_size, heap.axis_name) == ("shm", 3, "cp")
    assert (heap.max_current_pages, heap.max_prefix_pages) == (8, 2)
    assert "shm" in repr(heap) and "cp_size=3" in repr(heap) and not heap.closed
    heap.close()
    assert "closed" in repr(heap) and heap.closed


def test_numpy_integers_are_integers() -> None:
    with create(max_current_pages=np.int64(4), max_prefix_pages=np.int32(1)) as heap:
        assert heap.max_current_pages == 4

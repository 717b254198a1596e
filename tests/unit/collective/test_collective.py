"""collective_compose, the oracle and fallback, against the NumPy reference: every dtype, byte for byte."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_symmkv as symmkv
from tests import group
from tests.reference import NUM_DENSE_PAGES, Array, batches, composed, random_array
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=6)

DTYPES = (
    *("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"),
    *("bfloat16", "float16", "uint16"),
    *("int32", "uint32", "float32", "complex64"),
)
DTYPES_OF_X64 = ("int64", "uint64", "float64", "complex128")


def oracle(cp_size: int, check_vma: bool = True) -> group.Body:
    mapped = jax.shard_map(
        lambda dense, plan: symmkv.collective_compose(dense, plan, axis_name="cp"),
        mesh=group.cpu_mesh((cp_size,)),
        in_specs=(P("cp"), P()),
        out_specs=P("cp"),
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def expected(dense: Array, plan: symmkv.ComposePlan, cp_size: int) -> Array:
    return composed(group.by_rank(dense, cp_size), plan).reshape(dense.shape)


def check(dtype: str, cp_size: int) -> None:
    rng = np.random.default_rng(3)
    program = oracle(cp_size)
    for kind, plan in batches(cp_size, rng).items():
        dense = random_array(rng, (cp_size * NUM_DENSE_PAGES, 3, 16), jnp.dtype(dtype))
        given = group.put(dense, group.cpu_mesh((cp_size,)), P("cp"))
        group.assert_shards(
            program(given, plan), expected(dense, plan, cp_size), f"{dtype}, {kind}"
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_collective_compose_of_every_dtype_is_exact(dtype: str) -> None:
    check(dtype, 2)


@pytest.mark.parametrize("dtype", DTYPES_OF_X64)
def test_collective_compose_of_wide_dtypes_is_exact(dtype: str) -> None:
    with jax.enable_x64(True):
        check(dtype, 2)


@pytest.mark.parametrize("cp_size", [1, 3, 8])
def test_collective_compose_of_every_group_size_is_exact(cp_size: int) -> None:
    check("bfloat16", cp_size)


@pytest.mark.parametrize("check_vma", [True, False])
def test_collective_compose_of_a_tuple_in_a_scan_is_exact(check_vma: bool) -> None:
    rng = np.random.default_rng(4)
    plan = batches(2, rng)["full and scattered"]
    dense = tuple(
        random_array(rng, (2 * NUM_DENSE_PAGES, 16), jnp.dtype(d)) for d in ("bfloat16", "bool")
    )

    def body(dense: tuple[jax.Array, ...], plan: symmkv.ComposePlan) -> tuple[jax.Array, ...]:
        def step(dense: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
            return symmkv.collective_compose(dense, plan, axis_name="cp"), None

        return jax.lax.scan(step, dense, None, length=3)[0]

    mesh = group.cpu_mesh((2,))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("cp"), P()), out_specs=P("cp"), check_vma=check_vma
    )
    wanted = tuple(expected(d, plan, 2) for d in dense)
    group.assert_shards(jax.jit(mapped)(group.put(dense, mesh, P("cp")), plan), wanted, "a tuple")


def test_collective_compose_refuses_grad_instead_of_a_gradient_of_zero() -> None:
    mesh = group.cpu_mesh((2,))
    plan = batches(2, np.random.default_rng(0))["full"]
    program = oracle(2)
    dense = group.put(np.ones((2 * NUM_DENSE_PAGES, 4), np.float32), mesh, P("cp"))
    with pytest.raises(TypeError, match=r"collective_compose: .*not differentiable"):
        jax.grad(lambda d: program(d, plan).sum())(dense)

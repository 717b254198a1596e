"""What depends on the running jax: the FFI's version, and an import that touches no backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_symmkv import _core, compat
from tests import group
from tests.fresh_python import python
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=6)


def check(code: str) -> None:
    done = python(code)
    assert done.returncode == 0, done.stdout


def test_runtime_ffi_version_is_read_from_jaxlib() -> None:
    major, minor = compat.runtime_ffi_version()
    assert (major, minor) >= (0, 3)
    assert isinstance(major, int) and isinstance(minor, int)


def test_build_is_no_newer_than_the_oldest_jaxlib_supported() -> None:
    assert _core.FFI_VERSION <= (0, 3)
    compat.check_ffi_version(_core.FFI_VERSION, compat.runtime_ffi_version())


@pytest.mark.parametrize(
    "built, runtime, fits",
    [
        ((0, 3), (0, 3), True),
        ((0, 1), (0, 3), True),
        ((0, 4), (0, 3), False),
        ((1, 0), (0, 3), False),
        ((0, 3), (1, 3), False),
        ((0, 10), (0, 9), False),
        ((0, 9), (0, 10), True),
    ],
)
def test_ffi_version_fits_unless_newer_or_of_another_major(
    built: tuple[int, int], runtime: tuple[int, int], fits: bool
) -> None:
    if fits:
        compat.check_ffi_version(built, runtime)
        return
    text = (
        f"built for XLA FFI {built[0]}.{built[1]}, but jaxlib .* speaks {runtime[0]}.{runtime[1]};"
    )
    with pytest.raises(ImportError, match=f"{text} upgrade jaxlib, or rebuild"):
        compat.check_ffi_version(built, runtime)


def test_too_new_a_build_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: registered.append(a))
    monkeypatch.setattr(compat, "runtime_ffi_version", lambda: (0, 0))
    with pytest.raises(ImportError, match="upgrade jaxlib"):
        compat.register_targets.__wrapped__()
    assert registered == []


def test_heap_of_too_new_a_build_is_refused_and_jax_goes_on() -> None:
    """In a process of its own, in which no target is registered yet."""
    check("""
import jax, jax.numpy as jnp
import jax_symmkv as symmkv
from jax_symmkv import _core
_core.FFI_VERSION = (9, 9)
mesh = jax.sharding.Mesh(jax.devices(), ("cp",))
page = jax.ShapeDtypeStruct((4,), jnp.float32)
for _ in range(2):
    try:
        symmkv.SymmetricHeap(mesh, "cp", page=page, max_current_pages=1)
    except ImportError as error:
        assert "jax_symmkv was built for XLA FFI 9.9, but jaxlib" in str(error), error
    else:
        raise SystemExit("no ImportError")
assert jnp.arange(3).sum() == 3
""")


def test_import_touches_no_backend() -> None:
    check("""
import jax_symmkv as symmkv
from jax._src import xla_bridge
symmkv.build_plan([0], [4], page_size=2, cp_size=2, max_current_pages=2, num_dense_pages=2)
symmkv.local_token_cap(4, 1, page_size=2, cp_size=2)
assert not xla_bridge.backends_are_initialized()
import jax
jax.config.update("jax_num_cpu_devices", 3)  # the program may still configure JAX
assert len(jax.devices("cpu")) == 3
""")


def test_registrations_are_the_same_targets_on_every_platform() -> None:
    platforms = _core.registrations()
    ops = ("new_ticket", "publish", "barrier", "gather", "exchange")
    for targets in platforms.values():
        assert sorted(targets) == sorted(f"symmkv_{op}" for op in ops)
    assert "cpu" in platforms


def test_manual_mesh_is_that_of_the_shard_map_around() -> None:
    assert compat.manual_mesh() == (None, frozenset())
    mesh = group.cpu_mesh((2, 2), ("cp", "tp"))
    seen: list[Any] = []

    def body(x: jax.Array) -> jax.Array:
        found, manual = compat.manual_mesh()
        assert found is not None
        seen.append((dict(found.shape), manual))
        return x

    P = jax.sharding.PartitionSpec
    for axes in ({"cp", "tp"}, {"cp"}):
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"), axis_names=axes
        )
        jax.jit(mapped).trace(jnp.zeros((2,)))
    shape = {"cp": 2, "tp": 2}
    assert seen == [(shape, frozenset({"cp", "tp"})), (shape, frozenset({"cp"}))]


@pytest.mark.parametrize("check_vma", [True, False])
def test_vary_alike_adds_the_axes_that_are_lacking(check_vma: bool) -> None:
    mesh = group.cpu_mesh((2, 2), ("cp", "tp"))
    P = jax.sharding.PartitionSpec
    everywhere = frozenset({"cp", "tp"}) if check_vma else frozenset()

    def body(x: jax.Array, y: jax.Array) -> jax.Array:
        assert compat.varying_axes(y) == frozenset()
        aligned = compat.vary_alike([x, y], everywhere)
        assert [compat.varying_axes(a) for a in aligned] == [everywhere] * 2
        return aligned[0] + aligned[1]

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("cp"), P()), out_specs=P(("cp", "tp")), check_vma=check_vma
    )
    jax.jit(mapped).trace(jnp.zeros((2,)), jnp.zeros((1,)))

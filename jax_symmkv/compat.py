"""The only file that knows JAX versions or touches jax._src and jaxlib internals."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.interpreters.ad
import jax.interpreters.batching
import jax.interpreters.mlir
import jaxlib
import jaxlib.utils
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jaxlib import _jax

from jax_symmkv import _core

_HEARTBEAT_TIMEOUT_S = 100  # JAX's own default


# --- jax.distributed: a coordinator outside the ranks --------------------------------------------


def start_coordinator(num_processes: int) -> tuple[str, Any]:
    """Starts JAX's coordination service in this process, for ranks that it will spawn.

    A service that lives outside the ranks, in recoverable mode, lets the survivors of a rank's death go on.

    Returns:
      its address, and the service; call `.shutdown()` on it after the last rank has ended.
    """
    # It warns that recoverable mode is experimental. "1", JAX's own choice, is no wish of the user's.
    quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1"
    with socket.socket() as reserved:
        # The service takes no port 0, and would silently share a port with another one: both sockets of
        # gRPC have SO_REUSEPORT. So have the kernel choose, and hold it until the service has it.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        if quiet:
            jaxlib.utils.absl_set_min_log_level(2)
        try:
            service = _jax.get_distributed_runtime_service(
                address,
                num_processes,
                heartbeat_timeout=_HEARTBEAT_TIMEOUT_S,
                shutdown_timeout=5,
                recoverable=True,
            )
        finally:
            if quiet:
                jaxlib.utils.absl_set_min_log_level(1)
    return address, service


def connect(address: str, num_processes: int, process_id: int) -> None:
    """`jax.distributed.initialize` for a rank whose coordinator runs in another process.

    JAX's own would start a second service in process 0; everything else is the same. Later calls of
    `jax.distributed.initialize`, as a program makes under Slurm or mpirun, do nothing.
    """
    jax.config.update("jax_enable_recoverability", True)
    state = _distributed.global_state
    if state.client is not None:
        raise RuntimeError("connect: jax.distributed is initialized already; call it once, first")
    state.coordinator_address = address
    state.num_processes = num_processes
    state.process_id = process_id
    state.client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=300,
        use_compression=True,
        heartbeat_timeout=_HEARTBEAT_TIMEOUT_S,
    )
    state.client.connect()
    state.initialize = _already_initialized  # type: ignore[method-assign]
    if devices := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        jax.config.update("jax_cuda_visible_devices", devices)
    partition = os.environ.get("JAX_PARTITION_INDEX")
    state.partition_index = None if partition is None else int(partition)


def _already_initialized(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Stands in for `jax.distributed.initialize` of a connected rank."""
    state = _distributed.global_state
    for name, asked, actual in (
        ("num_processes", num_processes, state.num_processes),
        ("process_id", process_id, state.process_id),
    ):
        if asked is not None and asked != actual:
            raise ValueError(
                f"jax.distributed.initialize: the launcher has made this process {state.process_id} of "
                f"{state.num_processes}, but the program passes {name}={asked}; pass none, or start it "
                "without the launcher"
            )


def coordination_client() -> Any | None:
    """The client of JAX's coordination service, or None when `jax.distributed` is not initialized."""
    return _distributed.global_state.client


# --- the XLA FFI ---------------------------------------------------------------------------------


def runtime_ffi_version() -> tuple[int, int]:
    """(major, minor) of the XLA FFI that the running jaxlib speaks, from the headers it ships."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


def check_ffi_version(built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Raises ImportError if handlers of version `built` can't run under `runtime`.

    XLA itself would queue such a handler and break the whole backend when it initializes.
    """
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise ImportError(
            f"jax_symmkv was built for XLA FFI {built[0]}.{built[1]}, but jaxlib "
            f"{jaxlib.version.__version__} speaks {runtime[0]}.{runtime[1]}; upgrade jaxlib, or rebuild "
            "jax_symmkv against headers that are no newer"
        )


@functools.cache
def register_targets() -> None:
    """Registers the custom call targets with XLA, once; touches no backend.

    Raises:
      ImportError: the running jaxlib can't take them. Nothing is registered then.
    """
    modules = [_core] if cuda_module_error() else [_core, cuda_module()]
    for module in modules:
        check_ffi_version(module.FFI_VERSION, runtime_ffi_version())
    for module in modules:
        for platform, targets in module.registrations().items():
            for name, capsule in targets.items():
                jax.ffi.register_ffi_target(name, capsule, platform=platform)


@functools.cache
def cuda_module_error() -> str | None:
    """Why there is no CUDA transport in this installation, or None; touches no GPU."""
    try:
        cuda_module()
    except ImportError as error:
        return f"jax_symmkv is installed without its CUDA transport ({error}); install it where nvcc is"
    return None


def cuda_module() -> Any:
    """The extension module `_cuda`; ImportError where it was built without nvcc."""
    return importlib.import_module("jax_symmkv._cuda")


def handler_device(device: jax.Device) -> int:
    """What XLA's DeviceOrdinal says of a device to the handlers of its platform."""
    return int(device.id if device.platform == "cpu" else device.local_hardware_id)


# --- shard_map: which axes are manual, and what varies over them ---------------------------------


def manual_mesh() -> tuple[jax.sharding.AbstractMesh | None, frozenset[str]]:
    """The mesh of the shard_map being traced and its manual axes; (None, {}) outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None, frozenset()
    return mesh, frozenset(mesh.manual_axes)


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """The mesh axes over which shard_map's check_vma takes any of the arrays to vary; empty without it."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        aval = jax.typeof(x)
        manual = getattr(aval, "manual_axis_type", None)  # since jax 0.10
        axes |= aval.vma if manual is None else manual.varying
    return axes


def vary_alike(arrays: Sequence[jax.Array], axes: frozenset[str]) -> list[jax.Array]:
    """The arrays, typed as varying over `axes` too; no operation in the compiled program."""
    aligned = []
    for x in arrays:
        lacking = tuple(sorted(axes - varying_axes(x)))
        aligned.append(jax.lax.pcast(x, lacking, to="varying") if lacking else x)
    return aligned


# --- transformations that an exchange can't have -------------------------------------------------

# An identity that stands before every call. It disappears in lowering; under vmap or grad its rules say
# what is wrong in this package's words, wherever in a nest of jits and scans the transformation applies.
_plain_p = jax.extend.core.Primitive("symmkv_operands")
_plain_p.multiple_results = True


def _plain_impl(*arrays: jax.Array, op: str) -> list[jax.Array]:
    return list(arrays)


def _plain_abstract(*avals: Any, op: str) -> list[Any]:
    return list(avals)


def _plain_batch(args: Any, dims: Any, *, op: str) -> Any:
    raise TypeError(
        f"{op}: vmap over an exchange is not supported: every rank makes one exchange with one plan; "
        "put the batch into the pages of one call, or call it once per element"
    )


def _plain_jvp(primals: Any, tangents: Any, *, op: str) -> Any:
    raise TypeError(
        f"{op}: an exchange is not differentiable; it serves prefill. Wrap its operands in "
        "jax.lax.stop_gradient"
    )


_plain_p.def_impl(_plain_impl)
_plain_p.def_abstract_eval(_plain_abstract)
jax.interpreters.batching.primitive_batchers[_plain_p] = _plain_batch
jax.interpreters.ad.primitive_jvps[_plain_p] = _plain_jvp
jax.interpreters.mlir.register_lowering(_plain_p, lambda ctx, *operands, op: operands)


def refuse_transforms(op: str, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, such that vmap and grad of what follows raise a TypeError that names `op`."""
    plain: list[jax.Array] = _plain_p.bind(*arrays, op=op)
    return plain


# --- process exit --------------------------------------------------------------------------------


def drain() -> None:
    """Waits for the programs in flight; their errors are the caller's to see.

    An exchange goes on when nobody holds its results any more. JAX then still has a token of this thread's
    last program with side effects, by device; `jax.effects_barrier` would stop at the first that failed.
    """
    tokens = _dispatch.runtime_tokens.output_runtime_tokens.values()
    for pending in (*jax.live_arrays(), *tokens):
        with contextlib.suppress(Exception):
            pending.block_until_ready()

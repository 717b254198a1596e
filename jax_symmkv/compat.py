"""The only file that knows JAX versions or touches jax._src and jaxlib internals."""

from __future__ import annotations

import os
import socket
from typing import Any

import jax
from jax._src import distributed as _distributed
from jaxlib import _jax

_HEARTBEAT_TIMEOUT_S = 100  # JAX's own default


# --- jax.distributed: a coordinator outside the ranks --------------------------------------------


def start_coordinator(num_processes: int) -> tuple[str, Any]:
    """Starts JAX's coordination service in this process, for ranks that it will spawn.

    A service that lives outside the ranks, in recoverable mode, lets the survivors of a rank's death go on.

    Returns:
      its address, and the service; call `.shutdown()` on it after the last rank has ended.
    """
    with socket.socket() as probe:  # the service takes no port 0
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = _jax.get_distributed_runtime_service(
        f"127.0.0.1:{port}",
        num_processes,
        heartbeat_timeout=_HEARTBEAT_TIMEOUT_S,
        shutdown_timeout=5,
        recoverable=True,
    )
    return f"127.0.0.1:{port}", service


def connect(address: str, num_processes: int, process_id: int) -> None:
    """`jax.distributed.initialize` for a rank whose coordinator runs in another process.

    JAX's own starts a second service in process 0; everything else is the same.
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
    partition = os.environ.get("JAX_PARTITION_INDEX")
    state.partition_index = None if partition is None else int(partition)


def coordination_client() -> Any | None:
    """The client of JAX's coordination service, or None when `jax.distributed` is not initialized."""
    return _distributed.global_state.client

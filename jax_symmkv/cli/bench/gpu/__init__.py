"""The bench on GPUs, one a rank: the JAX ranks first, then torch's, which bring an NCCL of their own."""

from __future__ import annotations

import importlib.util
from typing import Any

from jax_symmkv.cli.bench import options, platforms, ranks
from jax_symmkv.cli.bench.gpu.report import show

__all__ = ["measure", "show"]

# NVLink multicast needs privileges of the fabric that many machines don't give, so nobody has it.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# The slabs and torch's arrays are not XLA's memory.
_JAX_ENV = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **_NO_MULTICAST}
_TORCH_ENV = {"JAX_PLATFORMS": "cpu", **_NO_MULTICAST}
# NCCL has no deadline of its own.
_TORCH_TIMEOUT_S = 600.0


def measure(job: options.Options, num_ranks: int) -> tuple[dict[str, Any], int]:
    """The result of a run, and 0; or nothing, and the exit code of the JAX rank that failed."""
    platforms.check_enough_gpus(num_ranks)
    result, exit_code = ranks.run("jax_symmkv.cli.bench.gpu.rank", job, num_ranks, _JAX_ENV)
    if exit_code:
        return {}, exit_code
    if result["gpus"] == num_ranks:
        why = _add_torch(result, job, num_ranks)
    else:
        why = "NCCL takes no two ranks of one GPU"
    if why is not None:
        result["left_out"].append(f"torch: {why}")
    command = options.shown_command(num_ranks, job, "--platform gpu")
    return {"command": command, **result}, 0


def _add_torch(result: dict[str, Any], job: options.Options, num_ranks: int) -> str | None:
    """Adds torch's variants to those of the JAX ranks, or says why not."""
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    module = "jax_symmkv.cli.bench.gpu.torch_rank"
    found, exit_code = ranks.run(module, job, num_ranks, _TORCH_ENV, _TORCH_TIMEOUT_S)
    if exit_code:
        return f"its ranks failed with exit code {exit_code}"
    if "unusable" in found:
        return str(found["unusable"])
    result["versions"] |= found["versions"]
    for case, torch_case in zip(result["cases"], found["cases"], strict=True):
        case["variants"] |= torch_case["variants"]
    return None

"""Where the bench measures: on GPUs where they can be used, else on CPUs."""

from __future__ import annotations

import os

_GPU_NAMES = {"cuda", "gpu"}


def choose(asked: str | None) -> str:
    """ "gpu" or "cpu", as asked for or by default.

    Raises:
      ValueError: GPUs were asked for and can't be used.
    """
    if asked == "cpu":
        return "cpu"
    why = _no_gpu()
    if asked == "gpu" and why is not None:
        raise ValueError(f"--platform gpu can't be had: {why}")
    return "gpu" if why is None else "cpu"


def check_enough_gpus(num_ranks: int) -> None:
    """Every rank has a GPU of its own, unless the user has said which."""
    from jax_symmkv import compat  # imports jax

    num_gpus = compat.cuda_module().device_count()
    if num_gpus < num_ranks and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        raise ValueError(
            f"--ranks {num_ranks} needs as many GPUs, this process sees {num_gpus}; lower it, or set "
            "JAX_LOCAL_DEVICE_IDS=0 for ranks that share GPU 0"
        )


def _no_gpu() -> str | None:
    """Why no GPU can be used, or None."""
    allowed = {name.strip() for name in os.environ.get("JAX_PLATFORMS", "").split(",")} - {""}
    if allowed and not allowed & _GPU_NAMES:
        return f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} leaves GPUs out"
    from jax_symmkv import compat  # imports jax

    if (error := compat.cuda_module_error()) is not None:
        return error
    return None if compat.cuda_module().device_count() else "no GPU is seen"

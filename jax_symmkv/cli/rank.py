"""What a launched rank executes: jax.distributed is connected, then the user's program runs.

`python -m jax_symmkv.cli.rank script.py args...`, with the launcher's variables in the environment.
"""

from __future__ import annotations

import ctypes
import io
import os
import runpy
import signal
import sys
import types

# JAX's own name where it has one. A script may read them, too: they cost no backend.
COORDINATOR = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
LAUNCHER_PID = "SYMMKV_LAUNCHER_PID"

_PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_launcher(int(os.environ.pop(LAUNCHER_PID)))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A pipe's default, whole blocks, would hold lines back, and lose them with a killed rank.
            stream.reconfigure(line_buffering=True)
    from jax_symmkv import compat

    compat.connect(
        os.environ[COORDINATOR], int(os.environ[NUM_PROCESSES]), int(os.environ[PROCESS_ID])
    )
    run_as_python_would(sys.argv[1:])


def die_with_launcher(launcher_pid: int) -> None:
    """Has the kernel end this process when the launcher ends.

    A launcher that is killed by SIGKILL can end nobody, and its ranks would wait for each other
    forever. Set here and not between fork and exec: Python code there can deadlock, since the
    launcher has threads.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def run_as_python_would(argv: list[str]) -> None:
    """Runs `script.py args...` or `-m module args...` as `__main__`."""
    if argv[0] == "-m":
        sys.argv = argv[1:]  # run_module replaces the first by the module's path
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    script = os.path.abspath(argv[0])
    sys.argv = argv
    if not sys.flags.safe_path:  # so far it is the working directory, as for every `-m`
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    # Not runpy.run_path: it takes the module away before threads and atexit functions have ended.
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    with io.open_code(script) as source:
        code = compile(source.read(), script, "exec")
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()

"""Runs a script on several ranks of this machine, connected by jax.distributed."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_symmkv.cli.rank import COORDINATOR, LAUNCHER_PID, NUM_PROCESSES, PROCESS_ID
from jax_symmkv.cli.supervise import Rank, Supervisor

EXIT_BAD_INPUT = 2
EXIT_TIMED_OUT = 124  # as timeout(1)

# Gloo's greeting on stdout, which also lands in the middle of lines.
_NOISE = re.compile(
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    r"Expected number of connected peer ranks is : \d+"
)


@dataclass(frozen=True)
class RankResult:
    """How a rank ended.

    Attributes:
      exit_code: as subprocess has it: negative for the signal that ended the rank.
      output: with `capture`, its stdout and stderr, line after line as they came.
    """

    rank: int
    exit_code: int
    output: str


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
      first_failed: the rank that failed before any other.
      timed_out: the deadline passed with ranks still running.
      signal: the last SIGINT or SIGTERM that came, and went on to the ranks.
      notes: what the launcher had to say, a line each.
    """

    ranks: tuple[RankResult, ...]
    first_failed: int | None
    timed_out: bool
    signal: int | None
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + signal for a rank ended by a signal, 124 after the deadline."""
        if self.timed_out:
            return EXIT_TIMED_OUT
        if self.first_failed is None:
            return 0
        code = self.ranks[self.first_failed].exit_code
        return code if code > 0 else 128 - code


def run_ranks(
    argv: Sequence[str],
    num_ranks: int,
    *,
    devices_per_rank: int | None = None,
    timeout_s: float | None = None,
    grace_s: float = 10.0,
    env: Mapping[str, str] | None = None,
    prefix: bool = True,
    capture: bool = False,
) -> RunResult:
    """Runs a program on `num_ranks` processes, and returns when the last of them has ended.

    Each of them is connected to jax.distributed; `jax.distributed.initialize()` in the program is
    allowed and does nothing. Ranks don't die of a peer's death; if they don't end by themselves in
    `grace_s`, they are ended.

    Args:
      argv: what would follow `python`: `["script.py", ...]` or `["-m", "module", ...]`.
      devices_per_rank: CPU devices, or GPUs, of a rank; None leaves the CPU's to the environment,
        and gives one GPU.
      timeout_s: deadline of the run; None for none.
      grace_s: time for the other ranks to end after one has failed.
      env: environment variables on top of this process's.
      prefix: print each line as `[rank] line`. Without it, ranks write straight to the stdout and
        stderr of this process, a terminal perhaps.
      capture: collect the ranks' output in the result instead of printing it.

    Raises:
      ValueError, FileNotFoundError: an argument that cannot be right; nothing was started.
    """
    _check(argv, num_ranks, devices_per_rank, timeout_s, grace_s)
    from jax_symmkv import compat  # imports jax: not before the arguments are known to be good

    captured: list[list[str]] = [[] for _ in range(num_ranks)]
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if not capture:
            print(f"launch: {text}", file=sys.stderr, flush=True)

    def emit(number: int, stream: str, line: str) -> None:
        if line and not (line := _NOISE.sub("", line)):
            return
        if capture:
            captured[number].append(f"{line}\n")
        else:
            out = sys.stdout if stream == "stdout" else sys.stderr
            print(f"[{number}] {line}", file=out, flush=True)

    supervisor = Supervisor(emit, note, timeout_s, grace_s)
    environment = {**os.environ, **(env or {})}
    address, service = compat.start_coordinator(num_ranks)
    try:
        supervisor.run(
            Rank(
                number,
                [sys.executable, "-m", "jax_symmkv.cli.rank", *argv],
                _rank_env(environment, address, number, num_ranks, devices_per_rank),
                piped=prefix or capture,
            )
            for number in range(num_ranks)
        )
    finally:
        service.shutdown()
    return RunResult(
        ranks=tuple(
            RankResult(rank.number, rank.reap(), "".join(captured[rank.number]))
            for rank in supervisor.ranks
        ),
        first_failed=supervisor.first_failed.number if supervisor.first_failed else None,
        timed_out=supervisor.timed_out,
        signal=supervisor.received,
        notes=tuple(notes),
    )


def _check(
    argv: Sequence[str],
    num_ranks: int,
    devices_per_rank: int | None,
    timeout_s: float | None,
    grace_s: float,
) -> None:
    if num_ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, got {num_ranks}; pass -n 2, say")
    if devices_per_rank is not None and devices_per_rank < 1:
        raise ValueError(f"devices per rank must be at least 1, got {devices_per_rank}")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"the timeout must be above 0 s, got {timeout_s:g}; leave it out for none")
    if not grace_s >= 0:
        raise ValueError(f"the grace must be from 0 s on, got {grace_s:g}")
    if not argv:
        raise ValueError("a program is required, got none; name a script.py, or -- -m module")
    if argv[0] == "-m":
        if len(argv) < 2:
            raise ValueError("-m requires the name of a module, got none")
    elif argv[0].startswith("-"):
        raise ValueError(f"a program must be a script, or -- -m module; got the option {argv[0]!r}")
    elif not os.path.isfile(argv[0]):
        raise FileNotFoundError(
            f"script {argv[0]!r} is no file, seen from {os.getcwd()}; check its path"
        )


def _rank_env(
    env: Mapping[str, str], address: str, number: int, num_ranks: int, devices: int | None
) -> dict[str, str]:
    first = number * (devices or 1)
    rank_env = {
        # GPUs: every rank its own, unless the user has said which. Means nothing to CPU devices.
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(first + i) for i in range(devices or 1)),
        **env,
        COORDINATOR: address,
        NUM_PROCESSES: str(num_ranks),
        PROCESS_ID: str(number),
        LAUNCHER_PID: str(os.getpid()),
    }
    if devices is not None:  # the last of several flags counts
        flag = f"--xla_force_host_platform_device_count={devices}"
        rank_env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
    return rank_env


# --- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a script on several ranks of this machine, connected by jax.distributed. JAX is "
        "imported before the script, so configure it by environment variables here or by "
        "jax.config there."
    )
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of processes")
    parser.add_argument(
        "--devices-per-rank", type=int, metavar="K", help="CPU devices, or GPUs, of each rank"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        metavar="S",
        help="end the run after S seconds, with exit code 124",
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        metavar="S",
        default=10.0,
        help="when a rank has failed, let the others go on for S seconds (default: 10)",
    )
    parser.add_argument(
        "--no-prefix", action="store_true", help="don't put [rank] before each line of output"
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="[--] script.py args...",
        help="the script and its arguments; or -- -m module args...",
    )


def run(args: argparse.Namespace) -> int:
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    try:
        result = run_ranks(
            program,
            args.ranks,
            devices_per_rank=args.devices_per_rank,
            timeout_s=args.timeout_s,
            grace_s=args.grace_s,
            prefix=not args.no_prefix,
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"launch: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # `launch ... | head` has seen enough; the ranks have been ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or exiting fails, too
        return 128 + signal.SIGPIPE
    return result.exit_code

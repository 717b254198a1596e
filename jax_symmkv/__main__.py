"""The command line: `python -m jax_symmkv COMMAND`, or `symmkv COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Each is a module of jax_symmkv.cli with add_arguments(parser) and run(args) -> exit code, imported
# only when it is asked for.
COMMANDS = {
    "demo": "replay requests as context-parallel prefill on this machine's CPUs, and verify it",
    "bench": "time compose against XLA's collectives and a plain memcpy",
    "launch": "run a script on several ranks connected by jax.distributed",
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        command = importlib.import_module(f"jax_symmkv.cli.{argv[0]}")
        parser = argparse.ArgumentParser(prog=f"python -m jax_symmkv {argv[0]}")
        command.add_arguments(parser)
        exit_code: int = command.run(parser.parse_args(argv[1:]))
        return exit_code
    parser = argparse.ArgumentParser(
        prog="python -m jax_symmkv",
        description="Compose paged KV across ranks inside jitted JAX programs.",
        epilog="COMMAND --help says more.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    parser.parse_args(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())

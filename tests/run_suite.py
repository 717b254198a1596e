"""Runs the registered tests of one or more suites.

python tests/run_suite.py unit distributed faults
python tests/run_suite.py distributed --shard 1/2 -- -x -k compose
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script, sys.path has tests/ and not its parent
    sys.path.insert(0, str(ROOT))

from tests import registry  # noqa: E402

EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    args = _parser().parse_args(argv[:split])
    try:
        files = _select(args.suites, args.shard)
    except registry.RegistryError as error:
        print(f"run_suite: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if args.list:
        _print_table(files)
        return 0
    # No cache: a shard must not depend on what an earlier run left.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["--no-skips"] if args.no_skips else []
    return subprocess.call([*command, *argv[split + 1 :], *(f.name for f in files)], cwd=ROOT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run_suite.py",
        description="Runs the tests of one or more suites; what follows -- goes to pytest.",
    )
    parser.add_argument("suites", nargs="+", metavar="suite", help=", ".join(registry.SUITES))
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="part I of N, by estimated time"
    )
    parser.add_argument("--list", action="store_true", help="print the files, and run nothing")
    parser.add_argument("--no-skips", action="store_true", help="fail if a test is skipped")
    return parser


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return int(index), int(count)
    raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, such as 1/2; got {text!r}")


def _select(suites: Sequence[str], part: tuple[int, int]) -> list[registry.RegisteredFile]:
    """The files to run. The whole tree is checked, so that no file goes unregistered unseen."""
    for suite in suites:
        if suite not in registry.SUITES:
            raise registry.RegistryError(
                f"suite must be one of {', '.join(registry.SUITES)}; got {suite!r}"
            )
    every = registry.discover()
    wanted = [f for suite in dict.fromkeys(suites) for f in every if f.declared.suite == suite]
    files = registry.shard(wanted, *part)
    if not files:
        raise registry.RegistryError(
            f"no test file in shard {part[0]}/{part[1]} of {', '.join(suites)} "
            f"({len(wanted)} in all shards); ask for fewer shards or another suite"
        )
    return files


def _print_table(files: Sequence[registry.RegisteredFile]) -> None:
    width = max(len(file.name) for file in files)
    for file in files:
        said = file.declared
        needs = f"  needs {', '.join(said.needs)}" if said.needs else ""
        print(
            f"{file.name:{width}}  {said.suite:13}  {said.ranks:2} ranks  {said.est_s:6.1f} s{needs}"
        )
    print(f"{len(files)} files, {sum(file.declared.est_s for file in files):.1f} s")


if __name__ == "__main__":
    sys.exit(main())

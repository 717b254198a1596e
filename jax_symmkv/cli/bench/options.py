"""What to measure: the options of the command, the same in the parent and in its ranks."""

from __future__ import annotations

import argparse
import dataclasses

DEFAULT_SIZES = ("64kB", "256kB", "1MB", "4MB", "16MB", "64MB")
DEFAULT_REPEATS = 21

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclasses.dataclass(frozen=True)
class Options:
    """A run.

    Attributes:
      sizes_nbytes: bytes that each rank receives in an exchange, one entry per size.
      repeats: samples of every variant, at every size.
    """

    sizes_nbytes: tuple[int, ...]
    repeats: int

    def argv(self) -> list[str]:
        """The command line that `parse` reads back as these options."""
        sizes = [format_size(nbytes) for nbytes in self.sizes_nbytes]
        return ["--sizes", *sizes, "--repeats", str(self.repeats)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=DEFAULT_SIZES,
        metavar="SIZE",
        help="what each rank receives in an exchange, as 64kB or 16MB, in decimal units "
        f"(default: {' '.join(DEFAULT_SIZES)})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=DEFAULT_REPEATS,
        metavar="N",
        help=f"samples of each variant at each size (default: {DEFAULT_REPEATS})",
    )


def parse(args: argparse.Namespace) -> Options:
    """Raises ValueError for a size or a number that can't be."""
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    return Options(tuple(parse_size(size) for size in args.sizes), args.repeats)


def parse_size(text: str) -> int:
    number = text.rstrip("kMGB")
    unit = text[len(number) :]
    try:
        nbytes = round(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise ValueError(
            f"a size must be a number and one of {', '.join(_UNITS)}, such as 64kB; got {text!r}"
        ) from None
    if nbytes < 1:
        raise ValueError(f"a size must be at least 1B, got {text!r}")
    return nbytes


def format_size(nbytes: int) -> str:
    """Exact: `parse_size` gives the same number back."""
    for unit in ("GB", "MB", "kB"):
        if nbytes % (_UNITS[unit] // 1000) == 0 and nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.10g}{unit}"
    return f"{nbytes}B"


def shown_command(num_ranks: int, options: Options) -> str:
    """For the record: without the names of files, which are of one machine."""
    return " ".join(["python -m jax_symmkv bench --ranks", str(num_ranks), *options.argv()])

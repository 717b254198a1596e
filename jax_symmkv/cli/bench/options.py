"""What to measure: the options of the command, the same in the parent and in its ranks."""

from __future__ import annotations

import argparse
import dataclasses

PLATFORMS = ("cpu", "gpu")
# On GPUs whole pages of 73,728 bytes.
DEFAULT_SIZES = {
    "cpu": ("64kB", "256kB", "1MB", "4MB", "16MB", "64MB"),
    "gpu": ("73728B", "294912B", "1179648B", "4718592B", "9437184B", "37748736B"),
}
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
        metavar="SIZE",
        help="what each rank receives in an exchange, as 64kB or 16MB, in decimal units (default: "
        f"{' '.join(DEFAULT_SIZES['cpu'])}; on GPUs: {' '.join(DEFAULT_SIZES['gpu'])})",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=DEFAULT_REPEATS,
        metavar="N",
        help=f"samples of each variant at each size (default: {DEFAULT_REPEATS})",
    )


def parse(args: argparse.Namespace, platform: str) -> Options:
    """The platform decides the default sizes.

    Raises:
      ValueError: a size or a number can't be.
    """
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    sizes = DEFAULT_SIZES[platform] if args.sizes is None else args.sizes
    return Options(tuple(parse_size(size) for size in sizes), args.repeats)


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


def shown_command(num_ranks: int, options: Options, *more: str) -> str:
    """For the record: without the names of files, which are of one machine."""
    return " ".join(
        ["python -m jax_symmkv bench", *more, "--ranks", str(num_ranks), *options.argv()]
    )

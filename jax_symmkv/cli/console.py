"""What a run prints: lines and progress on rank 0's behalf, and tables in plain text."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

_PLAIN_PROGRESS_S = 5.0


def claim_stdout() -> TextIO:
    """Returns this process's stdout, and closes file descriptor 1 to everything else.

    XLA's collectives greet on it from C++ (Gloo, once a connection), in the middle of the progress bar.
    """
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return out


class Console:
    """Prints on rank 0's behalf; `out` None prints nothing."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out

    def line(self, text: str = "") -> None:
        if self._out is not None:
            print(text, file=self._out, flush=True)

    @contextlib.contextmanager
    def progress(self, what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
        """Yields a function to call after each of `total` steps."""
        if self._out is None:
            yield lambda: None
        elif self._out.isatty() and importlib.util.find_spec("rich"):
            from rich import console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn(what),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(unit),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=console.Console(file=self._out)) as bar:
                task = bar.add_task(what, total=total)
                yield lambda: bar.advance(task)
        else:
            yield self._plain_progress(what, total, unit)

    def _plain_progress(self, what: str, total: int, unit: str) -> Callable[[], None]:
        done = 0
        shown_at = time.monotonic()

        def advance() -> None:
            nonlocal done, shown_at
            done += 1
            if done == total or time.monotonic() - shown_at > _PLAIN_PROGRESS_S:
                shown_at = time.monotonic()
                self.line(f"{what}: {done}/{total} {unit}")

        return advance


def plain_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: the first row, which names the columns, a rule, the other rows."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return [heading, "  ".join("-" * width for width in widths), *lines]

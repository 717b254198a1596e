"""What the demo prints: a progress bar, the table, the verdict. Rank 0 prints, the others are silent."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from jax_symmkv.cli.demo.verify import LOGIT_TOLERANCE, Verdict

_COLUMNS = (
    "pages/batch",
    "batches",
    "tokens",
    "pages exchanged",
    "bytes moved",
    "compose µs",
    "collective µs",
    "speedup",
)
_PLAIN_PROGRESS_S = 5.0


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """One batch of the run.

    Attributes:
      num_pages: current pages of the batch: what one exchange, of one layer, composes.
      compose_us, collective_us: an exchange on the slowest rank.
    """

    num_tokens: int
    num_pages: int
    compose_us: float
    collective_us: float


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


class Report:
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
            from rich.console import Console
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
            with Progress(*columns, console=Console(file=self._out)) as bar:
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

    def table(
        self, results: Sequence[BatchResult], *, num_layers: int, cp_size: int, page_nbytes: int
    ) -> None:
        """One row per size of batch and one for all of them; times are medians over the batches."""
        classes = sorted({_size_class(r.num_pages) for r in results})
        groups = [
            (_size_label(c), [r for r in results if _size_class(r.num_pages) == c]) for c in classes
        ]
        if len(groups) > 1:
            groups.append(("all", list(results)))
        rows = []
        for label, group in groups:
            exchanged_pages = sum(r.num_pages for r in group) * num_layers
            compose_us = _median([r.compose_us for r in group])
            collective_us = _median([r.collective_us for r in group])
            rows.append(
                (
                    label,
                    str(len(group)),
                    f"{sum(r.num_tokens for r in group):,}",
                    f"{exchanged_pages:,}",
                    # A page goes from its writer to every other rank.
                    _format_nbytes(exchanged_pages * page_nbytes * (cp_size - 1)),
                    f"{compose_us:,.0f}",
                    f"{collective_us:,.0f}",
                    f"{collective_us / compose_us:.1f}x",
                )
            )
        widths = [max(len(row[i]) for row in (_COLUMNS, *rows)) for i in range(len(_COLUMNS))]
        rule = "  ".join("-" * width for width in widths)
        self.line(_align(_COLUMNS, widths))
        self.line(rule)
        for row in rows:
            if row[0] == "all":
                self.line(rule)
            self.line(_align(row, widths))

    def verdict(self, verdict: Verdict, *, num_batches: int, num_layers: int, cp_size: int) -> None:
        """Two lines, `verified:` or `FAILED:`."""
        buffers = f"{num_batches} batches x {num_layers} layers x {cp_size} ranks"
        if verdict.first_difference is None:
            self.line(
                f"verified: dense buffers ({buffers}) equal the collective path's, byte for byte"
            )
        else:
            batch, layer, rank = verdict.first_difference
            self.line(
                f"FAILED: dense buffers ({buffers}): {verdict.differing_pages} pages differ from the "
                f"collective path's, the first in batch {batch}, layer {layer}, on rank {rank}"
            )
        wrong = verdict.wrong_logits or verdict.wrong_tokens
        firm = verdict.num_outputs - verdict.near_ties
        self.line(
            f"{'FAILED' if wrong else 'verified'}: outputs of {verdict.num_outputs} requests against a "
            f"one-rank run: largest logit difference {verdict.largest_logit_difference:.1e} (tolerance "
            f"{LOGIT_TOLERANCE:.0e}, exceeded by {verdict.wrong_logits}); greedy token equal in "
            f"{firm - verdict.wrong_tokens} of {firm} ({verdict.near_ties} near-ties left out)"
        )


def _format_nbytes(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _size_class(num_pages: int) -> int:
    return (num_pages - 1).bit_length()


def _size_label(size_class: int) -> str:
    return "1" if size_class == 0 else f"{(1 << (size_class - 1)) + 1}-{1 << size_class}"


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

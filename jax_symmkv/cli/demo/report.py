"""What the demo prints: a progress bar, the table, the verdict. Rank 0 prints, the others are silent."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from jax_symmkv.cli.console import Console, plain_table
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


class Report(Console):
    """What rank 0 says of a run; the other ranks' `out` is None."""

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
            compose_us = statistics.median(r.compose_us for r in group)
            collective_us = statistics.median(r.collective_us for r in group)
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
        heading, rule, *lines = plain_table((_COLUMNS, *rows))
        if len(groups) > 1:
            lines.insert(-1, rule)
        for line in (heading, rule, *lines):
            self.line(line)

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


def _size_class(num_pages: int) -> int:
    return (num_pages - 1).bit_length()


def _size_label(size_class: int) -> str:
    return "1" if size_class == 0 else f"{(1 << (size_class - 1)) + 1}-{1 << size_class}"

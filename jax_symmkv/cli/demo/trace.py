"""Requests of a Mooncake-format trace, and their batches under a token budget."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

EXCERPT = pathlib.Path(__file__).with_name("mooncake_excerpt.jsonl")
HASH_BLOCK_TOKENS = 512  # tokens behind one entry of hash_ids


class TraceError(ValueError):
    """A trace that cannot be read, or holds too few requests."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
      input_tokens: length of its prompt.
      hash_ids: one id per HASH_BLOCK_TOKENS of the prompt, the last block may be partial.
    """

    input_tokens: int
    hash_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that are prefilled together.

    Attributes:
      requests: their indices in the list of requests.
      extend_lens: tokens that each of them prefills, after the cut to the budget.
    """

    requests: tuple[int, ...]
    extend_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.extend_lens)


def read_trace(path: pathlib.Path, num_requests: int) -> list[Request]:
    """The first `num_requests` requests of a trace: one JSON object a line, see the excerpt's NOTICE."""
    if num_requests < 1:
        raise TraceError(f"--requests must be at least 1, got {num_requests}")
    try:
        with path.open(encoding="utf-8") as lines:
            requests = _parse(lines, path, num_requests)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"the trace {path} must be UTF-8 text: {error}") from error
    if len(requests) < num_requests:
        raise TraceError(
            f"--requests {num_requests} needs as many requests, but {path.name} holds "
            f"{len(requests)}; ask for fewer, or pass a longer trace with --trace"
        )
    return requests


def _parse(lines: Iterable[str], path: pathlib.Path, num_requests: int) -> list[Request]:
    requests: list[Request] = []
    for number, line in enumerate(lines, start=1):
        if len(requests) == num_requests:
            break
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            request = Request(
                input_tokens=int(fields["input_length"]),
                hash_ids=tuple(int(block) for block in fields["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{path}:{number} must be a JSON object with input_length and hash_ids, "
                f"got {line.strip()[:60]!r} ({type(error).__name__}: {error})"
            ) from error
        if not 0 < request.input_tokens <= HASH_BLOCK_TOKENS * len(request.hash_ids):
            raise TraceError(
                f"{path}:{number} needs 1 <= input_length <= {HASH_BLOCK_TOKENS} x hash_ids, "
                f"got {request.input_tokens} tokens and {len(request.hash_ids)} hash_ids"
            )
        requests.append(request)
    return requests


def make_batches(
    requests: Sequence[Request], *, token_budget: int, max_requests: int
) -> list[Batch]:
    """Batches of at most `token_budget` tokens and `max_requests` requests; every request is in one.

    Each batch takes the oldest waiting request, then those behind it that still fit whole. A request
    that is longer than the budget is cut to it: it fills a batch alone.
    """
    if token_budget < 1:
        raise TraceError(f"--token-budget must be at least 1, got {token_budget}")
    lengths = [min(request.input_tokens, token_budget) for request in requests]
    waiting = list(range(len(requests)))
    batches = []
    while waiting:
        chosen: list[int] = []
        room_tokens = token_budget
        for index in waiting:
            if len(chosen) < max_requests and lengths[index] <= room_tokens:
                chosen.append(index)
                room_tokens -= lengths[index]
        batches.append(Batch(tuple(chosen), tuple(lengths[i] for i in chosen)))
        taken = set(chosen)
        waiting = [index for index in waiting if index not in taken]
    return batches


def prompt_tokens(request: Request, num_tokens: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """The first `num_tokens` token ids of a request's prompt, int32[num_tokens].

    The trace has no text: random ids stand for it, drawn per block from its hash id, so that blocks
    that are equal in the trace are equal here.
    """
    num_blocks = -(-num_tokens // HASH_BLOCK_TOKENS)
    blocks = [
        np.random.default_rng(block).integers(vocab_size, size=HASH_BLOCK_TOKENS, dtype=np.int32)
        for block in request.hash_ids[:num_blocks]
    ]
    return np.concatenate(blocks)[:num_tokens]

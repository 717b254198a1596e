"""Reading a trace, and cutting its requests into batches."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from jax_symmkv.cli.demo import trace
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=2)


def write_trace(directory: pathlib.Path, *lines: str) -> pathlib.Path:
    path = directory / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def request_line(input_tokens: int) -> str:
    blocks = list(range(-(-input_tokens // trace.HASH_BLOCK_TOKENS)))
    return json.dumps({"input_length": input_tokens, "hash_ids": blocks})


def make_requests(*input_tokens: int) -> list[trace.Request]:
    return [trace.Request(n, tuple(range(-(-n // trace.HASH_BLOCK_TOKENS)))) for n in input_tokens]


def test_read_trace_excerpt_has_64_requests():
    requests = trace.read_trace(trace.EXCERPT, 64)
    assert [r.input_tokens for r in requests[:4]] == [6758, 7322, 7236, 2290]
    with pytest.raises(trace.TraceError, match=r"--requests 65 .* holds 64; .*--trace"):
        trace.read_trace(trace.EXCERPT, 65)


def test_read_trace_stops_after_the_requests_asked_for(tmp_path):
    path = write_trace(tmp_path, request_line(5), "", request_line(600), "not JSON")
    assert [r.input_tokens for r in trace.read_trace(path, 2)] == [5, 600]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not JSON", r"trace.jsonl:2 must be a JSON object"),
        ('{"input_length": 5}', r"trace.jsonl:2 must be a JSON object .*hash_ids"),
        ('["input_length"]', r"trace.jsonl:2 must be a JSON object"),
        ('{"input_length": 0, "hash_ids": []}', r"trace.jsonl:2 needs 1 <= input_length"),
        ('{"input_length": 513, "hash_ids": [1]}', r"got 513 tokens and 1 hash_ids"),
    ],
)
def test_read_trace_names_a_bad_line(tmp_path, line, message):
    path = write_trace(tmp_path, request_line(5), line)
    with pytest.raises(trace.TraceError, match=message):
        trace.read_trace(path, 2)


def test_read_trace_names_a_missing_or_binary_file(tmp_path):
    with pytest.raises(trace.TraceError, match=r"nowhere.jsonl: No such file"):
        trace.read_trace(tmp_path / "nowhere.jsonl", 1)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(trace.TraceError, match="UTF-8"):
        trace.read_trace(tmp_path / "binary", 1)


def test_make_batches_fills_up_with_later_requests_that_fit():
    batches = trace.make_batches(make_requests(60, 50, 30, 10), token_budget=100, max_requests=8)
    assert [b.requests for b in batches] == [(0, 2, 3), (1,)]
    assert [b.extend_lens for b in batches] == [(60, 30, 10), (50,)]
    assert [b.num_tokens for b in batches] == [100, 50]


def test_make_batches_cuts_a_prompt_beyond_the_budget():
    batches = trace.make_batches(make_requests(700, 20), token_budget=100, max_requests=8)
    assert [b.extend_lens for b in batches] == [(100,), (20,)]


def test_make_batches_keeps_to_max_requests():
    batches = trace.make_batches(make_requests(*[1] * 5), token_budget=100, max_requests=2)
    assert [b.requests for b in batches] == [(0, 1), (2, 3), (4,)]


def test_make_batches_takes_every_request_of_the_excerpt_once():
    requests = trace.read_trace(trace.EXCERPT, 64)
    batches = trace.make_batches(requests, token_budget=4096, max_requests=8)
    assert sorted(i for b in batches for i in b.requests) == list(range(64))
    assert all(b.num_tokens <= 4096 and len(b.requests) <= 8 for b in batches)
    assert any(len(b.requests) > 1 for b in batches)


def test_prompt_tokens_are_equal_where_hash_ids_are():
    first = trace.prompt_tokens(trace.Request(1100, (0, 1, 2)), 1100, 1024)
    second = trace.prompt_tokens(trace.Request(1024, (0, 3)), 700, 1024)
    assert first.shape == (1100,) and second.shape == (700,)
    assert first.dtype == np.int32 and first.min() >= 0 and first.max() < 1024
    np.testing.assert_array_equal(first[:512], second[:512])
    assert (first[512:700] != second[512:700]).any()

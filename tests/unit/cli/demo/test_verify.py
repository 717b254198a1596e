"""The demo's verdict: what it must call a difference."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_symmkv as symmkv
from jax_symmkv.cli import collect
from jax_symmkv.cli.demo import model, reference, report, verify
from jax_symmkv.cli.demo.trace import Batch
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=8)

CONFIG = model.ModelConfig(num_layers=2, vocab_size=64)
PAGE = (16, CONFIG.num_kv_heads, CONFIG.head_dim)
PROMPT = np.arange(20, dtype=np.int32)


@pytest.fixture
def verifier():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("cp",))
    return verify.Verifier(mesh, CONFIG, model.init_params(CONFIG, seed=0))


@pytest.fixture
def right_logits():
    params = model.init_params(CONFIG, seed=0)
    return reference.last_token_logits(params, PROMPT, CONFIG).copy()


def dense_verdict(verifier, after):
    """The verdict on 2 layers of 3 pages, all zeros before compose."""
    before = jnp.zeros((2, 3, *PAGE), CONFIG.kv_dtype)
    sizes = {"page_size": 16, "cp_size": 1, "max_current_pages": 2, "num_dense_pages": 3}
    plan = symmkv.build_plan([0], [20], **sizes)
    verifier.check_dense((before, before), (before, after), plan)
    return verifier.verdict()


def output_verdict(verifier, logits):
    logits = jnp.pad(jnp.asarray(logits)[None], ((0, 7), (0, 0)))
    verifier.check_dense(*[(jnp.zeros((2, 3, *PAGE), CONFIG.kv_dtype),) * 2] * 2, empty_plan())
    verifier.keep_outputs(Batch((0,), (20,)), [PROMPT], logits)
    verifier.check_outputs(lambda: None)
    return verifier.verdict()


def empty_plan():
    sizes = {"page_size": 16, "cp_size": 1, "max_current_pages": 2, "num_dense_pages": 3}
    return symmkv.build_plan([], [], **sizes)


def printed(verdict):
    out = io.StringIO()
    report.Report(out).verdict(verdict, num_batches=1, num_layers=2, cp_size=1)
    return out.getvalue()


def test_verdict_equal_dense_is_ok(verifier):
    verdict = dense_verdict(verifier, jnp.zeros((2, 3, *PAGE), CONFIG.kv_dtype))
    assert verdict.ok and verdict.differing_pages == 0
    assert "FAILED" not in printed(verdict)


def test_verdict_negative_zero_is_a_difference_also_in_an_unused_page(verifier):
    after = jnp.zeros((2, 3, *PAGE), CONFIG.kv_dtype).at[1, 2, 0, 0, 0].set(-0.0)
    verdict = dense_verdict(verifier, after)
    assert not verdict.ok
    assert (verdict.differing_pages, verdict.first_difference) == (1, (0, 1, 0))
    assert "FAILED: dense buffers" in printed(verdict)
    assert "1 pages differ" in printed(verdict) and "batch 0, layer 1, on rank 0" in printed(
        verdict
    )


def test_verdict_right_logits_are_ok(verifier, right_logits):
    verdict = output_verdict(verifier, right_logits)
    assert verdict.ok and verdict.num_outputs == 1
    assert verdict.largest_logit_difference == 0


@pytest.mark.parametrize("error", [2 * verify.LOGIT_TOLERANCE, np.nan])
def test_verdict_one_logit_off_is_a_difference(verifier, right_logits, error):
    right_logits[7] += error
    verdict = output_verdict(verifier, right_logits)
    assert not verdict.ok and verdict.wrong_logits == 1
    assert "FAILED: outputs" in printed(verdict)


def test_verdict_another_greedy_token_is_a_difference(verifier, right_logits):
    verdict = output_verdict(verifier, -right_logits)
    assert not verdict.ok and verdict.wrong_tokens == 1


def test_near_tie_may_have_another_greedy_token():
    expected = np.array([1.0, 1.0 + verify.LOGIT_TOLERANCE, 0.0], np.float32)
    actual = np.array([1.0, 1.0 - verify.LOGIT_TOLERANCE / 4, 0.0], np.float32)
    _, same_token, near_tie = verify.compare_logits(actual, expected)
    assert near_tie and not same_token


def test_from_every_process_of_one_process_adds_an_axis():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(collect.from_every_process(values), values[None])

"""Bad arguments are refused before any rank starts."""

from __future__ import annotations

import argparse
import pathlib

import pytest

from jax_symmkv.__main__ import main
from jax_symmkv.cli.demo import options
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--token-budget=0"], "--token-budget must be at least 1, got 0"),
        (["--requests=-1"], "--requests must be at least 1, got -1"),
        (["--ranks=0"], "--ranks must be at least 1, got 0"),
        (["--requests=1000"], "holds 64"),
        (["--trace=nowhere.jsonl"], "nowhere.jsonl: No such file"),
    ],
)
def test_demo_bad_argument_is_said_in_one_line(argv, message, capfd):
    assert main(["demo", *argv]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert message in err and len(err.splitlines()) == 1


def test_options_survive_the_way_to_the_ranks():
    job = options.Options(3, 2, 16, 200, pathlib.Path("a trace.jsonl"))
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    assert options.parse(parser.parse_args(job.argv())) == job

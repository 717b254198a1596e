"""The registration of test files, and the runner that reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import registry, run_suite
from tests.registry import Declaration, RegisteredFile, RegistryError, register_ci

pytestmark = register_ci(suite="unit", est_s=4)

UNIT = "from tests.registry import register_ci\npytestmark = register_ci(suite='unit', est_s=1)\n"
PASSES = UNIT + "def test_passes(): pass\n"
SKIPS = UNIT + "import pytest\ndef test_skips(): pytest.skip('for lack of a reason')\n"
BOTH = PASSES + SKIPS.removeprefix(UNIT)

Tree = Callable[[dict[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files below a new tests/ directory with the real conftest, registry and runner."""

    def write(files: dict[str, str]) -> Path:
        root = tmp_path / "tests"
        root.mkdir()
        for shared in ("__init__.py", "conftest.py", "registry.py", "run_suite.py"):
            (root / shared).write_text((registry.TESTS / shared).read_text())
        for name, source in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(source)
        return root

    return write


def run(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "run_suite.py"), *args]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # for speed
    return subprocess.run(command, capture_output=True, text=True, cwd=root.parent, env=env)


# --- one declaration -----------------------------------------------------------------------------


def test_declaration_is_read_without_importing_the_file() -> None:
    source = """
import a_module_that_no_machine_has
pytestmark = register_ci(
    suite="kernels-2-gpu", ranks=2, needs=("nvcc", "nvlink"), est_s=12.5
)
"""
    assert registry.parse(source, "x.py") == Declaration(
        suite="kernels-2-gpu", ranks=2, needs=("nvcc", "nvlink"), est_s=12.5
    )


def test_mark_carries_the_same_declaration() -> None:
    mark = register_ci(suite="faults", ranks=4, est_s=2)
    assert mark.args == (Declaration(suite="faults", ranks=4, est_s=2),)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", r"x\.py: a test file needs one `pytestmark = register_ci"),
        ("register_ci(suite='unit', est_s=1)", "got 0"),
        ("def f():\n    pytestmark = register_ci(suite='unit', est_s=1)", "got 0"),
        (UNIT + UNIT, "got 2"),
        ("pytestmark = register_ci('unit', est_s=1)", "keyword arguments only"),
        ("pytestmark = register_ci(**said)", "keyword arguments only"),
        ("pytestmark = register_ci(suite='unit', est_s=2 * N)", r"x\.py:1: est_s .* got 2 \* N"),
        ("pytestmark = register_ci(suite='unit')", "est_s"),
        ("pytestmark = register_ci(est_s=1)", "suite"),
        ("pytestmark = register_ci(suite='unit', est_s=1, gpu=1)", "gpu"),
        ("pytestmark = register_ci(suite='units', est_s=1)", "one of unit, .* got 'units'"),
        ("pytestmark = register_ci(suite='unit', est_s=0)", "above 0 seconds, got 0"),
        ("pytestmark = register_ci(suite='unit', est_s='1')", "above 0 seconds, got '1'"),
        ("pytestmark = register_ci(suite='unit', est_s=1, ranks=0)", "from 1 on, got 0"),
        ("pytestmark = register_ci(suite='unit', est_s=1, needs='gpu')", "tuple of str, got 'gpu'"),
    ],
)
def test_what_is_no_declaration_is_an_error(source: str, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        registry.parse(source, "x.py")


# --- the tree ------------------------------------------------------------------------------------


def test_this_tree_is_registered() -> None:
    names = [file.name for file in registry.discover()]
    assert "tests/unit/tests_tree/test_registry.py" in names


def test_every_wrong_file_is_named(tree: Tree) -> None:
    root = tree(
        {
            "unit/test_good.py": PASSES,
            "unit/deep/test_none.py": "def test_x(): pass\n",
            "faults/test_misplaced.py": PASSES,
        }
    )
    done = run(root, "unit")
    assert done.returncode == 2
    assert "unit/deep/test_none.py: a test file needs one" in done.stderr
    assert "faults/test_misplaced.py: suite 'unit' belongs in tests/unit/" in done.stderr
    assert "test_good" not in done.stderr


def files(**est_s: float) -> list[RegisteredFile]:
    return [
        RegisteredFile(registry.TESTS / f"unit/test_{name}.py", Declaration(suite="unit", est_s=s))
        for name, s in est_s.items()
    ]


def test_shards_are_a_balanced_partition() -> None:
    every = files(a=1, b=9, c=4, d=3, e=2, f=1)
    parts = [registry.shard(every, i, 2) for i in (1, 2)]
    assert sorted(file.name for part in parts for file in part) == [file.name for file in every]
    assert [sum(file.declared.est_s for file in part) for part in parts] == [10, 10]
    assert parts == [registry.shard(list(reversed(every)), i, 2)[::-1] for i in (1, 2)]


# --- the runner ----------------------------------------------------------------------------------


def test_runner_runs_the_suites_that_are_asked_for(tree: Tree) -> None:
    root = tree(
        {
            "unit/test_a.py": PASSES,
            "faults/test_b.py": PASSES.replace("'unit'", "'faults'"),
            "distributed/test_c.py": PASSES.replace("'unit'", "'distributed'") + "assert 0\n",
        }
    )
    done = run(root, "unit", "faults", "unit", "--", "-v")
    assert done.returncode == 0, done.stdout
    assert "tests/unit/test_a.py::test_passes PASSED" in done.stdout
    assert "2 passed" in done.stdout.splitlines()[-1]


def test_runner_fails_with_its_tests(tree: Tree) -> None:
    done = run(tree({"unit/test_a.py": UNIT + "def test_x(): assert 0\n"}), "unit")
    assert done.returncode == 1
    assert "1 failed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("source", "args", "code"),
    [
        (SKIPS, ["unit"], 5),
        (UNIT, ["unit"], 5),
        (PASSES, ["unit", "--", "-k", "no_such_test"], 5),
        (BOTH, ["unit"], 0),
        (BOTH, ["unit", "--no-skips"], 1),
        (PASSES, ["faults"], 2),
        (PASSES, ["unit", "--shard", "2/2"], 2),
        (PASSES, ["unit", "--shard", "3/2"], 2),
        (PASSES, ["no-such-suite"], 2),
        (PASSES, [], 2),
    ],
)
def test_run_without_a_test_has_failed(tree: Tree, source: str, args: list[str], code: int) -> None:
    assert run(tree({"unit/test_a.py": source}), *args).returncode == code


def test_list_prints_and_runs_nothing(tree: Tree) -> None:
    done = run(tree({"unit/test_a.py": UNIT + "assert 0\n"}), "unit", "--list")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "tests/unit/test_a.py  unit            1 ranks     1.0 s",
        "1 files, 1.0 s",
    ]


def test_runner_uses_the_root_of_its_own_tree() -> None:
    assert registry.TESTS.parent == run_suite.ROOT

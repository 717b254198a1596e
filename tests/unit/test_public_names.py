"""The public API: its names, their documentation, and the types of its errors."""

from __future__ import annotations

import inspect
from pathlib import Path

import jax_symmkv as symmkv
from tests.registry import register_ci

pytestmark = register_ci(suite="unit", est_s=2)

NAMES = {
    *("ComposePlan", "SymmetricHeap", "HeapError", "PeerError", "PlanError"),
    *("build_plan", "current_page_cap", "local_token_cap", "local_tokens"),
    *("dense_positions", "interleaved"),
    *("new_ticket", "publish", "barrier", "gather", "compose", "collective_compose"),
}


def test_public_names_are_those_of_the_contract() -> None:
    assert sorted(symmkv.__all__) == sorted(NAMES)
    public = {n for n in vars(symmkv) if not n.startswith("_")}
    modules = {n for n in public if inspect.ismodule(getattr(symmkv, n))}
    # A function hides the module of its name: compose.
    assert public - modules - {"annotations"} == NAMES


def test_public_names_are_documented_and_typed() -> None:
    for name in NAMES:
        found = getattr(symmkv, name)
        assert inspect.getdoc(found), name
        if inspect.isfunction(found):
            parameters = inspect.signature(found).parameters.values()
            assert all(p.annotation is not p.empty for p in parameters), name
    assert (Path(symmkv.__file__).parent / "py.typed").exists()


def test_options_are_keyword_only() -> None:
    for name in ("publish", "barrier", "gather", "compose"):
        heap = inspect.signature(getattr(symmkv, name)).parameters["heap"]
        assert heap.kind is heap.KEYWORD_ONLY, name


def test_errors_are_caught_as_what_they_are() -> None:
    assert issubclass(symmkv.PlanError, ValueError)
    assert issubclass(symmkv.HeapError, RuntimeError)
    error = symmkv.PeerError("gone", rank=3, missing=(3, 5), epoch=7, phase="barrier")
    assert isinstance(error, RuntimeError) and str(error) == "gone"
    assert (error.rank, error.missing, error.epoch, error.phase) == (3, (3, 5), 7, "barrier")

"""How a test file declares its suite, and how declarations are found without importing the files.

    pytestmark = register_ci(suite="distributed", ranks=4, est_s=12)

`make test`, CI and other build systems all read these declarations; there is no second list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).resolve().parent

# Each suite, and the directory under tests/ that its files lie in.
SUITES = {
    "unit": "unit",
    "distributed": "distributed",
    "faults": "faults",
    "kernels-1-gpu": "kernels",
    "kernels-2-gpu": "kernels",
    "kernels-8-gpu": "kernels",
    "bench": "bench",
}


class RegistryError(ValueError):
    """A test file that declares nothing, or something that cannot be."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a test file says about itself.

    Attributes:
      suite: one of SUITES.
      ranks: most processes that the file spawns at a time.
      needs: what the machine must have beside the test dependencies, such as "nvcc".
      est_s: seconds that the file takes on a machine with 2 cores; shards are balanced by it.
    """

    suite: str
    est_s: float
    ranks: int = 1
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise RegistryError(
                f"register_ci: suite must be one of {', '.join(SUITES)}; got {self.suite!r}"
            )
        if not _is_number(self.est_s) or self.est_s <= 0:
            raise RegistryError(f"register_ci: est_s must be above 0 seconds, got {self.est_s!r}")
        if not isinstance(self.ranks, int) or isinstance(self.ranks, bool) or self.ranks < 1:
            raise RegistryError(f"register_ci: ranks must be an int from 1 on, got {self.ranks!r}")
        if not isinstance(self.needs, tuple) or not all(isinstance(n, str) for n in self.needs):
            raise RegistryError(f"register_ci: needs must be a tuple of str, got {self.needs!r}")


def register_ci(
    *, suite: str, est_s: float, ranks: int = 1, needs: tuple[str, ...] = ()
) -> pytest.MarkDecorator:
    """Declares this test file; assign the result to `pytestmark`. Literal arguments: see `parse`."""
    import pytest  # here, so that listing the tests needs no pytest

    declared = Declaration(suite=suite, est_s=est_s, ranks=ranks, needs=needs)
    return pytest.mark.ci(declared)


@dataclass(frozen=True)
class RegisteredFile:
    path: Path
    declared: Declaration

    @property
    def name(self) -> str:
        """The path below the repository's root, as pytest prints it."""
        return f"{TESTS.name}/{self.path.relative_to(TESTS).as_posix()}"


def discover(root: Path = TESTS) -> list[RegisteredFile]:
    """Every test file under `root`, by path.

    Raises:
      RegistryError: naming every file that is not registered, or not where its suite belongs.
    """
    found, wrong = [], []
    for path in sorted(root.rglob("test_*.py")):
        place = path.relative_to(root)
        try:
            declared = parse(path.read_text(), place.as_posix())
        except RegistryError as error:
            wrong.append(str(error))
            continue
        if place.parts[0] != SUITES[declared.suite]:
            wrong.append(
                f"{place}: suite {declared.suite!r} belongs in "
                f"{root.name}/{SUITES[declared.suite]}/; move the file or change its suite"
            )
        found.append(RegisteredFile(path, declared))
    if wrong:
        raise RegistryError("\n".join(wrong))
    return found


def parse(source: str, place: str) -> Declaration:
    """The declaration in a test file's source.

    The file is not imported: it may need a GPU, or packages that only some machines have.
    """
    calls = list(_declarations(ast.parse(source, place)))
    if len(calls) != 1:
        raise RegistryError(
            f"{place}: a test file needs one `pytestmark = register_ci(suite=..., est_s=...)` at "
            f"module level, got {len(calls)}; tests/README.md shows how"
        )
    call = calls[0]
    where = f"{place}:{call.lineno}"
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise RegistryError(f"{where}: register_ci takes keyword arguments only, none as * or **")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        assert keyword.arg is not None
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise RegistryError(
                f"{where}: {keyword.arg} must be a literal, since the file is read and not "
                f"imported; got {ast.unparse(keyword.value)}"
            ) from None
    try:
        return Declaration(**arguments)
    except (TypeError, RegistryError) as error:
        raise RegistryError(f"{where}: {error}") from None


def shard(files: Sequence[RegisteredFile], index: int, count: int) -> list[RegisteredFile]:
    """Part `index` (from 1) of `count`: the longest file first, each to the part lightest so far."""
    parts: list[list[RegisteredFile]] = [[] for _ in range(count)]
    load = [0.0] * count
    for file in sorted(files, key=lambda file: (-file.declared.est_s, file.name)):
        lightest = load.index(min(load))
        parts[lightest].append(file)
        load[lightest] += file.declared.est_s
    chosen = set(parts[index - 1])
    return [file for file in files if file in chosen]


def _declarations(module: ast.Module) -> Iterator[ast.Call]:
    for node in module.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id="pytestmark")],
                value=ast.Call(func=ast.Name(id="register_ci")) as call,
            ):
                yield call


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

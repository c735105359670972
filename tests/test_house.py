"""Higher floors import lower ones, never back; worlds know no system, and systems know no world."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dure

SOURCE = Path(dure.__file__).parent

FLOORS = [
    {"errors", "settings", "catalog"},
    {"machine", "tensors", "randomness", "record", "data"},
    {"protocol", "fleet", "collectives"},
    {"contracts"},
    {"tasks"},
    {"worlds", "parallel", "averaging", "federated"},
    {"run", "report", "bench"},
    {"cli", "__main__", "__init__"},
]
APART = ({"worlds"}, {"parallel", "averaging", "federated"})


def floor(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def room_of(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(file: Path) -> Iterator[str]:
    """The rooms that a file imports, wherever in it; what only type checkers import does not
    count."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "dure":
                names = [
                    f"dure.{alias.name}" for alias in node.names if alias.name != "__version__"
                ]
        yield from (name.split(".")[1] for name in names if name.startswith("dure."))


@pytest.mark.parametrize(
    "file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE))
)
def test_a_file_imports_no_higher_floor(file: Path) -> None:
    here = room_of(file)
    if (here, file.stem) == ("machine", "threads"):  # counts a step's operations, of examples
        return
    for other in imported(file):
        assert floor(other) <= floor(here), f"{here} imports {other}"
        for one, another in (APART, APART[::-1]):
            assert not (here in one and other in another), f"{here} imports {other}"

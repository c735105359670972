"""The house has floors: what a file imports lies below it, and no way leads back, by whatever door.

Looked at are files, and at every level of the tree the folders and files that lie next to each
other. An import counts wherever it stands: in a function, for type checkers alone, or as a module's
name in a string.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import dure
from proofs import PROOFS

SOURCE = Path(dure.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

FACES = {"dure", "dure.catalog"}
"""They name what others may import, and import nothing of it themselves until they are asked."""

ROOMS = [
    {"arguments", "errors", "peer_text", "references", "settings", "catalog"},
    {"machine", "tensors", "randomness"},
    {"record", "data"},
    {"collectives", "fleet", "memory", "protocol", "wire"},
    {"contracts"},
    {"tasks"},
    {"privacy"},
    {"worlds", "parallel", "averaging", "federated", "parameter_server", "split"},
    {"report"},
    {"run", "bench"},
    {"cli"},
    {"__main__"},
]
"""From the ground up. Rooms of one floor know nothing of each other, but for those in `MAY`."""

MAY = {
    ("arguments", "errors"),
    ("averaging", "parallel"),
    ("parameter_server", "parallel"),
    ("privacy", "tasks"),
    ("split", "parallel"),
    ("references", "errors"),
    ("settings", "errors"),
    ("settings", "references"),
    ("tensors", "machine"),
}


def name_of(file: Path) -> str:
    """ "dure.parallel.data" of .../dure/parallel/data.py or .../dure/parallel/data/__init__.py."""
    return ".".join(("dure", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


MODULES = {name_of(file): file for file in FILES}


def imported(file: Path) -> Iterator[str]:
    """The modules of dure that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{file}: an import says the whole name"
            for alias in node.names:
                yield from _first([f"{node.module}.{alias.name}", node.module])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _in_text(node.value)


def _first(names: list[str]) -> list[str]:
    return [name for name in names if name in MODULES][:1]


def _in_text(text: str) -> Iterator[str]:
    """Modules that a string names to be imported: "dure.run.drive", or a line of a program."""
    if text in MODULES and text != "dure":
        yield text
    yield from (
        name
        for name in re.findall(r"^\s*(?:from|import) (dure[\w.]*)", text, re.MULTILINE)
        if name in MODULES and name != "dure"
    )


@cache
def arrows() -> dict[str, set[str]]:
    """Which files every file imports."""
    return {
        name: set()
        if name in FACES
        else {other for other in imported(file) if other not in (name, "dure")}
        for name, file in MODULES.items()
    }


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A way that leads back to where it began, as names; empty where there is none."""
    done: set[str] = set()
    for start in graph:
        way: list[str] = []
        found = _walk(graph, start, way, done)
        if found:
            return found
    return []


def _walk(graph: Mapping[str, set[str]], here: str, way: list[str], done: set[str]) -> list[str]:
    if here in way:
        return [*way[way.index(here) :], here]
    if here in done:
        return []
    way.append(here)
    for other in sorted(graph[here]):
        found = _walk(graph, other, way, done)
        if found:
            return found
    way.pop()
    done.add(here)
    return []


def rooms_in(folder: str) -> dict[str, set[str]]:
    """What lies in a folder, with an arrow where some file of the one imports one of the other."""
    depth = folder.count(".") + 2
    graph: dict[str, set[str]] = {}
    for name, others in arrows().items():
        if not name.startswith(f"{folder}."):
            continue
        room = ".".join(name.split(".")[:depth])
        reached = {
            ".".join(other.split(".")[:depth]) for other in others if other.startswith(f"{folder}.")
        }
        graph.setdefault(room, set()).update(reached - {room})
    return graph


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(arrows()) == []


FOLDERS = sorted(name for name, file in MODULES.items() if file.name == "__init__.py")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_rooms_of_a_folder_import_each_other_in_a_circle(folder: str) -> None:
    assert circle(rooms_in(folder)) == []


def floor(room: str) -> int:
    return next(number for number, rooms in enumerate(ROOMS) if room in rooms)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_file_imports_no_higher_floor(name: str) -> None:
    if name in FACES:
        return
    here = name.split(".")[1]
    for other in sorted(arrows()[name]):
        there = other.split(".")[1]
        if there != here:
            assert floor(there) < floor(here) or (here, there) in MAY, f"{name} imports {other}"


def test_a_newcomer_finds_few_files_at_the_door() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 8


@pytest.mark.parametrize("file", PROOFS)
def test_what_is_listed_as_slow_is_there(file: str) -> None:
    text = (Path(__file__).parent / file).read_text()
    for name in PROOFS[file]:
        assert f"def {name.partition('[')[0]}" in text


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone, as the folders are no packages."""
    names = Counter(file.name for file in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []

"""docs/architecture.md and CONTRIBUTING.md describe the packages, layers and call paths of dure."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import dure
from test_house import FILES, LAYERS, SOURCE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
RULES = (ROOT / "CONTRIBUTING.md").read_text()
MOST_STEPS = 12

ROW = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `(\w+)` \|", re.MULTILINE)


def fence_after(heading: str) -> str:
    """The first fenced block below a heading of the page."""
    found = re.search(rf"^#+ {heading}\n.*?^```\w*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def drawn() -> dict[str, list[str]]:
    """Return the packages that the page lists, each with its modules."""
    folders: dict[str, list[str]] = {}
    path: list[str] = []
    for line in fence_after("Packages").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, files = line.partition(" : ")
        if "/" in name:
            path[depth:] = [name.split()[0].rstrip("/")]
            assert "/".join(path[1:]) not in folders, "a folder is drawn once"
            folders["/".join(path[1:])] = files.split()
        else:
            folders["/".join(path[1:])] += line.split()
    return folders


def built() -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for file in FILES:
        place = file.parent.relative_to(SOURCE)
        names = folders.setdefault("" if place == Path() else str(place), [])
        if file.stem != "__init__":
            names.append(file.stem)
    return folders


def test_the_page_lists_every_package_with_its_modules() -> None:
    page = drawn()
    source = built()
    assert sorted(page) == sorted(source)
    for folder, files in source.items():
        assert sorted(page[folder]) == sorted(files), folder or "the root"


def test_the_rules_list_the_layers_that_are_tested() -> None:
    rows = re.findall(r"^\| \d+ \| (.*?) \|", RULES, re.MULTILINE)
    named = [set(re.findall(r"`(\w+)(?:/|\.py)`", row)) for row in rows]
    assert named == LAYERS[::-1]


@pytest.fixture
def call_paths(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    place = ROOT / "benchmarks" / "way_of_a_step.py"
    monkeypatch.syspath_prepend(place.parent)
    spec = importlib.util.spec_from_file_location("way_of_a_step", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("heading", "system", "world"),
    [
        (
            "The call path of a batch",
            lambda: dure.DataParallel(all_reduce="ring"),
            lambda: dure.Processes(2),
        ),
        (
            "The call path of an update",
            lambda: dure.FedAvg(clients=10),
            lambda: dure.Simulated(engine="batched"),
        ),
        (
            "The call path over a network",
            lambda: dure.FedAvg(clients=1),
            lambda: dure.Network(port=0, access="open"),
        ),
    ],
)
def test_a_step_follows_the_call_path_of_the_page(
    call_paths: ModuleType, heading: str, system: Callable[[], object], world: Callable[[], object]
) -> None:
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    steps = ROW.findall(section)
    assert 0 < len(steps) <= MOST_STEPS
    calls = call_paths.walked(system(), world())
    assert [one for one in steps if one not in calls] == []
    firsts = [calls.index(one) for one in steps]
    assert firsts == sorted(firsts)


def test_the_figure_shows_the_call_paths_of_the_page(
    call_paths: ModuleType, tmp_path: Path
) -> None:
    call_paths.save(
        tmp_path / "ways.svg", call_paths.TITLE, list(map(call_paths.drawn, call_paths.CALL_PATHS))
    )
    assert (tmp_path / "ways.svg").read_text() == (ROOT / "docs/images/ways.svg").read_text()

"""What docs/architecture.md and CONTRIBUTING.md say of the house is what there is."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import dure
from test_house import FILES, ROOMS, SOURCE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
RULES = (ROOT / "CONTRIBUTING.md").read_text()
MOST_STATIONS = 12

STATION = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `(\w+)` \|", re.MULTILINE)


def fence_after(heading: str) -> str:
    """The first fenced block below a heading of the page."""
    found = re.search(rf"^#+ {heading}\n.*?^```\w*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def drawn() -> dict[str, list[str]]:
    """Every folder that the page draws, with the files that it names there."""
    folders: dict[str, list[str]] = {}
    way: list[str] = []
    for line in fence_after("Rooms").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, files = line.partition(" : ")
        if "/" in name:
            way[depth:] = [name.split()[0].rstrip("/")]
            assert "/".join(way[1:]) not in folders, "a folder is drawn once"
            folders["/".join(way[1:])] = files.split()
        else:
            folders["/".join(way[1:])] += line.split()
    return folders


def built() -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for file in FILES:
        place = file.parent.relative_to(SOURCE)
        names = folders.setdefault("" if place == Path() else str(place), [])
        if file.stem != "__init__":
            names.append(file.stem)
    return folders


def test_the_page_draws_every_folder_with_its_files() -> None:
    page = drawn()
    house = built()
    assert sorted(page) == sorted(house)
    for folder, files in house.items():
        assert sorted(page[folder]) == sorted(files), folder or "the root"


def test_the_rules_name_the_floors_that_are_tested() -> None:
    rows = re.findall(r"^\| \d+ \| (.*?) \|", RULES, re.MULTILINE)
    named = [set(re.findall(r"`(\w+)(?:/|\.py)`", row)) for row in rows]
    assert named == ROOMS[::-1]


@pytest.fixture
def walker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
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
            "The way of a batch",
            lambda: dure.DataParallel(all_reduce="ring"),
            lambda: dure.Processes(2),
        ),
        (
            "The way of an update",
            lambda: dure.FedAvg(clients=10),
            lambda: dure.Simulated(engine="batched"),
        ),
        (
            "The way over a network",
            lambda: dure.FedAvg(clients=1),
            lambda: dure.Network(port=0, access="open"),
        ),
    ],
)
def test_a_step_passes_the_stations_in_the_order_drawn(
    walker: ModuleType, heading: str, system: Callable[[], object], world: Callable[[], object]
) -> None:
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    stations = STATION.findall(section)
    assert 0 < len(stations) <= MOST_STATIONS
    calls = walker.walked(system(), world())
    assert [one for one in stations if one not in calls] == []
    firsts = [calls.index(one) for one in stations]
    assert firsts == sorted(firsts)


def test_the_figure_shows_the_stations_of_the_page(walker: ModuleType, tmp_path: Path) -> None:
    walker.save(tmp_path / "ways.svg", walker.TITLE, list(map(walker.drawn, walker.WAYS)))
    assert (tmp_path / "ways.svg").read_text() == (ROOT / "docs/images/ways.svg").read_text()

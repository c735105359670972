"""The report of split learning: what it shows is what real runs told of themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_report_page import text_of

import dure
from dure.report.read import read_run
from dure.report.split_figures import figures
from dure.split.strategy import Split
from dure.tasks.builtin import load_task

Report = Callable[..., str]
SYSTEMS: dict[str, Split] = {
    "turn": dure.SplitLearning(("1", "2"), measure_leaks=True),
    "parallel": dure.ParallelSplit(),
    "fed": dure.SplitFed(),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, system in SYSTEMS.items():
        few = replace(system, clients=3, batch_size=100)
        dure.train(load_task("digits"), few, stop=dure.Stop(rounds=2), out=folder / name)
    return {name: folder / name for name in SYSTEMS}


def told(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text())["facts"][0]["split"])


@pytest.mark.parametrize("name", SYSTEMS)
def test_lanes_are_the_server_and_the_clients_with_the_parts_that_each_has(
    name: str, folders: dict[str, Path]
) -> None:
    figure = figures([read_run(folders[name])])["round-0"]
    assert figure["rows"] == ["server", "client 0", "client 1", "client 2"]
    drawn = {
        (figure["rows"][span[0]].split()[0], one["name"])
        for one in figure["series"]
        for span in one["spans"]
    }
    end = {("client", "end")} if name == "turn" else set()
    assert drawn == {("server", "tail"), ("client", "head"), ("client", "link")} | end


def test_clients_in_turn_never_compute_at_the_same_time(folders: dict[str, Path]) -> None:
    spans = [one for one in told(folders["turn"])["newest"] if one[1] in ("head", "end")]
    ordered = sorted((began, began + seconds) for _, _, began, seconds in spans)
    assert all(next_begins >= ends - 1e-6 for (_, ends), (next_begins, _) in pairwise(ordered))
    assert ordered[0][0] > 0  # of the newest round, not of the first


@pytest.mark.parametrize("name", SYSTEMS)
def test_messages_at_the_cut_are_as_large_as_their_formula(
    name: str, folders: dict[str, Path], report: Report
) -> None:
    facts = told(folders[name])
    largest = {kind: most for kind, _, _, most in facts["kinds"]}
    # 200 numbers of 4 bytes for each example, and where labels travel 8 bytes.
    assert largest["Smashed"] == 100 * (800 + (0 if name == "turn" else 8))
    assert largest["Gradients"] == 100 * 800
    assert all(largest[kind] == facts["formulas"][kind] for kind in largest)
    text = text_of(report(folders[name]))
    said = f"{largest['Smashed']:,}"
    assert re.search(rf"smashed data up {said} {said} 1 ", text)


def test_all_messages_together_are_what_the_run_has_sent(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        summary = json.loads((folder / "summary.json").read_text())
        assert sum(each for _, _, each, _ in told(folder)["kinds"]) == summary["bytes_sent"]


def test_meters_are_drawn_round_by_round_and_exposure_is_said(
    folders: dict[str, Path], report: Report
) -> None:
    run = read_run(folders["turn"])
    figure = figures([run])["leaks-direction_leak_auc"]
    assert figure["series"][0]["x"] == [1, 2]
    measured = [line.metrics["direction_leak_auc"] for line in run.steps]
    assert figure["series"][0]["y"] == pytest.approx(measured, rel=1e-5)
    text = text_of(report(*folders.values()))
    assert "could guess labels from them" in text
    assert "the server is sent all labels" in text
    assert "leaks-cluster_leak_auc" not in figures([read_run(folders["fed"])])


def test_a_run_that_goes_on_tells_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    system = dure.SplitLearning(clients=3, batch_size=100)
    dure.train(load_task("digits"), system, stop=dure.Stop(rounds=1), out=tmp_path / "run")
    dure.resume(tmp_path / "run", stop=dure.Stop(rounds=2))
    dure.train(load_task("digits"), system, stop=dure.Stop(rounds=2), out=tmp_path / "whole")
    assert told(tmp_path / "run") == told(tmp_path / "whole")


def test_damaged_facts_show_less_and_break_nothing(
    folders: dict[str, Path], tmp_path: Path, report: Report
) -> None:
    summary = json.loads((folders["fed"] / "summary.json").read_text())
    summary["facts"][0]["split"] |= {
        "first": [["client 0", "head", -1, "x"], 3],
        "newest": {"no": "list"},
        "kinds": [["Smashed", 1], ["<b>", 1, 2, 3]],
        "shares": [None, 0.5],
    }
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in folders["fed"].iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "round-0" not in figures([read_run(folder)])
    assert "Split learning" in text_of(report(folder))

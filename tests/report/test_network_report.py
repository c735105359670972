"""What the report says of a federation over a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from dure.report import charts, federated, federated_figures
from dure.report.read import read_run

COHORT = [
    {
        "client": 0,
        "name": "ward <0>",
        "examples": 120,
        "held_out": 30,
        "machine": {"torch": "2.9", "capability": "AVX2", "engine": "loop", "threads": 2},
        "differs": ["torch 2.9, not 2.8"],
    },
    {"client": 1, "name": "ward 1", "examples": 80, "held_out": 0, "machine": None},
]
FACTS: dict[str, Any] = {
    "engine": "loop",
    "why": "clients on a network train with it",
    "bits": "close",
    "differs": ["torch 2.9, not 2.8"],
    "flights": [
        [0, 0, 0.5, 2.5, "accepted"],
        [0, 1, 3.0, 4.0, "its own code raised OSError (a.py:3)"],
        [0, 2, 4.0, 5.0, "its own code raised OSError (a.py:3)"],
    ],
    "outcomes": {"accepted": 1, "its own code raised OSError (a.py:3)": 2},
    "turns": [[0, 1]],
    "staleness": [[0, 1]],
    "there": [[0, 0.0, 6.0], [1, 1.0, 2.0], [1, 4.0, 6.0], ["damaged"]],
    "cohort": COHORT,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_run(tmp_path / "run", "fed-avg")
    summary = json.loads((made / "summary.json").read_text())
    (made / "summary.json").write_text(json.dumps({**summary, "facts": [FACTS]}))
    lines = [json.loads(line) for line in (made / "history.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            line["numbers"] = {"wall_seconds": 7.0 * line["step"], "updates": 1.0}
    (made / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def test_its_clock_shows_wall_time(folder: Path) -> None:
    run = read_run(folder)
    line = federated.in_a_line(run)
    assert line is not None
    assert "of wall time" in line
    assert "virtual" not in line
    curves = charts.curves([run])
    assert curves is not None
    assert curves["axes"][-1]["name"] == "wall seconds"
    assert any(curves["series"][-1]["x"]["wall"])
    assert "wall_seconds" not in [metric["key"] for metric in curves["metrics"]]
    assert federated_figures.figures([run])["flights-0"]["x"] == "wall seconds"


def test_a_deployed_run_and_a_simulated_one_share_no_axis_of_time(
    folder: Path, tmp_path: Path
) -> None:
    simulated = write_run(tmp_path / "simulated", "fed-avg")
    text = (folder / "history.jsonl").read_text().replace("wall_seconds", "virtual_seconds")
    (simulated / "history.jsonl").write_text(text)
    curves = charts.curves([read_run(folder), read_run(simulated)])
    assert curves is not None
    assert [axis["key"] for axis in curves["axes"]][-2:] == ["virtual", "wall"]
    for one in curves["series"]:
        there = {axis for axis in ("seconds", "virtual", "wall") if any(one["x"][axis])}
        assert there == ({"virtual"} if one["run"] else {"seconds", "wall"})


def test_it_says_how_close_clients_compute_and_why(folder: Path) -> None:
    line = federated.in_a_line(read_run(folder)) or ""
    assert "not the same bits (torch 2.9, not 2.8)" in line
    assert "2 failed (its own code raised OSError (a.py:3))" in line


def test_who_was_there_is_drawn_behind_what_they_were_asked(folder: Path) -> None:
    figure = federated_figures.figures([read_run(folder)])["flights-0"]
    there, *asked = figure["series"]
    assert (there["name"], there["wide"]) == ("there", True)
    assert [span[:3] for span in there["spans"]] == [[0, 0, 6], [1, 1, 1], [1, 4, 2]]
    # Client 1 was never asked, and has its row all the same.
    assert figure["rows"] == ["ward &lt;0&gt;", "ward 1"]
    assert [len(one["spans"]) for one in asked] == [1, 2]


def test_the_table_of_clients_says_who_failed_and_why(
    folder: Path, report: Callable[..., str]
) -> None:
    page = report(folder)
    row = page[page.index('<th scope="row">ward &lt;0&gt;</th>') :].partition("</tr>")[0]
    assert "<td>120</td><td>30</td><td>1</td>" in row
    assert "its own code raised OSError (a.py:3) (2 times)" in row
    assert "torch 2.9, AVX2, 2 threads" in row
    other = page[page.index('<th scope="row">ward 1</th>') :].partition("</tr>")[0]
    assert "<td>3.00 s</td>" in other
    assert "a training loop of its own" in other

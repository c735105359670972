"""The overview of several runs: a point a run, families, and clocks that share no axis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_runs import write_run

from dure import catalog
from dure.report.overview import overview, overview_section
from dure.report.read import read_run
from dure.report.runs import ReportedRun


def run_of(folder: Path, system: str, **given: object) -> ReportedRun:
    config = {"strategy": {"name": system, "batch_size": 64}}
    return read_run(write_run(folder / system, system, config=config, **given))  # type: ignore[arg-type]


def simulated(folder: Path, system: str, seconds: float) -> ReportedRun:
    run = write_run(folder / system, system, federated=True, workers=3, steps=4, evaluations=1)
    text = (run / "history.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in text]
    for line in lines:
        if line["kind"] == "step":
            line["numbers"] = {"virtual_seconds": seconds}
    (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.loads((run / "config.json").read_text())
    config["strategy"]["name"] = system
    (run / "config.json").write_text(json.dumps(config))
    return read_run(run)


def test_a_single_run_has_no_overview(tmp_path: Path) -> None:
    assert overview([run_of(tmp_path, "zero")]) is None
    assert overview_section([], None, "") == ""


def test_runs_have_a_point_in_every_chart_and_the_colour_of_their_family(tmp_path: Path) -> None:
    names = ("single-worker", "data-parallel", "zero", "hogwild")
    runs = [run_of(tmp_path, name, seconds=1.0 + place) for place, name in enumerate(names)]
    data = overview(runs)
    assert data is not None
    families = [one["name"] for one in data["families"]]
    assert families == ["single worker", "data parallel", "shared memory"]
    assert [chart["key"] for chart in data["charts"]] == ["seconds", "bytes", "memory"]
    for chart in data["charts"]:
        assert [families[point["family"]] for point in chart["points"]] == [
            "single worker", "data parallel", "data parallel", "shared memory",
        ]  # fmt: skip
    times = data["charts"][0]["points"]
    assert [point["x"] for point in times] == [1, 2, 3, 4]
    assert "<b>zero</b>" in times[2]["text"]
    assert "time 3.00 s" in times[2]["text"]


def test_real_and_virtual_seconds_have_separate_charts(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, "zero", seconds=2.0), simulated(tmp_path, "fed-avg", 70.0)]
    data = overview([*runs, simulated(tmp_path, "split", 80.0)])
    assert data is not None
    charts = {chart["key"]: chart["points"] for chart in data["charts"]}
    assert list(charts) == ["seconds", "virtual", "bytes", "memory"]
    assert [point["run"] for point in charts["seconds"]] == [0]
    assert [(point["run"], point["x"]) for point in charts["virtual"]] == [(1, 70), (2, 80)]
    assert len(charts["bytes"]) == 3


def test_what_is_not_alike_is_said_above_the_charts(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, name) for name in ("data-parallel", "zero", "local-sgd")]
    html = overview_section(runs, overview(runs), "")
    assert '<p class="unlike">Not alike: batch 64, but 32 in local-sgd.</p>' in html
    same = runs[:2]
    assert "Not alike" not in overview_section(same, overview(same), "")


@pytest.mark.parametrize("system", catalog.SYSTEMS)
def test_every_system_has_a_family_with_a_name(system: str, tmp_path: Path) -> None:
    runs = [run_of(tmp_path / str(place), system) for place in range(2)]
    data = overview(runs)
    assert data is not None
    assert [one["name"] for one in data["families"]] == [catalog.family_names()[system]]

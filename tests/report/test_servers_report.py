"""The report of parameter servers: what it shows is what real runs told of themselves."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import PROGRAM, chromium
from sample_runs import write_run
from test_report_page import text_of

import dure
from dure.collectives.compression import Cast, TopK
from dure.report import write_report
from dure.report.read import read_run
from dure.report.servers import figures
from dure.tasks.builtin import load_task

Report = Callable[..., str]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "simulated"
    strategy = dure.ParameterServer(servers=2, workers=3, staleness=2)
    world = dure.Simulated(devices="jitter:0.3:4:100:100:100", server_mbit=100)
    dure.train(load_task("digits"), strategy, world, dure.Stop(rounds=2), out=folder)
    return folder


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "processes"
    strategy = dure.ParameterServer(servers=2, workers=2, replicas=1)
    dure.train(load_task("digits"), strategy, stop=dure.Stop(rounds=2), out=folder)
    return folder


def told(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text())["facts"][0]["parameter_server"])


def with_facts(folder: Path, to: Path, **changed: Any) -> Path:
    """A copy of a run that tells other facts."""
    shutil.copytree(folder, to)
    summary = json.loads((to / "summary.json").read_text())
    summary["facts"] = [{"parameter_server": told(folder) | changed}]
    (to / "summary.json").write_text(json.dumps(summary))
    return to


def test_the_histogram_counts_every_pull_by_its_clocks(simulated: Path) -> None:
    (bars,) = figures([read_run(simulated)])["clocks-0"]["series"]
    assert [list(pair) for pair in zip(bars["x"], bars["y"], strict=True)] == (
        told(simulated)["staleness"]
    )
    assert sum(bars["y"]) == told(simulated)["pushes"]


def test_lanes_are_servers_and_workers_and_their_bars_those_of_the_account(simulated: Path) -> None:
    figure = figures([read_run(simulated)])["busy-0"]
    assert figure["rows"] == ["server 0", "server 1", "worker 0", "worker 1", "worker 2"]
    assert figure["x"] == "virtual seconds"
    drawn = [
        (figure["rows"][row], one["name"], began, seconds)
        for one in figure["series"]
        for row, began, seconds, _ in one["spans"]
    ]
    account = [tuple(span[:4]) for span in told(simulated)["spans"]]
    assert len(drawn) == min(len(account), 3_000)
    assert {(who, what) for who, what, _, _ in drawn} == {
        *((f"server {n}", "communication") for n in range(2)),
        *((f"worker {n}", "compute") for n in range(3)),
    }
    ends = max(began + seconds for _, _, began, seconds in drawn)
    assert ends <= figures_clock(simulated) * 1.001


def figures_clock(folder: Path) -> float:
    numbers = json.loads((folder / "summary.json").read_text())["numbers"]
    return float(numbers["virtual_seconds"])


@pytest.mark.parametrize("which", ["simulated", "processes"])
def test_bytes_stand_next_to_their_formula(
    which: str, request: pytest.FixtureRequest, report: Report
) -> None:
    folder = request.getfixturevalue(which)
    text = text_of(report(folder))
    pushes = told(folder)["pushes"]
    for way in ("up", "down"):
        found = re.search(rf"{way} 220,840 × (\d+) (\S+ MB) (\S+ MB) (\S+)", text)
        assert found is not None
        assert int(found[1]) == pushes
        assert found[2] == found[3]
        assert found[4] == "1"


@pytest.mark.parametrize(
    ("strategy", "each"),
    [
        # 55,210 numbers in two shards: of 1 % of each, 8 bytes.
        (dure.ParameterServer(2, 2, compression=TopK(0.01)), 8 * 2 * 277),
        (dure.Downpour(2, servers=2, compression=Cast()), 2 * 55_210),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_the_formula_of_compressed_pushes_is_that_of_their_codec(
    strategy: dure.Strategy, each: int, tmp_path: Path, report: Report
) -> None:
    folder = tmp_path / "run"
    dure.train(load_task("digits"), strategy, dure.Simulated(), dure.Stop(rounds=1), out=folder)
    text = text_of(report(folder))
    pushes = told(folder)["pushes"]
    assert re.search(rf"up {each:,} × {pushes} (\S+ .B) \1 1 ", text)
    assert re.search(r"down 220,840 × \d+ (\S+ MB) \1 1 ", text)


def test_the_rates_are_of_the_clock_that_the_run_had(
    simulated: Path, processes: Path, report: Report
) -> None:
    pushes = told(simulated)["pushes"]
    rate = pushes / figures_clock(simulated)
    text = text_of(report(simulated))
    assert (
        f"{rate:,.1f} pushes and {rate:,.1f} pulls a second of virtual time at each shard" in text
    )
    assert "pulls a second of wall time at each shard" in text_of(report(processes))


def test_who_was_lost_is_told_and_so_is_a_shard_that_nobody_has(
    processes: Path, tmp_path: Path, report: Report
) -> None:
    lost = [["server 0", "was <killed>"]]
    folder = with_facts(processes, tmp_path / "lost", lost=lost, owners=[1, None])
    page = report(folder)
    assert "server 0 was lost: it was <killed>" in text_of(page)
    assert "<killed>" not in page
    assert re.search(r"\b1 lost \d", text_of(page))


@pytest.mark.parametrize(
    "changed",
    [
        {"shard_bytes": None},
        {"owners": "nobody"},
        {"staleness": [[0, "often"], [1]], "spans": [["worker 0"], ["worker 0", 1, "x", 2, 3]]},
        {"lost": [["server 0"], 3], "pushes": "many"},
        {"push_bytes": [1, "some"]},
        {"shards": [[0, 1], 5]},
    ],
)
def test_what_is_damaged_is_left_out(
    changed: dict[str, Any], simulated: Path, tmp_path: Path, report: Report
) -> None:
    assert "Parameter servers" in report(with_facts(simulated, tmp_path / "damaged", **changed))


def test_other_runs_have_no_such_section(tmp_path: Path, report: Report) -> None:
    assert "Parameter servers" not in report(write_run(tmp_path / "ring", "ring"))


@pytest.mark.skipif(
    PROGRAM is None and not os.environ.get("CI"),
    reason="chromium is not installed, and CI is not set",
)
def test_every_figure_is_drawn_in_a_browser(
    simulated: Path, processes: Path, tmp_path: Path
) -> None:
    written = write_report([simulated, processes], tmp_path / "report.html")
    with chromium() as page:
        page.open(written)
        assert page.problems == []
        assert page.ask("document.body.dataset.errors") == "[]"
        drawn = page.ask(
            "[...document.querySelectorAll('[data-figure]')]"
            ".map(c => [c.dataset.figure, c.querySelectorAll('.trace').length])"
        )
        assert {name for name, traces in drawn if traces} == {
            "clocks-0", "waiting-0", "busy-0", "clocks-1", "waiting-1",
        }  # fmt: skip

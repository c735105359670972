"""The report of pipelines and meshes: what it shows is what a real run's trace and facts say."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from sample_runs import write_run
from test_report_page import text_of

import dure
from dure.cli.main import main
from dure.contracts.stop import Stop
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.pipeline import Pipeline
from dure.parallel.mesh.strategy import Parallel
from dure.parallel.pipeline.schedule import Schedule
from dure.report.formatting import duration, size
from dure.report.pipeline import in_a_line, measured_step
from dure.report.read import read_run
from dure.tasks.builtin import load_task
from dure.worlds.processes.world import Processes

Report = Callable[..., str]
STEPS = 7


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "pipeline"
    dure.train(load_task("digits"), Pipeline(), Processes(2), stop=Stop(steps=STEPS), out=folder)
    return folder


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensor groups of two, over which the batch is divided."""
    folder = tmp_path_factory.mktemp("runs") / "mesh"
    strategy = Parallel(Mesh(data=2, tensor=2), microbatches=1, schedule="naive")
    task = load_task("digits")
    dure.train(task, strategy, Processes(4), stop=Stop(steps=STEPS), out=folder)
    return folder


def spans_by_step(folder: Path) -> dict[int, list[tuple[int, str, float, float]]]:
    """(rank, action, start, end) in seconds of each step, taken from trace.json by hand."""
    steps = defaultdict(list)
    for event in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X" and re.fullmatch(r"(forward|backward) \d+\.\d+", event["name"]):
            start = event["ts"] / 1e6
            steps[event["args"]["step"]].append(
                (event["tid"], event["name"], start, start + event["dur"] / 1e6)
            )
    return steps


def makespan(spans: list[tuple[int, str, float, float]]) -> float:
    return max(end for *_, end in spans) - min(start for *_, start, _ in spans)


def test_the_step_is_the_median_of_those_behind_the_first(pipeline: Path) -> None:
    steps = {step: spans for step, spans in spans_by_step(pipeline).items() if step > 1}
    assert len(steps) == STEPS - 1
    found = measured_step(read_run(pipeline))
    assert found is not None
    middle = statistics.median_low(makespan(spans) for spans in steps.values())
    assert makespan(steps[found.step]) == pytest.approx(middle)
    assert found.measured.makespan == pytest.approx(middle)
    busy = sum(end - start for *_, start, end in steps[found.step])
    assert found.measured.bubble == pytest.approx(1 - busy / (2 * middle))


def test_the_simulation_takes_the_means_of_that_step(pipeline: Path) -> None:
    found = measured_step(read_run(pipeline))
    assert found is not None
    seconds = defaultdict(list)
    for rank, name, start, end in spans_by_step(pipeline)[found.step]:
        seconds[rank, name.split()[0]].append(end - start)
    for span in found.simulated.spans:
        own = seconds[span.rank, span.action.kind]
        assert span.end - span.start == pytest.approx(sum(own) / len(own))
    # Computing takes as long as it took, and without messages nothing waits longer than its
    # schedule says.
    assert sum(found.simulated.busy) == pytest.approx(sum(found.measured.busy))
    assert found.simulated.peak_activations == found.measured.peak_activations == (2, 1)


def test_the_page_says_what_the_trace_says(pipeline: Path, report: Report) -> None:
    page, found = report(pipeline), measured_step(read_run(pipeline))
    assert found is not None
    text = text_of(page)
    assert f"step {found.step}" in text
    for name, one in (("measured", found.measured), ("simulated", found.simulated)):
        over = (1 / (1 - one.bubble)) - 1
        idle = f"{100 * one.bubble:.1f} % {over:.3f}"
        assert f"{name} {idle} {duration(one.makespan)} 2 1" in text
    assert "0 rank 0 layers.0 13,000 51.2 kB 51.2 kB 1 rank 1 layers.3 42,210 – –" in text
    assert "rank 0 52.0 kB 52.0 kB 0 B" in text


def test_the_picture_holds_every_action_twice_and_brings_no_style(
    pipeline: Path, report: Report
) -> None:
    drawn = re.search(r'<div class="gantt".*?>(<svg.*?</svg>)', report(pipeline), re.DOTALL)
    assert drawn
    root = ElementTree.fromstring(drawn[1])
    actions = [title.text.partition(",")[0] for title in root.iter("title") if title.text]
    assert sorted(set(actions)) == sorted(
        f"{kind}{stage}.{m}" for kind in "FB" for stage in (0, 1) for m in range(4)
    )
    assert len(actions) == 2 * len(set(actions))
    assert list(root.iter("style")) == []


def test_facts_count_the_bytes_that_the_meter_counts(pipeline: Path) -> None:
    summary = json.loads((pipeline / "summary.json").read_text())
    crossing = sum(
        stage["there"] + stage["back"] for rank in summary["facts"] for stage in rank["stages"]
    )
    assert crossing * STEPS == summary["bytes_sent"]
    assert sum(rank["held"]["parameters"] for rank in summary["facts"]) == 4 * summary["parameters"]
    assert Schedule.parse(summary["facts"][0]["schedule"]).microbatches == 4


def test_ranks_that_divide_layers_hold_a_part_and_tell_their_collectives(
    mesh: Path, report: Report
) -> None:
    run = read_run(mesh)
    assert [rank.at for rank in run.ranks] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    trace = json.loads((mesh / "trace.json").read_text())["traceEvents"]
    lanes = {
        e["tid"]: e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name"
    }
    summary = json.loads((mesh / "summary.json").read_text())
    text = text_of(report(mesh))
    for rank, worker in zip(run.ranks, summary["per_worker"], strict=True):
        # 64-200-200-10: half of the first two layers but for the second bias, and the last layer
        # whole.
        assert rank.held["parameters"] == 4 * ((64 * 200 + 200 + 200 * 200) // 2 + 200 + 2010)
        assert rank.held["gradients"] == rank.held["parameters"]
        inside = [e for e in trace if e["ph"] == "X" and lanes[e["tid"]] == f"{rank.name}, inside"]
        assert {event["args"]["step"] for event in inside} == set(range(1, STEPS + 1))
        assert rank.layer_collective_seconds == pytest.approx(
            sum(event["dur"] for event in inside) / 1e6 / STEPS, rel=0.01
        )
        # The sum over data groups is there as well.
        assert worker["communication_seconds"] > rank.layer_collective_seconds * STEPS
        kept = f"{size(rank.held['parameters'])} {size(rank.held['gradients'])}"
        held = f"{kept} 0 B {size(rank.peak_memory)}"
        seconds = duration(rank.layer_collective_seconds)
        assert f"{rank.name} {rank.at[0]} {rank.at[2]} {held} {seconds}" in text
    assert measured_step(run) is None
    assert '<h2 id="pipelines">' not in report(mesh)


def test_seconds_inside_of_layers_are_no_compute(mesh: Path) -> None:
    trace = json.loads((mesh / "trace.json").read_text())["traceEvents"]
    spans = (
        sum(e["dur"] for e in trace if e["ph"] == "X" and e["cat"] == "compute" and e["tid"] == 0)
        / 1e6
    )
    run = read_run(mesh)
    assert run.ranks[0].layer_collective_seconds is not None
    assert run.result.workers[0].compute == pytest.approx(
        spans - run.ranks[0].layer_collective_seconds * STEPS, rel=0.02
    )


@pytest.mark.parametrize("lost", ["facts", "schedule", "at", "a rank", "trace"])
def test_runs_that_told_less_still_have_a_report(
    pipeline: Path, tmp_path: Path, report: Report, lost: str
) -> None:
    folder = tmp_path / "older"
    shutil.copytree(pipeline, folder)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    if lost == "facts":
        del summary["facts"]
    elif lost == "schedule":
        summary["facts"][0]["schedule"] = "home: nowhere"
    elif lost == "at":
        summary["facts"][1]["at"] = 3
    elif lost == "a rank":
        summary["facts"] = [None, *summary["facts"]]
    else:
        (folder / "trace.json").unlink()
    (folder / "summary.json").write_text(json.dumps(summary))
    page = report(folder)
    assert '<h2 id="pipelines">' not in page
    assert ('<h2 id="holdings">' in page) == (lost in ("schedule", "trace"))
    assert in_a_line(read_run(folder)) is None


def test_other_runs_have_no_such_sections(tmp_path: Path, report: Report) -> None:
    page = report(write_run(tmp_path / "run", "data-parallel"))
    assert '<h2 id="pipelines">' not in page
    assert '<h2 id="holdings">' not in page


def test_the_terminal_says_the_stages_and_the_bubble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--workers", "2", "--steps", "3", "--schedule", "zero-bubble-v", "--microbatches", "4"]
    assert main(["train", "digits", "pipeline", *asked, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    one = r"(\d+) % \((\d+\.\d\d)\)"
    found = re.search(
        r"4 stages, from layers\.0, .*; bubble \(over busy\) "
        rf"{one}, simulated {one}, in step [23]\n",
        said,
    )
    assert found is not None
    share, over = map(float, found.groups()[:2])
    assert over == pytest.approx(share / (100 - share), rel=0.2)

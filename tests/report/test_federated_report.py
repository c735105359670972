"""The report of federations: what it draws is what real runs told of themselves, and no more."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from browser import PROGRAM, chromium
from hypothesis import given
from hypothesis import strategies as st
from sample_runs import write_run
from test_report_page import embedded, text_of

import dure
from dure.cli.main import main
from dure.report import charts, write_report
from dure.report.federated import in_a_line, spread
from dure.report.federated_figures import ROWS, UPDATES, figures, quantile
from dure.report.formatting import metric_value
from dure.report.read import read_run
from dure.report.table import clock_columns
from dure.tasks.builtin import load_task

Report = Callable[..., str]


@pytest.fixture(scope="module")
def ditto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rounds that end before the slowest have answered, clients that are lost or lie, and models of
    their own."""
    folder = tmp_path_factory.mktemp("runs") / "ditto"
    asked = {"fraction": 0.5, "selection": "uniform:1.5:12:1"}
    strategy = dure.Ditto(clients=8, partition="label-shards:2", aggregate="median", **asked)
    world = dure.Simulated(
        devices="lognormal:1", drop_out=0.2, attack="sign-flip:4", attackers=2, engine="loop"
    )
    dure.train(
        load_task("digits"), strategy, world, dure.Stop(rounds=5), evaluate_every=2, out=folder
    )
    return folder


@pytest.fixture(scope="module")
def fed_async(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fed-async"
    strategy = dure.FedAsync(clients=8, fraction=0.5)
    world = dure.Simulated(devices="stragglers:0.3:10", engine="loop")
    dure.train(
        load_task("digits"), strategy, world, dure.Stop(rounds=30), evaluate_every=10, out=folder
    )
    return folder


def facts(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text())["facts"][0])


def with_facts(folder: Path, to: Path, **changed: Any) -> Path:
    """A copy of a run that tells other facts; None takes one away."""
    shutil.copytree(folder, to)
    summary = json.loads((to / "summary.json").read_text())
    told = summary["facts"][0] | changed
    summary["facts"] = [{key: value for key, value in told.items() if value is not None}]
    (to / "summary.json").write_text(json.dumps(summary))
    return to


def drawn(*folders: Path) -> dict[str, Any]:
    return figures([read_run(folder) for folder in folders])


def test_each_bar_is_an_assignment_in_the_colour_of_its_outcome(ditto: Path) -> None:
    figure = drawn(ditto)["flights-0"]
    assert {"accepted", "late", "dropped out"} == {one["name"] for one in figure["series"]}
    assert len({one["color"] for one in figure["series"]}) == 3
    bars = [
        (int(figure["rows"][row]), number - 1, began, began + length, one["name"])
        for one in figure["series"]
        for row, began, length, number in one["spans"]
    ]
    for bar, told in zip(sorted(bars), sorted(facts(ditto)["flights"]), strict=True):
        assert bar == (*told[:2], pytest.approx(told[2]), pytest.approx(told[3], rel=1e-4), told[4])


def test_the_page_counts_outcomes_and_the_terminal_says_them(ditto: Path, report: Report) -> None:
    outcomes, turns = facts(ditto)["outcomes"], facts(ditto)["turns"]
    assert min(outcomes.values()) > 0
    page = report(ditto)
    text, asked = text_of(page), sum(outcomes.values())
    for outcome, number in outcomes.items():
        assert f"{outcome} {number} {100 * number / asked:.1f} %" in text
    line = in_a_line(read_run(ditto))
    assert line is not None
    updates = sum(number for _, number in turns)
    assert re.fullmatch(
        rf"loop engine; [0-9.]+ s of virtual time; {updates} updates, "
        rf"{outcomes['late']} late, {outcomes['dropped out']} dropped out",
        line,
    )
    assert f"{line[1:]}; {len(turns)} of 8 clients sent updates" in text


def test_attackers_are_points_of_their_own_colour_and_shape(ditto: Path) -> None:
    told = facts(ditto)["updates"]
    for name, place in (("norms-0", 3), ("cosines-0", 4)):
        honest, attackers = drawn(ditto)[name]["series"]
        for one, lies in ((honest, False), (attackers, True)):
            own = [sent for sent in told if sent[2] == lies]
            assert one["x"] == [sent[0] + 1 for sent in own]
            assert one["said"] == [f"client {sent[1]}" for sent in own]
            assert one["y"] == pytest.approx([sent[place] for sent in own], rel=1e-5)
        assert honest["color"] != attackers["color"]
        assert honest["symbol"] != attackers["symbol"]


def test_staleness_is_drawn_where_there_is_any(ditto: Path, fed_async: Path) -> None:
    figure = drawn(ditto, fed_async)
    assert "staleness-0" not in figure
    (bars,) = figure["staleness-1"]["series"]
    assert [list(pair) for pair in zip(bars["x"], bars["y"], strict=True)] == facts(fed_async)[
        "staleness"
    ]
    assert sum(bars["y"]) == 30


def test_rounds_and_steps_meet_on_the_axis_of_virtual_time(ditto: Path, fed_async: Path) -> None:
    curves = charts.curves([read_run(ditto), read_run(fed_async)])
    assert curves is not None
    assert curves["axes"][-1]["name"] == "virtual seconds"
    for folder, series in ((ditto, curves["series"][0]), (fed_async, curves["series"][2])):
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        clock = {
            line["step"]: line["numbers"]["virtual_seconds"]
            for line in lines
            if line["kind"] == "step"
        }
        evaluations = [line for line in lines if line["kind"] == "evaluation"]
        assert series["x"]["virtual"] == pytest.approx(
            [{0: 0, **clock}[e["step"]] for e in evaluations], rel=1e-5
        )
        accuracy = [line["metrics"]["test_accuracy"] for line in evaluations]
        assert series["y"]["test_accuracy"] == pytest.approx(accuracy, rel=1e-5)
    keys = [metric["key"] for metric in curves["metrics"]]
    assert "virtual_seconds" not in keys
    assert "late" in keys
    assert "refused" not in keys  # nothing was, in either run


def test_the_time_of_a_simulation_is_beside_no_real_one(
    ditto: Path, fed_async: Path, tmp_path: Path
) -> None:
    real = [read_run(write_run(tmp_path / name, "data-parallel")) for name in ("one", "two")]
    both = [*real, read_run(ditto), read_run(fed_async)]
    columns = {column.title: column for column in clock_columns(both)}
    assert list(columns) == [
        "time",
        "time by activity (idle over busy)",
        "virtual time",
        "virtual time by activity (idle over busy)",
        "simulated in",
    ]
    for title, column in columns.items():
        told = [column.value(run) is not None for run in both]
        real_time = title.startswith("time")
        assert told == ([True, True, False, False] if real_time else [False, False, True, True])
    assert columns["simulated in"].better == 0
    # A simulation alone has no column of real time, nor an axis of it.
    assert [column.title for column in clock_columns(both[2:])] == list(columns)[2:]
    curves = charts.curves(both[2:])
    assert curves is not None
    assert "seconds" not in [axis["key"] for axis in curves["axes"]]


def test_the_server_of_a_simulation_takes_no_time_beside_virtual_seconds(ditto: Path) -> None:
    server, *clients = json.loads((ditto / "summary.json").read_text())["per_worker"]
    assert server["name"] == "server"
    assert server["compute_seconds"] == 0
    assert sum(one["compute_seconds"] for one in clients) > 0


def test_other_runs_have_no_clock_and_no_such_sections(tmp_path: Path, report: Report) -> None:
    folder = write_run(tmp_path / "run", "data-parallel")
    curves = charts.curves([read_run(folder)])
    assert curves is not None
    assert not {"virtual", "wall"} & {axis["key"] for axis in curves["axes"]}
    page = report(folder)
    assert '<h2 id="federations">' not in page
    assert '<h2 id="fairness">' not in page
    assert embedded(page)["figures"] == {}
    assert in_a_line(read_run(folder)) is None


def test_the_spread_is_that_of_the_clients_and_agrees_with_the_metrics_of_the_run(
    ditto: Path, report: Report
) -> None:
    summary, told = json.loads((ditto / "summary.json").read_text()), facts(ditto)["by_client"]
    text = text_of(report(ditto))
    for model, prefix in (("global", "client"), ("own", "personal")):
        values = told[f"{prefix}_accuracy"]
        of = spread("accuracy", values)
        assert of.mean == pytest.approx(summary[f"{prefix}_accuracy_mean"])
        assert of.median == pytest.approx(summary[f"{prefix}_accuracy_p50"])
        assert of.worst_tenth == pytest.approx(summary[f"{prefix}_accuracy_p10"])
        assert of.deviation == pytest.approx(numpy.std(values))
        shown = " ".join(
            metric_value("accuracy", value)
            for value in (of.mean, of.worst_tenth, of.deviation, of.median, min(values))
        )
        whole = metric_value("accuracy", summary[f"{prefix}_accuracy"])
        worst = facts(ditto)["measured_clients"][values.index(min(values))]
        assert f"{model} {len(values)} {shown} ({worst}) {whole}" in text


def test_clients_that_could_not_measure_or_were_out_of_transfers_are_named(
    ditto: Path, tmp_path: Path, report: Report
) -> None:
    folder = with_facts(
        ditto,
        tmp_path / "failed",
        not_measured=[[1, "the metric <b> failed", 3], [2, "the metric <b> failed", 1], ["x"]],
        out_of_transfers=[[0, 900], [3, 901]],
    )
    page = report(folder)
    assert "could not evaluate: 1 and 2: the metric <b> failed." in text_of(page)
    assert "the metric &lt;b&gt; failed" in page
    assert "2 clients had reached their transfer budget: 0 and 3" in text_of(page)


def test_curves_over_clients_are_their_values_in_order(ditto: Path, fed_async: Path) -> None:
    figure = drawn(fed_async, ditto)
    told = facts(ditto)["by_client"]
    both, own = figure["clients-accuracy"]["series"]
    assert both["y"] == pytest.approx(sorted(told["client_accuracy"]), rel=1e-5)
    assert own["y"] == pytest.approx(sorted(told["personal_accuracy"]), rel=1e-5)
    assert both["x"][0] == 0
    assert both["x"][-1] == 1
    assert both["color"] == own["color"] == charts.style(1)["color"]
    assert both["dash"] != own["dash"]
    (points,) = figure["personal-accuracy"]["series"]
    assert points["x"] == pytest.approx(told["client_accuracy"], rel=1e-5)
    assert points["y"] == pytest.approx(told["personal_accuracy"], rel=1e-5)


def test_the_page_says_for_how_many_clients_the_own_model_is_better(
    ditto: Path, report: Report
) -> None:
    told = facts(ditto)["by_client"]
    pairs = list(zip(told["client_accuracy"], told["personal_accuracy"], strict=True))
    better = sum(own > theirs for theirs, own in pairs)
    assert f"the own model is better for {better} of {len(pairs)}." in text_of(report(ditto))


def test_where_only_losses_are_known_the_worst_tenth_is_the_highest(
    ditto: Path, tmp_path: Path
) -> None:
    losses = [float(value) for value in range(11)]
    folder = with_facts(ditto, tmp_path / "losses", by_client={"client_loss": losses})
    assert "clients-loss" in drawn(folder)
    assert spread("loss", losses).worst_tenth == pytest.approx(9)
    assert spread("accuracy", losses).worst_tenth == pytest.approx(1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_lie_between_clients_as_those_of_numpy(values: list[float], share: float) -> None:
    assert quantile(values, share) == pytest.approx(
        numpy.quantile(values, share), rel=1e-9, abs=1e-6
    )


@pytest.mark.parametrize(
    ("lost", "gone"),
    [
        (
            "flights",
            ["Federation", "Participation over time", "Norms of updates", "Client by client"],
        ),
        ("updates", ["Norms of updates", "Cosines between updates and steps"]),
        ("outcomes", ["outcome assignments share"]),
        ("by_client", ["Client by client", "Spread of accuracy over clients"]),
        ("turns", ["clients sent updates"]),
    ],
)
def test_what_a_run_did_not_tell_is_not_drawn(
    ditto: Path, tmp_path: Path, report: Report, lost: str, gone: list[str]
) -> None:
    whole, page = (
        text_of(report(ditto)),
        report(with_facts(ditto, tmp_path / "less", **{lost: None})),
    )
    text = text_of(page)
    for words in gone:
        assert words in whole
        assert words not in text
    assert set(re.findall(r'data-figure="(.*?)"', page)) == set(embedded(page)["figures"])


def test_a_run_without_personal_models_has_no_scatter(
    fed_async: Path, ditto: Path, tmp_path: Path
) -> None:
    theirs = {"client_accuracy": facts(ditto)["by_client"]["client_accuracy"]}
    folder = with_facts(fed_async, tmp_path / "run", by_client=theirs)
    assert "clients-accuracy" in drawn(folder)
    assert "personal-accuracy" not in drawn(folder)


def test_of_many_clients_those_asked_most_often_are_drawn(
    ditto: Path, tmp_path: Path, report: Report
) -> None:
    flights = [
        [client, turn, turn, turn + 0.5, "accepted"]
        for client in range(100)
        for turn in range(1 + client % 50)
    ]
    outcomes = {"accepted": 9_000}
    folder = with_facts(ditto, tmp_path / "many", flights=flights, outcomes=outcomes)
    page = report(folder)
    rows = list(map(int, embedded(page)["figures"]["flights-0"]["rows"]))
    assert rows == sorted(rows)
    asked = Counter(flight[0] for flight in flights)
    assert (
        sorted((asked[client] for client in rows), reverse=True)
        == sorted(asked.values(), reverse=True)[:ROWS]
    )
    text = text_of(page)
    assert f"{ROWS} of 100 clients are drawn, those asked most often." in text
    assert f"recorded only its first {len(flights):,} of 9,000." in text


def test_of_many_updates_whole_rounds_are_drawn(
    ditto: Path, tmp_path: Path, report: Report
) -> None:
    updates = [
        [turn, client, client == 0, 1.0 + client, 0.5] for turn in range(500) for client in range(9)
    ]
    page = report(with_facts(ditto, tmp_path / "many", updates=updates))
    series = embedded(page)["figures"]["norms-0"]["series"]
    rounds = Counter(number for one in series for number in one["x"])
    assert sum(rounds.values()) <= UPDATES
    assert set(rounds.values()) == {9}
    assert list(rounds) == list(range(1, 501, 3))
    assert "One round of 3 is drawn." in text_of(page)


def test_updates_that_are_no_numbers_have_no_point(ditto: Path, tmp_path: Path) -> None:
    updates = [[0, 0, True, None, None], [0, 1, False, 2.0, None], [1, 1, False, 100.0, None]]
    figure = drawn(with_facts(ditto, tmp_path / "run", updates=updates))
    (honest,) = figure["norms-0"]["series"]
    assert honest["y"] == [2.0, 100.0]
    assert figure["norms-0"]["log"]
    assert "cosines-0" not in figure


def test_damaged_rows_are_left_out(ditto: Path, tmp_path: Path) -> None:
    flights = [[0, 0, 0.0, 1.0, "accepted"], [1, 0], None, "what", [2, 0, None, 1.0, "late"]]
    folder = with_facts(
        ditto,
        tmp_path / "run",
        flights=flights,
        staleness=[[0], 3, [2, 5]],
        updates=7,
        by_client=[],
    )
    federation = read_run(folder).federation
    assert federation is not None
    assert [one.client for one in federation.assignments] == [0]
    assert federation.staleness == {2: 5}
    assert drawn(folder)["staleness-0"]["series"][0]["y"] == [5]


def test_updates_that_the_server_refused_are_not_counted_as_accepted(
    ditto: Path, tmp_path: Path
) -> None:
    folder = with_facts(ditto, tmp_path / "run", outcomes={"accepted": 10}, turns=[[0, 7]])
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            line["numbers"]["refused"] = 3.0 if line["step"] == 1 else 0.0
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert str(in_a_line(read_run(folder))).endswith("; 7 updates, 3 refused")
    page = write_report([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "accepted 7 70.0 % refused 3 30.0 %" in text_of(page)


def test_reasons_are_text_and_no_html(ditto: Path, tmp_path: Path, report: Report) -> None:
    flights = [[0, 0, 0.0, 1.0, "<i>gone</i>"]]
    page = report(with_facts(ditto, tmp_path / "run", flights=flights, outcomes={"<i>gone</i>": 1}))
    assert "<i>gone" not in page
    assert embedded(page)["figures"]["flights-0"]["series"][0]["name"] == "&lt;i&gt;gone&lt;/i&gt;"


def test_the_terminal_says_what_came_of_the_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--clients", "4", "--rounds", "2", "--engine", "loop"]
    assert main(["train", "digits", "fed-avg", *asked, "--out", str(tmp_path / "run")]) == 0
    assert re.search(
        r"\nloop engine; [0-9.]+ s of virtual time; 8 updates\n", capsys.readouterr().err
    )


@pytest.mark.skipif(
    PROGRAM is None and not os.environ.get("CI"),
    reason="chromium is not installed, and CI is not set",
)
def test_a_browser_draws_every_figure_and_a_phone_does_not_scroll_sideways(
    ditto: Path, fed_async: Path, tmp_path: Path
) -> None:
    written = write_report([ditto, fed_async], tmp_path / "report.html")
    with chromium() as page:
        for width, phone in ((1280, False), (390, True)):
            page.open(written, width, 844, phone=phone)
            assert page.ask("document.body.dataset.errors") == "[]"
            assert page.problems == []
            assert page.ask("document.documentElement.scrollWidth") <= width
            marks = (
                "[...document.querySelectorAll('[data-figure]')]"
                ".map(f => f.querySelectorAll('.trace').length)"
            )
            names = page.ask(
                "[...document.querySelectorAll('[data-figure]')].map(f => f.dataset.figure)"
            )
            traces = {name: len(one["series"]) for name, one in drawn(ditto, fed_async).items()}
            traces["personal-accuracy"] += 1  # the diagonal
            assert dict(zip(names, page.ask(marks), strict=True)) == traces


def test_a_federation_says_what_it_cost_next_to_its_data(tmp_path: Path) -> None:
    world = dure.Simulated(energy="joules:1e-9:2e-6:9e-6", server_mbit=1)
    strategy = dure.FedAvg(clients=3, batch_size=100)
    task = load_task("digits")
    run = dure.train(task, strategy, world, dure.Stop(rounds=1), out=tmp_path / "run")
    joules = run.summary["facts"][0]["cost"]["joules"]
    page = text_of(write_report([tmp_path / "run"], tmp_path / "report.html").read_text())
    assert f"and spent {joules:,.4g} J; uploading the raw data would take" in page

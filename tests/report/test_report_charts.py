from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_runs import write_run

from dure.report import charts
from dure.report.read import read_run


def test_a_long_history_is_thinned_and_keeps_its_best_value(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", "long", steps=20_000, evaluations=5_000))
    curves = charts.curves([run])
    assert curves is not None
    evaluations, training = curves["series"]
    assert len(evaluations["x"]["step"]) <= charts.POINTS
    assert len(training["x"]["step"]) <= charts.POINTS
    assert max(evaluations["y"]["test_accuracy"]) == pytest.approx(
        run.result.best["test_accuracy"], rel=1e-5
    )
    assert evaluations["x"]["step"][-1] == training["x"]["step"][-1] == 20_000


def test_training_loss_lies_between_the_bytes_of_the_evaluations_around_it(tmp_path: Path) -> None:
    run = read_run(
        write_run(tmp_path / "run", "bytes", workers=2, steps=100, evaluations=4, bytes_per_step=10)
    )
    curves = charts.curves([run])
    assert curves is not None
    training = curves["series"][1]
    assert training["x"]["bytes"][training["x"]["step"].index(30)] == 2 * 10 * 30


def test_training_loss_after_the_last_evaluation_has_no_place_among_bytes(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", "killed", steps=100, evaluations=2, killed=True))
    curves = charts.curves([run])
    assert curves is not None
    training = curves["series"][1]
    assert training["x"]["bytes"][training["x"]["step"].index(60)] is None


def test_bytes_are_logarithmic_when_runs_differ_much(tmp_path: Path) -> None:
    few = read_run(write_run(tmp_path / "few", "few", bytes_per_step=10))
    many = read_run(write_run(tmp_path / "many", "many", bytes_per_step=10_000))
    silent = read_run(write_run(tmp_path / "silent", "silent", bytes_per_step=0))
    for runs, log in (([few], False), ([few, many], True), ([silent], False)):
        curves = charts.curves(runs)
        assert curves is not None
        assert [axis["log"] for axis in curves["axes"]] == [False, False, False, log]


def test_fifteen_runs_all_look_different() -> None:
    assert len({tuple(charts.style(index).values()) for index in range(15)}) == 15


def test_equal_partitions_are_drawn_once(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / name, name, federated=True, workers=n))
        for name, n in (("a", 4), ("b", 4), ("c", 6))
    ]
    drawn = charts.partitions(runs)
    assert [(one["users"], len(one["counts"])) for one in drawn] == [("a and b", 4), ("c", 6)]


def test_a_partition_without_labels_has_counts_only(tmp_path: Path) -> None:
    run = read_run(
        write_run(tmp_path / "run", "no labels", federated=True, workers=4, histograms=False)
    )
    (drawn,) = charts.partitions([run])
    assert drawn["cells"] is None
    assert len(drawn["counts"]) == 4


def test_a_timeline_begins_with_its_first_span_and_shows_some_of_each_lane(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", "traced", workers=4))
    (drawn,) = charts.timelines([run])
    assert drawn["lanes"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert drawn["range"][0] == 1.52
    assert 0 < drawn["range"][1] - drawn["range"][0] <= 300
    assert set(drawn["spans"]) == {"compute", "communication", "idle", "evaluation", "checkpoint"}
    assert sum(map(len, drawn["spans"].values())) <= charts.SPANS


def test_what_a_strategy_says_of_its_rounds_is_drawn_beside_the_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "residuals", steps=4, evaluations=2)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            line["numbers"] = {"primal_residual": 1 / line["step"], "rho": None}
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = charts.curves([read_run(folder)])
    assert curves is not None
    assert [metric["key"] for metric in curves["metrics"]][-2:] == ["train_loss", "primal_residual"]
    assert not curves["metrics"][-1]["rises"]
    assert curves["series"][1]["y"]["primal_residual"] == [1.0, 0.5, 0.333333, 0.25]

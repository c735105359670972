from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sample_runs import write_run

from dure.report.page import page
from dure.report.read import read_run, read_runs


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(
        write_run(tmp_path / "run", "whole", federated=True, workers=3, steps=50, target=0.9)
    )
    assert (run.label, run.result.unit, run.result.ended, run.result.steps) == (
        "whole",
        "round",
        "epochs",
        50,
    )
    assert [worker.name for worker in run.result.workers] == [
        "server",
        "client 0",
        "client 1",
        "client 2",
    ]
    assert run.result.targets[0].reached == 50 / 3
    assert run.partition is not None
    assert run.partition.histograms is not None
    assert run.trace is not None
    assert run.trace.lanes[1] == "client 0"
    assert run.notes == []


def test_half_a_line_at_the_end_is_no_damage_and_one_in_the_middle_is(tmp_path: Path) -> None:
    killed = write_run(tmp_path / "run", "killed", killed=True)
    assert read_run(killed).notes == []
    lines = (killed / "history.jsonl").read_text().splitlines(keepends=True)
    (killed / "history.jsonl").write_text(
        "".join(["[]\n", '{"kind": "ste\n', '{"kind": "step", "step": null}\n', *lines])
    )
    assert read_run(killed).notes == ["3 damaged lines of history.jsonl were left out"]


def test_a_damaged_summary_is_told_and_rebuilt_from_the_history(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "damaged")
    (folder / "summary.json").write_text('{"steps": 4')
    run = read_run(folder)
    assert run.notes == ["summary.json is damaged and was left out"]
    assert run.result.steps == 460
    assert run.result.ended is None
    assert 0.9 < run.result.best["test_accuracy"] < 1
    assert run.result.bytes_per_worker == 442_000 * 460


def test_numbers_that_are_none_count_as_missing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"partition": {"counts": "many"}, "task": 3, "classes": 4}'
    )
    lines = [
        '{"kind": "step", "step": 1, "loss": NaN, "seconds": "soon", "bytes_sent": true}',
        '{"kind": "step", "step": 2, "loss": Infinity}',
        '{"kind": "evaluation", "step": 2, "metrics": {"test_loss": NaN}}',
    ]
    (folder / "history.jsonl").write_text("\n".join(lines))
    run = read_run(folder)
    assert [(line.loss, line.seconds, line.bytes_sent) for line in run.steps] == [
        (None, None, None)
    ] * 2
    assert (run.label, run.result.best, run.partition) == ("run", {}, None)


ODD = ["1" + "0" * 400, "1e308", "Infinity", "true", "[" * 3000 + "]" * 3000, '"<img>"']


@pytest.mark.parametrize("value", ODD, ids=lambda value: value[:9])
@pytest.mark.parametrize("file", ["summary.json", "trace.json", "history.jsonl", "config.json"])
def test_whatever_json_a_folder_holds_makes_a_page(file: str, value: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "run", federated=True, workers=2, steps=4, evaluations=2)
    summary = json.loads((folder / "summary.json").read_text())
    flights = [[0, 0, 0.0, 1.0, "accepted"], [1, 0, 0.0, 2.0, "late"]]
    counts = {"staleness": [[0, 2]], "turns": [[1, 2]], "updates": [[0, 0, False, 1.0, 0.5]]}
    summary["facts"] = [{"flights": flights, **counts}]
    (folder / "summary.json").write_text(json.dumps(summary))
    text = (folder / file).read_text()
    numbers = list(re.finditer(r"(?<=[:\[,] )-?\d[\d.e+-]*", text))[:60]
    # One by one, and then all of them at once.
    for some in [*([one] for one in numbers[::4]), numbers]:
        (folder / file).write_text(_put(text, some, value))
        assert "<img" not in page(read_runs([folder]), "title", "")


def _put(text: str, places: list[re.Match[str]], value: str) -> str:
    for place in reversed(places):
        text = text[: place.start()] + value + text[place.end() :]
    return text


def test_a_comparison_shows_no_folder_outside_of_itself(tmp_path: Path) -> None:
    write_run(tmp_path / "private", "private")
    write_run(tmp_path / "sent" / "run", "run")
    names = ["run", "../private", str(tmp_path / "private")]
    (tmp_path / "sent" / "comparison.json").write_text(json.dumps({"runs": names}))
    assert [run.label for run in read_runs([tmp_path / "sent"]).runs] == ["run"]


def test_a_step_written_again_after_a_resume_stands_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    losses = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0), (3, 5.0)]
    lines = [json.dumps({"kind": "step", "step": step, "loss": loss}) for step, loss in losses]
    (folder / "history.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert [(line.step, line.loss) for line in read_run(folder).steps] == [
        (1, 9.0),
        (2, 6.0),
        (3, 5.0),
    ]


def test_equal_labels_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, "same") for name in ("a", "b")]
    assert [run.label for run in read_runs(folders).runs] == ["same (a)", "same (b)"]


def test_a_run_that_a_comparison_names_and_has_not_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "here", "here")
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": ["here", "gone"], "failed": {}}))
    runs = read_runs([tmp_path])
    assert [run.label for run in runs.runs] == ["here"]
    assert runs.failed == {"gone": "its folder is missing"}


def test_a_folder_of_runs_is_read_in_the_order_people_count(tmp_path: Path) -> None:
    for name in ("run-10", "run-2", "other"):
        write_run(tmp_path / name, name, steps=5)
    assert [run.label for run in read_runs([tmp_path]).runs] == ["other", "run-2", "run-10"]

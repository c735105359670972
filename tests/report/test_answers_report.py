"""Class by class, what differs, and how it goes at clients that have names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from sample_runs import write_run

from dure.record.png import png
from dure.report.client_bars import client_bars
from dure.report.differences import differences
from dure.report.federated_figures import federations_of
from dure.report.prediction_tables import answers, answers_of
from dure.report.read import read_run, read_runs

TOLD = {
    "examples": 12,
    "of": 20,
    "classes": ["cat", "dog <b>", "eel"],
    "confusion": [[4, 0, 0], [3, 1, 0], [0, 0, 4]],
    "pictures": [
        {"file": "000.png", "example": 0, "label": 1, "said": 0},
        {"file": "../../config.json", "example": 1, "label": 1, "said": 0},
        {"file": "001.png", "example": 2, "label": 9, "said": 0},
    ],
}


def with_answers(folder: Path, told: object = TOLD) -> Path:
    write_run(folder, "a run", steps=20, evaluations=2)
    (folder / "answers").mkdir()
    for name in ("000.png", "001.png"):
        (folder / "answers" / name).write_bytes(png(np.zeros((4, 4), np.uint8)))
    (folder / "answers.json").write_text(json.dumps(told))
    return folder


def test_scores_of_classes_are_those_of_the_table(tmp_path: Path) -> None:
    run = read_run(with_answers(tmp_path / "run"))
    html = answers([run])
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", html)
    words = [re.sub(r"<[^>]+>", " ", row).split() for row in rows]
    # 4 of 4 are right, but 7 were said to be of it: 2 · 4/7 / (1 + 4/7).
    assert words[0] == ["cat", "4", "100.0", "%", "57.1", "%", "72.7", "%", "–"]
    assert "dog &lt;b&gt;" in rows[1]
    assert words[1][3:] == ["25.0", "%", "(least)", "100.0", "%", "40.0", "%", "cat", "(3)"]
    assert "75.0 %. The first 12 of 20 test examples." in html


def test_a_picture_is_a_file_of_the_folder_or_nothing(tmp_path: Path) -> None:
    told = read_run(with_answers(tmp_path / "run")).answers
    assert told is not None
    assert [(one.label, one.said) for one in told.seen] == [(1, 0)]
    assert told.seen[0].picture.startswith("data:image/png;base64,")


def test_damaged_answers_are_none(tmp_path: Path) -> None:
    for confusion in ([], [[1]], [[1, 2], [3]], [[1, -1], [0, 1]], [["a", 1], [1, 1]], None):
        assert answers_of(tmp_path, {"confusion": confusion}) is None
    assert answers_of(tmp_path, {"confusion": [[1] * 51] * 51}) is None
    assert answers([read_run(write_run(tmp_path / "none", "none", steps=4, evaluations=1))]) == ""


def test_only_settings_that_differ_are_told(tmp_path: Path) -> None:
    for place, batch in enumerate((32, 64)):
        write_run(
            tmp_path / str(place),
            f"run {place}",
            steps=4,
            evaluations=1,
            config={"strategy": {"name": "data-parallel", "batch_size": batch, "<i>": None}},
        )
    runs = read_runs([tmp_path]).runs
    html = differences(runs)
    assert re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", html) == ["run", "batch size"]
    assert re.findall(r"<td class=\"text\">(.*?)</td>", html) == ["32", "64"]
    assert differences(runs[:1]) == ""
    assert differences([runs[0], runs[0]]) == ""


def federated(folder: Path, names: list[str] | None) -> Path:
    write_run(folder, "fed", federated=True, workers=3, steps=4, evaluations=1)
    config = json.loads((folder / "config.json").read_text())
    if names is not None:
        config["partition"]["names"] = names
    (folder / "config.json").write_text(json.dumps(config))
    summary = json.loads((folder / "summary.json").read_text())
    facts = {
        "flights": [],
        "turns": [[0, 4], [1, 4], [2, 4]],
        "by_client": {"client_accuracy": [0.9, 0.5, 0.7]},
        "measured_clients": [0, 1, 2],
    }
    (folder / "summary.json").write_text(json.dumps({**summary, "facts": [facts]}))
    return folder


def test_each_client_with_a_name_has_a_bar_and_the_least_is_marked(tmp_path: Path) -> None:
    run = read_run(federated(tmp_path / "run", ["Basel", "Bern & Thun", "Chur"]))
    html = client_bars(federations_of([run])[0], "accuracy")
    assert re.findall(r'data-client="(.*?)"', html) == ["Basel", "Bern &amp; Thun", "Chur"]
    assert html.count('class="least"') == 1
    marked = html.split('data-client="Bern &amp; Thun"')[1].split("</li>")[0]
    assert "50.00 %" in marked
    assert "(worst)" in marked
    assert "width:50.0%" in marked


def test_clients_that_are_numbers_have_no_bars(tmp_path: Path) -> None:
    run = read_run(federated(tmp_path / "run", None))
    assert client_bars(federations_of([run])[0], "accuracy") == ""


def test_where_all_took_part_in_every_round_it_is_said(tmp_path: Path) -> None:
    from dure.report.federated import federations

    run = read_run(federated(tmp_path / "run", None))
    said = "ll 3 clients took part in every one of the 4 rounds"
    assert said in federations([run], {})
    longer = replace(run, result=replace(run.result, steps=5))
    assert said.replace("4", "5") not in federations([longer], {})
    assert "3 of 3 clients sent updates, 4 each" in federations([longer], {})


def test_settings_that_only_some_systems_have_are_folded(tmp_path: Path) -> None:
    strategies = [
        {"name": "zero", "batch_size": 32, "stage": 2, "accumulate": 1},
        {"name": "zero", "batch_size": 64, "stage": 2, "accumulate": 1},
        {"name": "fed-avg", "batch_size": 64, "clients": 10},
    ]
    runs = [
        read_run(write_run(tmp_path / str(place), f"run {place}", config={"strategy": strategy}))
        for place, strategy in enumerate(strategies)
    ]
    shown, folded = differences(runs).split("<details", 1)
    heads = r'<th scope="col" class="text">(.*?)</th>'
    assert re.findall(heads, shown) == ["system", "batch size"]
    assert re.findall(heads, folded) == ["stage", "accumulate", "clients"]
    # FedAvg has no stage, and no dash in its place: nothing is unknown.
    assert '<td class="text"></td><td class="text"></td><td class="text">10</td>' in folded

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

import dure.report
from dure.errors import RunFolderError
from dure.report import write_report
from dure.report.read import read_run
from dure.report.repeat_command import command

Report = Callable[..., str]


def embedded(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def text_of(page: str) -> str:
    """What a reader sees, tags removed."""
    words: list[str] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            if self.cdata_elem is None:
                words.append(data)

    Reader().feed(page)
    return " ".join(" ".join(words).split())


def test_loading_the_report_does_not_load_torch() -> None:
    code = "import sys, dure.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_plotly_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, comparison: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"pip install 'dure\[report\]'"):
        write_report([comparison], tmp_path / "report.html")


def test_when_a_run_was_to_stop_is_said_in_words(tmp_path: Path) -> None:
    """A least difference belongs to a patience; without one it is no limit."""
    plain = {"epochs": 2, "min_delta": 0.0}
    patient = {**plain, "patience": 3, "monitor": "validation_loss", "min_delta": 0.01}
    for stop, words in (
        (plain, "2 epochs"),
        (patient, "2 epochs or 3 evaluations without a better validation_loss by more than 0.01"),
    ):
        folder = write_run(tmp_path / str(len(stop)), "run", config={"stop": stop})
        page = write_report([folder], tmp_path / "report.html").read_text()
        assert f"<dt>stop</dt><dd>{words}</dd>" in page


def test_the_page_refers_to_nothing_outside_itself(comparison: Path, report: Report) -> None:
    page = report(comparison)
    assert not re.search(
        r"https?://|@import|<link|<base|<iframe|\bsrc\s*=|\bhref\s*=|url\(", page, re.IGNORECASE
    )
    assert "default-src 'none'" in page


def test_plotly_is_in_the_page_once_and_the_rest_is_small(comparison: Path, tmp_path: Path) -> None:
    page = write_report([comparison], tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    assert page.count("* plotly.js v") == 1
    assert len(page.split('<script id="plotly">')[0]) < 1_000_000


def test_every_part_is_there_in_its_order(comparison: Path, report: Report) -> None:
    page = report(comparison)
    parts = re.findall(r"<h[12][^>]*>(.*?)</h", page)
    assert parts == [
        "digits: 9 runs", "Overview", "Curves", "Runs", "What differs", "Time by activity",
        "Timeline", "Data per client",
        "What the words mean",
    ]  # fmt: skip


def test_the_table_says_what_each_run_came_to(comparison: Path, report: Report) -> None:
    text = text_of(report(comparison))
    assert "0 B (best)" in text
    assert "to 95 % accuracy" in text
    assert "not reached" in text
    assert "kill at step 306" in text
    assert (
        "scaffold failed: client 3 failed in round 1: ValueError: the model has <BatchNorm2d>"
        in text
    )


class Tables(HTMLParser):
    """Whether headings and cells hold words, by table, row and column."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[tuple[str, bool]]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th") and self.tables:
            words = "text" in (dict(attrs).get("class") or "").split()
            self.tables[-1][-1].append((tag, words))


def test_headings_stand_above_their_values(comparison: Path, report: Report) -> None:
    found = Tables()
    found.feed(report(comparison))
    compared = 0
    for head, *rows in found.tables:
        for row in rows:
            # What spans columns stands below none of them; those at the edges are always at left.
            if len(row) == len(head):
                compared += 1
                inner = zip(head[1:-1], row[1:-1], strict=True)
                assert all(above[1] >= below[1] for above, below in inner)
    assert compared
    style = (Path(dure.report.__file__).parent / "style.css").read_text()
    assert "th.text, td.text, th:first-child, th:last-child { text-align: left; }" in style


def test_every_metric_has_a_column_and_the_tenth_of_clients_a_section(
    tmp_path: Path, report: Report
) -> None:
    measured = {
        "test_accuracy": 0.9,
        "test_f1": 0.71,
        "personal_accuracy": 0.93,
        "personal_accuracy_p10": 0.8,
    }
    for name, moved in (("a", 0.0), ("b", 0.01)):
        run = write_run(tmp_path / "runs" / name, name)
        values = {key: value + moved for key, value in measured.items()} | {
            "test_loss": 0.3,
            "personal_loss": 0.2,
        }
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, **values, "best": values}))
    page = report(tmp_path / "runs")
    head = re.findall(r'<th scope="col"><button type="button">(.*?)</button>', page)
    # The best accuracy of each run is its final one.
    assert head[:5] == [
        "run, world",
        "accuracy",
        "final f1",
        "final personal accuracy",
        "test loss",
    ]
    assert not any("p10" in title for title in head)
    assert "94.00 % (best)" in text_of(page)


def test_a_killed_run_wins_no_cost_column(tmp_path: Path, report: Report) -> None:
    write_run(tmp_path / "runs" / "whole", "whole", seconds=9)
    write_run(tmp_path / "runs" / "other", "other", seconds=12)
    write_run(tmp_path / "runs" / "killed", "killed", seconds=3, killed=True)
    text = text_of(report(tmp_path / "runs"))
    assert "9.00 s (best)" in text
    assert "2.00 s (best)" not in text


def test_what_reads_the_same_is_equally_good(tmp_path: Path, report: Report) -> None:
    for name, seconds in (("a", 3.1), ("b", 3.1 + 1e-9), ("c", 4.0)):
        write_run(tmp_path / "runs" / name, name, seconds=seconds)
    assert text_of(report(tmp_path / "runs")).count("3.10 s (best)") == 2


def test_hostile_text_stays_text(tmp_path: Path, report: Report) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;<!--"
    classes = [hostile] * 10
    config = {
        "classes": classes,
        "task": {"name": hostile},
        "versions": {hostile: hostile},
        "strategy": {"name": hostile},
    }
    run = write_run(tmp_path / "run", hostile, federated=True, workers=3, config=config)
    summary = json.loads((run / "summary.json").read_text())
    summary["per_worker"][0]["name"] = summary["ended"] = summary["unit"] = summary["world"] = (
        hostile
    )
    (run / "summary.json").write_text(json.dumps(summary))
    page = report(run, title=hostile)
    # The data, common.js and page.js; the fourth, plotly, is cut out by the fixture.
    assert page.count("<script") == 3
    assert not re.search(r"<img|<!--|<script>alert", page)
    assert embedded(page)["runs"][0]["label"] == hostile
    assert hostile in text_of(page)


def test_a_killed_run_is_shown_as_far_as_it_came(tmp_path: Path, report: Report) -> None:
    run = write_run(tmp_path / "run", "killed", killed=True)
    page = report(run)
    assert "Timeline" not in page
    assert "kill at step 306" in text_of(page)
    assert max(embedded(page)["curves"]["series"][0]["x"]["step"]) > 290


def test_a_run_that_left_only_its_config_is_shown(tmp_path: Path, report: Report) -> None:
    run = write_run(tmp_path / "run", "just begun", killed=True)
    (run / "history.jsonl").unlink()
    page = report(run)
    assert embedded(page)["curves"] is None
    assert "just begun" in text_of(page)


def test_a_run_without_metrics_has_its_training_loss(tmp_path: Path, report: Report) -> None:
    page = report(write_run(tmp_path / "run", "no test data", evaluations=0))
    assert [metric["key"] for metric in embedded(page)["curves"]["metrics"]] == ["train_loss"]
    assert "train loss" in text_of(page)


def test_a_regression_is_judged_by_its_lowest_loss(tmp_path: Path, report: Report) -> None:
    page = report(write_run(tmp_path / "run", "regression", accuracy=None))
    assert "best test loss" in text_of(page)
    assert "accuracy" not in text_of(page)


def test_a_thousand_clients_make_a_page_of_the_usual_size(tmp_path: Path, report: Report) -> None:
    page = report(write_run(tmp_path / "run", "many", federated=True, workers=1000, steps=100))
    assert len(page) < 400_000
    assert "1,000 clients" in text_of(page)
    assert "12 of 1,001 lanes are drawn, the first to start; 989 more in trace.json." in json.dumps(
        embedded(page)
    )
    assert "client 9, busiest" in text_of(page)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="nothing-here"):
        write_report([tmp_path / "nothing-here"], tmp_path / "report.html")
    with pytest.raises(RunFolderError, match="at least one"):
        write_report([], tmp_path / "report.html")


def test_a_comparison_of_which_everything_failed_is_still_a_page(
    tmp_path: Path, report: Report
) -> None:
    (tmp_path / "comparison.json").write_text(
        json.dumps({"runs": [], "failed": {"fed-avg": "no data"}})
    )
    assert "fed-avg failed: no data" in text_of(report(tmp_path))


def test_a_command_repeats_a_run_whose_settings_are_plain(tmp_path: Path) -> None:
    def told(name: str, **config: Any) -> str | None:
        return command(read_run(write_run(tmp_path / name, name, config=config)))

    strategy = {"name": "data-parallel", "batch_size": None, "all_reduce": "tree"}
    stop = {"epochs": 20.0, "rounds": None, "target": {"test_accuracy": 0.95}}
    assert told(
        "plain",
        strategy=strategy,
        stop=stop,
        task={"name": "my tasks.py:task", "options": {"lr": 0.1}},
    ) == (
        "dure train 'my tasks.py:task' data-parallel --batch-size None --all-reduce tree --lr 0.1 "
        "--epochs 20 --target test_accuracy=0.95 --workers 2 --seed 0"
    )
    learned = {
        "name": "digits",
        "learning": {"clip_norm": 1.0, "unfreeze": {"0.*": 3}},
        "validation": 0.1,
        "weights_from": "w.safetensors",
    }
    early = {"patience": 3, "min_delta": 0.0}
    assert told("learned", strategy={"name": "single-worker"}, stop=early, task=learned) == (
        "dure train digits single-worker --clip-norm 1 --unfreeze '0.*=3' --validation 0.1 "
        "--weights w.safetensors --patience 3 --workers 2 --seed 0"
    )
    assert told("recorded", command="dure train a b") == "dure train a b"

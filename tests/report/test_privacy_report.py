"""Reports of differential privacy: what is promised, in words, and how it was spent."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_report_page import embedded

import dure
from dure.report import write_report
from dure.report.privacy import FIGURE, figures, in_a_line, promises
from dure.report.read import read_run
from small import small_task


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run that promises something, one that clips and adds no noise, and a plain one."""
    made = []
    for name, privacy in (
        ("private", "user-level:0.3:1.2"),
        ("clipped", "user-level:0.3"),
        ("plain", "none"),
    ):
        folder = tmp_path_factory.mktemp("runs") / name
        strategy = dure.FedAvg(clients=10, fraction=0.5, privacy=privacy)
        dure.train(small_task(n=40), strategy, stop=dure.Stop(rounds=2), out=folder)
        made.append(folder)
    return made


def test_the_section_says_whose_epsilon_it_is_and_what_was_assumed(folders: list[Path]) -> None:
    run = read_run(folders[0])
    drawn = figures([run])
    text = promises([run], drawn)
    (promise,) = run.promises
    assert f"<td>{promise['epsilon']:.4g}</td><td>1e-05</td>" in text
    for words in ("client", promise["neighbours"], promise["sampling"], promise["against"]):
        assert words in text
    # What no epsilon covers is said beside it.
    for words in ("metrics", "target", "Secure aggregation", "cannot enforce"):
        assert words in text
    (line,) = drawn[FIGURE]["series"]
    assert line["x"] == [1, 2]
    assert line["y"] == [step.metrics["epsilon"] for step in run.steps]
    assert in_a_line(run) == promise["said"]


def test_without_noise_no_number_is_told(folders: list[Path]) -> None:
    clipped = read_run(folders[1])
    assert "<td>no bound</td>" in promises([clipped], {})
    assert figures([clipped]) == {}


def test_runs_that_promise_nothing_have_no_section(folders: list[Path], tmp_path: Path) -> None:
    plain = read_run(folders[2])
    assert promises([plain], {}) == ""
    assert in_a_line(plain) is None
    page = write_report(folders, tmp_path / "report.html").read_text()
    assert page.count('<section aria-labelledby="privacy">') == 1
    assert FIGURE in embedded(page)["figures"]

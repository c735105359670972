"""What a reader does in a real browser: smooth, join seeds, narrow, and save without a network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from urllib.parse import unquote

import pytest
from browser import PROGRAM, Page, chromium
from sample_runs import write_run
from test_answers_report import TOLD, federated, with_answers

from dure.report import write_report

pytestmark = pytest.mark.skipif(
    PROGRAM is None and not os.environ.get("CI"),
    reason="chromium is not installed, and CI is not set",
)

CATCH = """
window.saved = [];
HTMLAnchorElement.prototype.click = function () {
  window.saved.push([this.download, this.getAttribute("href")]);
};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("tools")
    for seed in (0, 1, 2):
        write_run(folder / f"ring-{seed}", "=ring", steps=60, evaluations=6, seed=seed)
    with_answers(folder / "answers", TOLD)
    names = [f"hospital {place}" for place in range(9)]
    federated(folder / "fed", names[:3])
    with chromium() as page:
        page.open(write_report([folder], folder / "report.html"))
        yield page
        assert page.ask("document.body.dataset.errors") == "[]"
        assert page.problems == []
        assert [u for u in page.requests if not u.startswith(("file:", "data:", "blob:"))] == []


def drawn(page: Page) -> list[list[float]]:
    lines = "document.getElementById('curves').data.filter(t => !t.skip).map(t => [...t.y])"
    return list(json.loads(page.ask(f"JSON.stringify({lines})")))


def change(page: Page, name: str, what: str, event: str) -> None:
    page.ask(f"(e => {{ e.{what}; e.dispatchEvent(new Event('{event}')) }})({name})")


def test_smoothing_flattens_a_curve_and_keeps_its_first_value(page: Page) -> None:
    before = drawn(page)[0]
    change(page, "document.getElementById('smooth')", "value = 0.9", "input")
    after = drawn(page)[0]
    change(page, "document.getElementById('smooth')", "value = 0", "input")
    assert after[0] == pytest.approx(before[0])
    jumps = [sum(abs(b - a) for a, b in pairwise(y)) for y in (before, after)]
    assert jumps[1] < 0.7 * jumps[0]
    assert drawn(page)[0] == before


def test_seeds_are_joined_to_their_mean_with_a_band(page: Page) -> None:
    alone = drawn(page)
    change(page, "document.getElementById('join-seeds')", "checked = true", "change")
    together = drawn(page)
    bands = page.ask("document.getElementById('curves').data.filter(t => t.fill).length")
    change(page, "document.getElementById('join-seeds')", "checked = false", "change")
    assert bands == 1
    assert len(together) == len(alone) - 2
    runs = "JSON.stringify(JSON.parse(document.getElementById('data').textContent).groups)"
    places = json.loads(page.ask(runs))[0]["runs"]
    labels = page.ask("[...document.querySelectorAll('.legend button')].map(b => b.textContent)")
    assert all(labels[place].startswith("=ring") for place in places)
    order = [place for place in range(len(labels)) if place in places]
    ends = [alone[place][-1] for place in order]
    assert together[0][-1] == pytest.approx(sum(ends) / 3, rel=1e-6)


def test_a_name_narrows_table_curves_and_sections(page: Page) -> None:
    every = "[...document.querySelectorAll('#table tbody:first-of-type tr')]"
    rows = f"{every}.filter(r => !r.hidden).length"
    change(page, "document.getElementById('run-filter')", "value = 'FED'", "input")
    assert page.ask(rows) == 1
    assert len(drawn(page)) == 1
    change(page, "document.getElementById('run-filter')", "value = ''", "input")
    assert page.ask(rows) == 5


def test_the_table_is_saved_as_it_is_shown_and_holds_no_formula(page: Page) -> None:
    page.ask(CATCH)
    change(page, "document.getElementById('run-filter')", "value = 'ring'", "input")
    save = "document.querySelector('#table').closest('.scroll').nextElementSibling"
    page.ask(f"{save}.querySelector('button').click()")
    name, address = page.ask("saved.at(-1)")
    text = unquote(address.removeprefix("data:text/csv;charset=utf-8,"))
    change(page, "document.getElementById('run-filter')", "value = ''", "input")
    assert name == "runs.csv"
    lines = text.strip().split("\n")
    assert lines[0].startswith('"run, world",')
    assert len(lines) == 4
    assert all(line.startswith("'=ring") for line in lines[1:])


def test_a_chart_is_saved_as_svg_png_and_numbers(page: Page) -> None:
    page.ask(CATCH)
    for place in (0, 1):
        page.ask(f"document.querySelector('#curves + .save').children[{place}].click()")
        # A picture is made aside.
        page.ask(
            f"new Promise(done => {{ const look = () => saved.length > {place} ? done(1) : "
            f"setTimeout(look, 20); look() }})"
        )
    page.ask("document.querySelector('#curves + .save').children[2].click()")
    saved = page.ask("saved.map(([name, at]) => [name, at.slice(0, 18)])")
    assert saved[0][0].endswith(".svg")
    assert saved[0][1].startswith("data:image/svg+xml")
    assert saved[1][0].endswith(".png")
    assert saved[1][1].startswith("data:image/png")
    assert saved[2][0].endswith(".csv")


def test_the_matrix_of_classes_is_drawn(page: Page) -> None:
    cells = page.ask("document.getElementById('answers-chart').data[0].z.map(r => [...r])")
    assert cells == [[1, 0, 0], [0.75, 0.25, 0], [0, 0, 1]]

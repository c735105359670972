"""The page in a real browser: everything is drawn, nothing is asked of the network, and it fits a
phone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import PROGRAM, Page, chromium
from sample_runs import write_run

from dure.report import write_report

pytestmark = pytest.mark.skipif(
    PROGRAM is None and not os.environ.get("CI"),
    reason="chromium is not installed, and CI is not set",
)

DRAWN = (
    "[...document.querySelectorAll('.chart')]"
    ".map(c => c.querySelectorAll('.main-svg').length && c.querySelectorAll('.trace, .hm').length)"
)
SIDEWAYS = "document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.fixture(scope="module")
def written(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([comparison], tmp_path_factory.mktemp("report") / "report.html")


def assert_well(page: Page) -> None:
    assert page.ask("document.body.dataset.errors") == "[]"
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    drawn = page.ask(DRAWN)
    assert all(drawn), drawn


def test_every_chart_is_drawn_without_an_error_or_a_request(page: Page, written: Path) -> None:
    page.open(written)
    charts = page.ask("document.querySelectorAll('.chart').length")
    assert page.ask("document.body.dataset.chartsDrawn") == str(charts)
    assert_well(page)


def test_a_phone_never_scrolls_the_page_sideways(page: Page, written: Path) -> None:
    page.open(written, 390, 844, phone=True)
    assert page.ask(SIDEWAYS) <= 390
    page.ask("document.querySelector('details').open = true")
    assert page.ask(SIDEWAYS) <= 390
    assert page.ask("innerWidth") == 390
    assert_well(page)


def test_the_theme_follows_the_system_and_the_button_and_the_charts_follow_it(
    page: Page, written: Path
) -> None:
    # The first chart, which is drawn at once.
    label = "document.querySelector('[data-overview] .xtick text')"
    looks = f"[getComputedStyle(document.body).backgroundColor, {label}.style.fill]"
    page.open(written, dark=False)
    light = page.ask(looks)
    page.ask("document.getElementById('theme').click()")
    dark = page.ask(looks)
    page.ask("localStorage.clear()")
    page.open(written, dark=True)
    assert page.ask(looks) == dark
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert_well(page)


def test_every_switch_redraws(page: Page, written: Path) -> None:
    page.open(written)
    for group in ("curve-metric", "curve-axis", "timeline-move"):
        for place in range(page.ask(f"document.getElementById('{group}').children.length")):
            page.ask(f"document.getElementById('{group}').children[{place}].click()")
    page.ask("document.getElementById('log-y').click()")
    page.ask("window.choice = document.getElementById('timeline-run')")
    for place in range(page.ask("choice.length")):
        page.ask(f"choice.selectedIndex = {place}; choice.dispatchEvent(new Event('change'))")
    assert "single-worker" in page.ask("document.getElementById('curve-note').textContent")
    assert_well(page)


def test_the_overview_has_a_point_for_each_run_that_the_filter_shows(
    page: Page, written: Path
) -> None:
    page.open(written)
    points = "document.querySelectorAll('[data-overview=\"0\"] .point').length"
    known = page.ask("data.textContent && JSON.parse(data.textContent).overview.charts[0].points")
    assert page.ask(points) == len(known) > 2
    first = page.ask("JSON.parse(data.textContent).runs[0].label")
    page.ask(
        f"field = document.getElementById('run-filter'), field.value = {json.dumps(first)}, "
        "field.dispatchEvent(new Event('input'))"
    )
    assert page.ask(points) == 1
    assert_well(page)


def test_a_run_can_be_hidden_from_the_curves(page: Page, written: Path) -> None:
    page.open(written)
    lines = "document.querySelectorAll('#curves .trace').length"
    before = page.ask(lines)
    page.ask("document.querySelector('.legend button').click()")
    assert page.ask(lines) == before - 1
    page.ask("document.querySelectorAll('.legend button').forEach((b, i) => i && b.click())")
    assert page.ask(lines) == 0
    assert page.ask("document.body.dataset.errors") == "[]"


def test_runs_that_compute_the_same_are_named_since_only_one_line_is_seen(
    page: Page, tmp_path: Path
) -> None:
    folders = [write_run(tmp_path / name, name) for name in ("one", "two")]
    page.open(write_report(folders, tmp_path / "report.html"))
    assert (
        page.ask("document.getElementById('curve-note').textContent")
        == "On one and the same line: one, two."
    )


def test_a_heading_sorts_and_unknown_values_stay_below(page: Page, written: Path) -> None:
    page.open(written)
    heads = page.ask("[...document.querySelectorAll('#table thead th')].map(h => h.textContent)")
    place = heads.index("to 95 % accuracy")
    rows = "[...document.querySelectorAll('#table tbody:first-of-type tr')]"
    column = f"{rows}.map(row => row.children[{place}].dataset.value ?? null)"
    for order in ("ascending", "descending"):
        page.ask(f"document.querySelectorAll('#table thead button')[{place}].click()")
        values = page.ask(column)
        assert values[-3:] == [None, None, None]
        known = [float(value) for value in values[:-3]]
        assert known == sorted(known, reverse=order == "descending")
        assert page.ask(f"document.querySelectorAll('#table thead th')[{place}].ariaSort") == order


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("killed", {"killed": True}),
        ("no-metrics", {"evaluations": 0}),
        ("regression", {"accuracy": None}),
        ("thousand", {"federated": True, "workers": 1000, "steps": 60}),
        ("no-labels", {"federated": True, "workers": 5, "histograms": False}),
        ("</script><img src=x onerror=alert(1)>%{x}$a$", {"federated": True, "workers": 2}),
    ],
)
def test_an_unusual_run_opens_too(
    page: Page, tmp_path: Path, name: str, options: dict[str, object]
) -> None:
    write_run(tmp_path / "run", name, **options)  # type: ignore[arg-type]
    page.open(write_report([tmp_path / "run"], tmp_path / "report.html"), 390, 844, phone=True)
    assert page.ask(SIDEWAYS) <= 390
    assert_well(page)


def test_the_title_of_an_axis_is_text(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "run")
    summary = json.loads((run / "summary.json").read_text())
    unit = '<a href="https://example.org">step</a>'
    (run / "summary.json").write_text(json.dumps({**summary, "unit": unit}))
    page.open(write_report([run], tmp_path / "report.html"), 1200, 900)
    page.ask("document.querySelectorAll('#curve-axis button')[2].click()")
    assert page.ask("document.querySelector('#curves .xtitle').textContent") == f"{unit}s"
    assert not page.ask("document.querySelectorAll('#curves a').length")
    assert_well(page)


def test_fifteen_runs_open_and_fit(page: Page, tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(index), f"a-long-name-without-any-space-in-it-{index}", seed=index)
        for index in range(15)
    ]
    page.open(write_report(folders, tmp_path / "report.html"), 390, 844, phone=True)
    assert page.ask(SIDEWAYS) <= 390
    assert_well(page)

"""The live page in a real browser: opened by its token, it grows, keeps a choice, and ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from browser import PROGRAM, Page, chromium
from sample_runs import write_run

from dure.record.run import RunFolder
from dure.report.live.listener import Listener
from dure.report.live.page import LivePage

pytestmark = pytest.mark.skipif(
    PROGRAM is None and not os.environ.get("CI"),
    reason="chromium is not installed, and CI is not set",
)

LINK = "document.getElementById('link')?.className"
POINTS = "document.getElementById('curves').calcdata[0].length"
SIDEWAYS = "document.documentElement.scrollWidth"
CODE = "ABCD-EFGH"

SERVER: dict[str, Any] = {
    "state": "training",
    "round": 3,
    "who": [
        {"client": 0, "name": "ward <img src=x>", "state": "at work", "last": "accepted"},
        {"client": 1, "name": "ward-2-" * 12, "state": "missing", "last": "failed: no memory " * 9},
    ],
    "newest_refusals": [{"kind": "forged", "reason": "<b>x</b>", "address": "10.0.0.1"}],
}


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with chromium(60) as tab:
        yield tab


class Going:
    """A run that somebody trains, a few lines of its history at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_run(folder, "ring <b>x</b>", steps=200)
        self.files = {name: (folder / name).read_text() for name in ("summary.json", "trace.json")}
        for name in self.files:
            (folder / name).unlink()
        self.lines = (folder / "history.jsonl").read_text().splitlines(keepends=True)
        (folder / "history.jsonl").write_text("".join(self.lines[:40]))
        self.held = RunFolder(folder)
        self.held.hold()

    def grow(self, start: int, end: int | None) -> None:
        with (self.folder / "history.jsonl").open("a") as file:
            file.write("".join(self.lines[start:end]))

    def end(self) -> None:
        for name, text in reversed(self.files.items()):
            (self.folder / name).write_text(text)
        self.held.close()


def enter(tab: Page, url: str, code: str = CODE) -> None:
    """Opens the page by its form."""
    # The form comes with 401, which a browser tells as an error.
    tab.open(url)
    tab.problems.clear()
    tab.until("document.readyState == 'complete' && !!document.getElementById('token')")
    tab.ask(f"document.getElementById('token').value = '{code}'")
    tab.ask("document.querySelector('form button').click()")
    tab.until(f"{LINK} == 'live'")


def assert_well(tab: Page) -> None:
    assert tab.problems == []
    assert tab.ask("document.body.dataset.errors") == "[]"
    assert not tab.ask("document.querySelectorAll('main img, main b b').length")


def test_a_page_follows_a_run_from_its_token_to_its_end(tab: Page, tmp_path: Path) -> None:
    going = Going(tmp_path / "run")
    server = dict(SERVER)
    page = LivePage([tmp_path], CODE, "It is there.", server=lambda: server)
    listener = Listener(page)
    with closing(listener):
        enter(tab, listener.url)
        assert_well(tab)
        # Neither the address nor a script has what opens the page.
        assert tab.ask("location.href + document.cookie") == listener.url
        assert all(CODE not in url for url in tab.requests)
        tab.ask("document.querySelectorAll('#curve-axis button')[2].click()")
        tab.ask("void (window.chart = document.getElementById('curves'))")
        before = tab.ask(POINTS)
        going.grow(40, 120)
        tab.until(f"{POINTS} > {before}")
        # Drawn further in the same chart: nothing was built anew.
        assert tab.ask("window.chart === document.getElementById('curves')")
        assert tab.ask("document.body.dataset.built ?? null") is None
        assert "running" in tab.ask("document.querySelector('[data-part=\"1\"]').textContent")
        assert_well(tab)
        for dark in (False, True):
            tab.open(listener.url, 390, 844, phone=True, dark=dark)
            tab.until(f"{LINK} == 'live'")
            assert tab.ask(SIDEWAYS) <= 390
            assert_well(tab)
        tab.ask("document.querySelectorAll('#curve-axis button')[2].click()")
        going.grow(120, None)
        server["state"] = "over"
        going.end()
        tab.until("document.body.dataset.over == 'yes'")
        assert "final report" in tab.ask("document.getElementById('link').textContent")
        # The timeline is there only now; the axis is still the one that was chosen.
        assert tab.ask("!!document.querySelector('#timeline .main-svg')")
        chosen = "document.querySelector('#curve-axis [aria-pressed=true]').textContent"
        assert tab.ask(chosen) == "steps"
        assert_well(tab)
    tab.until("document.getElementById('link').textContent.includes('gone')")
    assert_well(tab)


def test_a_page_finds_its_server_again(tab: Page, tmp_path: Path) -> None:
    going = Going(tmp_path / "run")

    def make() -> LivePage:
        return LivePage([tmp_path], "another", "It is there.")

    listener = Listener(make())
    with closing(listener):
        enter(tab, listener.url, "another")
        before = tab.ask(POINTS)
    tab.until(f"{LINK} == 'lost'")
    tab.problems.clear()
    going.grow(40, 120)
    with closing(Listener(make(), listener.port)):
        while tab.ask(f"{LINK} != 'live' || {POINTS} <= {before}"):
            # A browser tells each try that found nobody.
            tab.problems.clear()
            time.sleep(0.05)
        assert tab.ask("document.body.dataset.errors") == "[]"
    going.held.close()

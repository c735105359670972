"""The report in Korean: no English text is left, and the catalogue agrees with the code.

A new text of the report needs a translation in src/dure/report/korean.json, or, if it is a name
that stays in English, a place in `NAMES`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

import dure
from dure.cli.main import main
from dure.report.live.page import LivePage
from dure.report.page import content, title_of, write_report
from dure.report.read import read_runs
from dure.report.translation import catalogue, in_language, language, recorded, translated
from dure.tasks.builtin import load_task

SOURCES = Path(dure.__file__).parent

PLACE = re.compile(r"\{(\w+)\}")

WORD = re.compile(r"[A-Za-z]{2,}")

NAMES = {
    # Units, formats and measures.
    *("ms", "min", "kB", "MB", "GB", "MFLOP", "AUC", "PSNR", "SSIM", "TPR", "dB", "IID", "CSV"),
    # Programs, files and commands.
    *("dure", "torch", "cpu", "python", "Python", "ZeRO", "trace", "json", "FedAsync", "Adam"),
    *("status", "train", "resume", "watch"),
    # Labels and tasks of the sample runs, and their reasons from outside of the report.
    *("digits", "FedAvg", "Batched", "Loop", "layers"),
}
"""English words that are names. Settings, labels and code are left out by their place."""


class VisibleText(HTMLParser):
    """Texts that a reader sees or hears, without code and tables of settings."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style", "code"):
            self._hidden.append(tag)
        if not self._hidden:
            spoken = ("aria-label", "title", "placeholder", "alt")
            self.texts += [value for name, value in attrs if name in spoken and value]

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and self._hidden[-1] == tag:
            self._hidden.pop()

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.texts.append(data)


def visible(sections: list[str]) -> list[str]:
    """Texts of the sections, except for the table of settings, which stay as they are."""
    parser = VisibleText()
    for section in sections:
        if 'aria-labelledby="differences"' not in section:
            parser.feed(section)
    return parser.texts


def drawn(data: Any) -> Iterator[str]:
    """Texts that the scripts draw: names and titles of the charts' data."""
    if isinstance(data, list):
        for one in data:
            yield from drawn(one)
    elif isinstance(data, dict):
        for name, value in data.items():
            if name in ("title", "name", "heading", "x", "y", "facts", "note", "who", "unit") and (
                isinstance(value, str)
            ):
                yield value
            elif name not in ("words", "spans"):
                yield from drawn(value)


def english(texts: list[str], labels: list[str] | None = None) -> list[str]:
    """The texts with English words besides names and labels of runs."""

    def rest(text: str) -> str:
        for label in sorted(labels or [], key=len, reverse=True):
            text = text.replace(label, "")
        return text

    return [text for text in texts if set(WORD.findall(rest(text))) - NAMES]


@pytest.fixture(scope="module")
def folders(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The sample comparison, and a small run of each family with sections of its own."""
    made = [comparison]
    simulated = tmp_path_factory.mktemp("runs")
    digits = load_task("digits")
    ditto = dure.Ditto(clients=4, partition="label-shards:2")
    attacked = dure.Simulated(attack="sign-flip:4", attackers=1)
    private = dure.FedAvg(clients=4, privacy="user-level:0.3:1.2")
    server = dure.ParameterServer(servers=2, workers=2, staleness=2)
    split = dure.SplitLearning(("1", "2"), measure_leaks=True, clients=3, batch_size=100)
    runs = {
        "ditto": (ditto, attacked),
        "async": (dure.FedAsync(clients=4), dure.Simulated(devices="stragglers:0.3:10")),
        "private": (private, None),
        "server": (server, dure.Simulated(devices="jitter:0.3:4:100:100:100", server_mbit=100)),
        "split": (split, None),
    }
    for name, (strategy, world) in runs.items():
        dure.train(digits, strategy, world, dure.Stop(rounds=2), out=simulated / name)
        made.append(simulated / name)
    pipeline = simulated / "pipeline"
    dure.train(digits, dure.Pipeline(), dure.Processes(2), dure.Stop(steps=4), out=pipeline)
    for seed in (1, 2):
        made.append(write_run(simulated / f"seed-{seed}", "several seeds", seed=seed))
    return [*made, pipeline]


def test_no_english_text_is_left(folders: list[Path]) -> None:
    runs = read_runs(folders)
    with in_language("ko"):
        sections, data = content(runs, title_of(runs))
    found = english([*visible(sections), *drawn(data)], labels(folders))
    assert found == []


def labels(folders: list[Path]) -> list[str]:
    """Texts of the user: labels of the runs, and reasons and settings in words."""
    runs = read_runs(folders)
    texts = [run.label for run in runs.runs] + list(runs.failed) + list(runs.failed.values())
    texts += [str(run.config.get("label")) for run in runs.runs]
    # The settings of a world, after its name.
    return texts + [str(run.result.world).partition(", ")[2] for run in runs.runs]


def test_a_text_without_a_translation_would_be_found() -> None:
    section = '<section><h2>Not translated</h2><p title="공격자 name">digits 1.5 ms</p></section>'
    assert english(visible([section])) == ["Not translated", "공격자 name"]


def literals() -> set[str]:
    """Texts in the modules of dure and in the scripts of the report."""
    found = set()
    for path in [*SOURCES.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_each_key_is_in_the_code() -> None:
    known = literals()
    scripts = "".join(path.read_text() for path in (SOURCES / "report").rglob("*.js"))
    modules = catalogue("ko")["texts"]
    made = ("virtual seconds", "wall seconds", "{run}, global model")  # joined from two words
    assert [key for key in modules if key not in known and key not in made] == []
    categories = {"compute", "communication", "idle", "evaluation", "checkpoint", "other"}
    wanted = set(catalogue("ko")["scripts"]) - categories
    assert [key for key in wanted if f'"{key}"' not in scripts and f"`{key}" not in scripts] == []


@pytest.mark.parametrize("part", ["texts", "scripts", "recorded"])
def test_both_languages_have_the_same_places(part: str) -> None:
    for key, text in catalogue("ko")[part].items():
        assert sorted(set(PLACE.findall(key))) == sorted(set(PLACE.findall(text))), key
        tags = [sorted(re.findall(r"<[^>]*>", one)) for one in (key, text)]
        assert tags[0] == tags[1], key


def test_each_counted_noun_has_a_place_for_its_number() -> None:
    assert all(PLACE.findall(text) == ["count"] for text in catalogue("ko")["counted"].values())


def test_texts_of_run_folders_are_translated_with_their_values() -> None:
    with in_language("ko"):
        assert recorded("4 processes") == "프로세스 4개"
        assert recorded("client 12") == "클라이언트 12"
        assert recorded("a name of somebody") == "a name of somebody"
    assert recorded("4 processes") == "4 processes"
    assert language() == "en"


def test_the_page_says_its_language(comparison: Path, tmp_path: Path) -> None:
    written = write_report([comparison], tmp_path / "ko.html", language="ko")
    text = written.read_text(encoding="utf-8")
    assert '<html lang="ko">' in text
    assert "개요" in text
    assert "Overview" not in text
    plain = write_report([comparison], tmp_path / "en.html").read_text(encoding="utf-8")
    assert '<html lang="en">' in plain
    assert "Overview" in plain
    assert '"words"' not in plain
    assert translated("Overview") == "Overview"


def test_an_unknown_language_is_one_clear_line(
    comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(comparison), "--out", str(out), "--language", "fr"]) == 2
    assert "language 'fr' is unknown: choose one of en, ko" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(ValueError, match="choose one of en, ko"):
        LivePage([tmp_path], "token", "", language="fr")


def test_the_live_page_is_in_korean(comparison: Path) -> None:
    page = LivePage([comparison], "secret", "The terminal of dure watch prints it.", language="ko")
    form = page.answer("GET", "/", {}, b"")
    assert form.status == 401
    text = form.body.decode()
    assert '<html lang="ko">' in text
    assert "토큰은 dure watch의 터미널에 있습니다." in text
    state = page.states.newest()
    assert english(visible(state.sections), labels([comparison])) == []
    assert state.data["words"] == catalogue("ko")["scripts"]


def test_a_request_names_the_language_of_a_live_page(comparison: Path) -> None:
    page = LivePage([comparison], "secret", "")
    known = {"authorization": "Bearer secret"}
    assert '<html lang="en">' in page.answer("GET", "/", known, b"").body.decode()
    korean = page.answer("GET", "/?language=ko", known, b"").body.decode()
    assert '<html lang="ko">' in korean
    assert "개요" in korean
    assert 'action="./?language=ko"' in page.answer("GET", "/?language=ko", {}, b"").body.decode()
    entered = page.answer("POST", "/?language=ko", {}, b"token=secret")
    assert (entered.status, entered.headers["location"]) == (303, "./?language=ko")
    assert page.answer("POST", "/", {}, b"token=secret").headers["location"] == "./"
    events = page.answer("GET", "/events?since=&language=ko", known, b"").stream
    assert events is not None
    told = events.due().decode()
    assert told.startswith("event: whole")
    # JSON in an event is ASCII.
    assert json.dumps("개요").strip('"') in told
    wrong = page.answer("GET", "/?language=%3Cb%3E", known, b"")
    assert wrong.status == 400
    assert wrong.headers["content-type"].startswith("text/plain")
    assert wrong.body.decode() == "language '<b>' is unknown: choose one of en, ko\n"

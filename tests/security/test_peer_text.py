"""Text of peers moves no terminal, begins no line of a log, and turns no reading order."""

from __future__ import annotations

import json
import logging
import unicodedata
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.cli.client_display import in_words
from dure.cli.federation_view import FederationView
from dure.deploy.client.link import refusal_reason
from dure.deploy.server.log_lines import JsonLines, as_json
from dure.deploy.server.register import EnrolError, clean_name
from dure.peer_text import MOST_REASON, one_line, printable
from dure.report import document
from dure.report.formatting import escape
from dure.wire.boxes import check_name
from dure.wire.requests import Refusal, to_json

EVIL = [
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[1;1H",
    "\x9b31m",
    "\x9d0;title\x9c",
    "a\u202eb",
    "a\u2066b\u2069",
    "a\u200bb",
    "a\ufeffb",
    "line\nline",
    "line\r\u2028line\u2029line\x85line",
    "\u3164\u115f\u2800",
    "a" + "\u0301" * 50,
    "a\ufe0f\U000e0100b",
    "\ud800",
    "\x00\x08\x7f",
]

TEXTS = st.text(max_size=50) | st.sampled_from(EVIL) | st.lists(st.sampled_from(EVIL)).map("".join)


def is_harmless(text: str) -> bool:
    """Written down here again, from Unicode's categories, and not by the function under test."""
    marks = longest = 0
    for each in text:
        kind = unicodedata.category(each)
        if kind[0] == "C" or kind in ("Zl", "Zp"):
            return False
        marks = marks + 1 if kind in ("Mn", "Me") else 0
        longest = max(longest, marks)
    return longest <= 4 and not set(text) & set("\u3164\u115f\u1160\u2800\uffa0\u034f")


@given(TEXTS)
def test_what_is_shown_is_harmless_and_plain_text_stays(text: str) -> None:
    assert is_harmless(printable(text))
    assert is_harmless(one_line(text))
    assert printable(printable(text)) == printable(text)
    assert len(printable(text * 100, 40)) <= 40
    assert len(one_line(text * 100)) <= MOST_REASON


@pytest.mark.parametrize(
    "text", ["ward 3", "병원 3", "Zürich – Süd", "Đà Nẵng", "日本 (東京)", "🙂"]
)
def test_names_of_people_and_places_stay_as_they_are(text: str) -> None:
    assert printable(text) == one_line(text) == text


@given(TEXTS)
def test_every_place_that_shows_text_of_peers(text: str) -> None:
    reason = f"b{text}e"
    assert is_harmless(in_words("failed", {"round": 1, "why": reason, "error": reason}))
    assert is_harmless(
        refusal_reason(to_json(Refusal(reason.encode(errors="replace").decode()))) or ""
    )
    assert is_harmless(escape(reason).replace("\n", ""))
    data = document.as_json({"name": reason})
    shown = json.loads(data)["name"]
    assert all(is_harmless(each) or ord(each) < 32 or each == "\x7f" for each in shown)
    # A line of the log says all of it, in escapes.
    line = as_json({"reason": reason})
    assert is_harmless(line)
    assert json.loads(line)["reason"] == reason


@given(TEXTS)
def test_a_line_of_the_log_is_one_line(text: str) -> None:
    record = logging.LogRecord("dure", logging.INFO, "", 0, "event", None, None)
    record.about = {"name": text}
    assert is_harmless(JsonLines().format(record))


@given(TEXTS)
def test_no_client_is_called_what_cannot_be_shown(text: str) -> None:
    for check in (clean_name, check_name):
        with suppress(ValueError, EnrolError):
            check(text)
            assert is_harmless(unicodedata.normalize("NFC", text))


@given(TEXTS)
def test_the_terminal_of_a_server(text: str) -> None:
    view = FederationView()
    view.hears({"waiting": text})
    drawn = view.drawn()
    if drawn is not None:
        for column in drawn.columns:
            assert all(is_harmless(str(cell)) for cell in column.cells)

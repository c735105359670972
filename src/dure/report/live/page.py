"""The live page: responses to requests, independent of the listener.

    GET  /            the page; without the token, a form for it; ?language=ko: in Korean
    POST /            the token, for a cookie (`dure.report.live.login`)
    GET  /events      changes since a state, as server-sent events
    GET  /plotly.js   the drawing library, which a browser caches
    GET  /here        204, or 401 without the token

    event: patch | whole    a state (`dure.report.live.state`)
    event: beat             every `BEAT` seconds, so that both sides detect a lost connection
    event: bye              the server ends

Only scripts with the nonce run, and the page may send requests to its server alone.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from dure.contracts.page import PageResponse
from dure.report import document, translation
from dure.report.formatting import escape
from dure.report.live.login import TokenLogin
from dure.report.live.state import PageState, PageStates
from dure.report.page import page_script
from dure.report.translation import check_language, in_language, translated
from dure.report.translation import language as language_now

BEAT = 10.0
"""Seconds between two heartbeats; the page reconnects after three missing heartbeats."""

MOST_READERS = 32
"""Most simultaneous streams, since each occupies the listener."""

_HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)

_JAVASCRIPT = "text/javascript; charset=utf-8"


class LivePage:
    """A page about the runs in some folders. Implements `dure.contracts.page.Page`.

    Args:
        folders: run folders.
        token: secret that grants access to the page.
        where_token: text that says where to find the token.
        secure: whether the page uses TLS.
        server: function that returns the content of /status.
        language: of the page, "en" or "ko", unless a request names another.

    Raises ImportError if plotly is not installed, ValueError if the language is unknown.
    """

    def __init__(
        self,
        folders: list[Path],
        token: str,
        where_token: str,
        secure: bool = False,
        server: Callable[[], Mapping[str, Any]] = dict,
        language: str = "en",
    ) -> None:
        document.check_plotly("the live page")
        self._door = TokenLogin(token, secure)
        self._where = where_token
        self._language = language
        self.states = PageStates(folders, server, language)
        self._states = {language: self.states}
        self._make = partial(PageStates, folders, server)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.readers = 0

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> PageResponse:
        """Return the response to a request."""
        where, _, query = path.partition("?")
        asked = parse_qs(query)
        language = asked.get("language", [self._language])[0]
        try:
            check_language(language)
        except ValueError as error:
            plain = {"content-type": "text/plain; charset=utf-8"}
            return _with(_HEADERS, PageResponse(400, plain, f"{error}\n".encode(errors="replace")))
        if where == "/" and method == "POST":
            entered = self._door.enter(body)
            if entered is None:
                return _with(_HEADERS, self._form(403, language, wrong=True))
            moved = {**entered.headers, "location": self._home(language)}
            return _with(_HEADERS, PageResponse(entered.status, moved))
        if method not in ("GET", "HEAD"):
            return _with(_HEADERS, PageResponse(405, {"allow": "GET, POST"}))
        known = self._door.knows(headers)
        if where == "/":
            return _with(_HEADERS, self._page(language) if known else self._form(401, language))
        if not known:
            return _with(_HEADERS, PageResponse(401, {"www-authenticate": "Bearer"}))
        if where == "/here":
            return _with(_HEADERS, PageResponse(204))
        if where == "/plotly.js":
            return _with(_HEADERS, self._drawing(headers))
        if where == "/events":
            since = headers.get("last-event-id") or asked.get("since", [""])[0]
            return _with(_HEADERS, self._events(since, language))
        return _with(_HEADERS, PageResponse(404))

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until the page is closed."""
        self._closed.wait(seconds)

    def states_in(self, language: str) -> PageStates:
        """Return the states of the page in a language, which are made on first use."""
        with self._lock:
            if language not in self._states:
                self._states[language] = self._make(language)
            return self._states[language]

    def _home(self, language: str) -> str:
        return "./" if language == self._language else f"./?language={language}"

    def _events(self, since: str, language: str) -> PageResponse:
        if self.readers >= MOST_READERS:
            return PageResponse(503, {"retry-after": "10"})
        headers = {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
        return PageResponse(200, headers, stream=PageEvents(self, since, language))

    @cached_property
    def _plotly(self) -> tuple[bytes, bytes, str]:
        """(source, compressed source, ETag) of plotly.js, loaded on first use."""
        source = document.plotly_source("the live page").encode()
        return source, gzip.compress(source, 6), f'"{hashlib.sha256(source).hexdigest()[:16]}"'

    def _drawing(self, headers: Mapping[str, str]) -> PageResponse:
        # Cached, but revalidated: another version has another ETag.
        source, packed, tag = self._plotly
        kept = {"cache-control": "private, no-cache", "etag": tag}
        if headers.get("if-none-match") == tag:
            return PageResponse(304, kept)
        kind = {**kept, "content-type": _JAVASCRIPT, "vary": "accept-encoding"}
        if "gzip" in headers.get("accept-encoding", ""):
            return PageResponse(200, {**kind, "content-encoding": "gzip"}, packed)
        return PageResponse(200, kind, source)

    def _page(self, language: str) -> PageResponse:
        state = self.states_in(language).newest()
        nonce = secrets.token_urlsafe(16)
        with in_language(language):
            return _html(200, _document(state, nonce), nonce)

    def _form(self, status: int, language: str, wrong: bool = False) -> PageResponse:
        said = "The token is wrong." if wrong else "Enter the token to see this page."
        with in_language(language):
            body = (
                '<div class="door"><p class="mark">dure</p>'
                f'<p role="status">{translated(said)} {escape(translated(self._where))}</p>'
                f'<form method="post" action="{self._home(language)}">'
                f'<label for="token">{translated("Token")}</label>'
                '<input id="token" name="token" type="password" autocomplete="off" required '
                f"autofocus><button>{translated('Show the page')}</button></form></div>"
            )
            return _html(status, _around("dure", body), secrets.token_urlsafe(16))


class PageEvents:
    """The event stream of one reader. since: version of the reader's state, in its language."""

    def __init__(self, page: LivePage, since: str, language: str) -> None:
        self._page = page
        self._states = page.states_in(language)
        self._has = self._states.known(since)
        self._beat = 0.0
        self._ended = False
        self._counted = True
        page.readers += 1

    @property
    def over(self) -> bool:
        return self._ended

    def due(self) -> bytes:
        """Return the bytes to send now; may be empty."""
        closes = self._page.closed
        newest = self._states.newest(at_once=closes)
        said = b""
        if self._has is None:
            said = _event("whole", newest.whole(), newest.version)
        elif newest.version != self._has.version:
            said = _event("patch", newest.since(self._has), newest.version)
        self._has = newest
        if closes:
            self._ended = True
            return said + _event("bye", {})
        if said or time.monotonic() - self._beat > BEAT:
            self._beat = time.monotonic()
            return said or _event("beat", {})
        return b""

    def close(self) -> None:
        """End the stream, and free the reader's place."""
        if self._counted:
            self._counted = False
            self._page.readers -= 1


def _event(name: str, told: Mapping[str, Any], version: str = "") -> bytes:
    numbered = f"id: {version}\n" if version else ""
    # JSON has no line breaks of its own, which would end the event's data.
    text = json.dumps(told, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\n{numbered}retry: 2000\ndata: {text}\n\n".encode(errors="replace")


def _with(headers: Mapping[str, str], answer: PageResponse) -> PageResponse:
    """Return the response with additional headers; its own headers take precedence."""
    return PageResponse(answer.status, {**headers, **answer.headers}, answer.body, answer.stream)


def _html(status: int, text: str, nonce: str) -> PageResponse:
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": _POLICY.format(nonce=nonce),
    }
    return PageResponse(status, headers, text.encode("utf-8", errors="replace"))


def _around(title: str, body: str, attributes: str = "", scripts: str = "") -> str:
    """Return a document with the report's style."""
    style = document.source(document.__file__, "style.css") + document.source(__file__, "live.css")
    style += translation.style()
    return (
        f'<!doctype html>\n<html lang="{language_now()}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f'<body{attributes}><span id="probe" hidden></span><main>{body}</main>\n{scripts}'
        "</body></html>\n"
    )


def _document(state: PageState, nonce: str) -> str:
    parts = "".join(
        f'<div data-part="{place}">{html}</div>\n' for place, html in enumerate(state.sections)
    )
    body = f'<p id="link" role="status">{translated("connecting")}</p>{parts}'
    over = "yes" if state.over else "no"
    attributes = f' data-version="{escape(state.version)}" data-over="{over}"'
    data = document.as_json(state.data)
    scripts = [f'<script type="application/json" id="data">{data}</script>']
    scripts.append(f'<script nonce="{nonce}" src="plotly.js"></script>')
    # A type that no browser executes: live.js reads the original sections first, then runs this
    # script, and runs it again when sections change.
    own = document.script_text(page_script())
    scripts.append(f'<script type="text/plain" id="page">{own}</script>')
    for beside, file in ((document.__file__, "common.js"), (__file__, "live.js")):
        text = document.script_text(document.source(beside, file))
        scripts.append(f'<script nonce="{nonce}">{text}</script>')
    return _around(state.title, body, attributes, "\n".join(scripts))

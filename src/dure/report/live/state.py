"""States of the live page, and the updates between them.

    whole   all sections and all data
    patch   changed sections, and changes of the data (`dure.report.live.json_patch`)

A state is made on request, at least `PACE` seconds after the last state and at least ten times the
time that making it took: watching a run costs at most a tenth of a core, and nothing without
readers. An unchanged folder makes no state.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.report.live.json_patch import changes
from dure.report.live.run_follower import RunFollower, RunsSnapshot
from dure.report.live.status_section import now
from dure.report.page import content, title_of
from dure.report.translation import check_language, in_language, translated

PACE = 1.0
"""Least seconds between two states."""

KEPT = 4
"""Number of stored states; a reader of an older state gets the whole page."""


@dataclass(frozen=True)
class PageState:
    """State of the page.

    version: unique, also across restarts of the server. over: no changes are to come. sections:
    HTML; the second section is the present (`dure.report.live.status_section`).
    """

    version: str
    title: str
    over: bool
    sections: list[str]
    data: dict[str, Any]

    def shows(self, over: bool, sections: list[str], data: dict[str, Any]) -> bool:
        """Return whether the state has exactly this content."""
        return self.over == over and self.data is data and self.sections == sections

    def whole(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "title": self.title,
            "over": self.over,
            "sections": self.sections,
            "data": self.data,
        }

    def since(self, before: PageState) -> dict[str, Any]:
        """Return the update for a reader whose state is `before`."""
        pairs = zip(before.sections, self.sections, strict=True)
        return {
            "version": self.version,
            "since": before.version,
            "title": self.title,
            "over": self.over,
            "sections": {place: new for place, (old, new) in enumerate(pairs) if old != new},
            "changes": changes(before.data, self.data),
        }


class PageStates:
    """The states of a page. server: returns the content of /status, else nothing.

    language: of the sections and data.
    """

    def __init__(
        self,
        folders: list[Path],
        server: Callable[[], Mapping[str, Any]] = dict,
        language: str = "en",
    ) -> None:
        self._language = check_language(language)
        self._following = RunFollower(folders)
        self._server = server
        self._kept: OrderedDict[str, PageState] = OrderedDict()
        self._boot = secrets.token_hex(4)
        self._made = 0
        self._due = 0.0
        self._looked: RunsSnapshot | None = None
        self._title = ""
        self._sections: list[str] = []
        self._data: dict[str, Any] = {}
        self._lock = threading.Lock()

    def newest(self, at_once: bool = False) -> PageState:
        """Return the newest state, made recently. at_once: make a state now."""
        with self._lock:
            began = time.monotonic()
            if not self._kept or at_once or began >= self._due:
                with in_language(self._language):
                    self._look()
                took = time.monotonic() - began
                self._due = time.monotonic() + max(PACE, 10 * took)
            return next(reversed(self._kept.values()))

    def known(self, version: str) -> PageState | None:
        """Return an earlier state, if it is still stored."""
        with self._lock:
            return self._kept.get(version)

    def _look(self) -> None:
        look = self._following.look()
        told = dict(self._server())
        before = next(reversed(self._kept.values())) if self._kept else None
        if before is None or self._looked is None or not look.shows_the_same(self._looked):
            self._looked = look
            self._title = title_of(look.runs) if look.followed else translated("nothing yet")
            self._sections, self._data = content(look.runs, self._title)
        present = now(look, told)
        header, *rest = self._sections
        # After the end of the run, a server may still have to report the end to its clients.
        over = not look.goes_on and told.get("state", "over") in ("over", "broken")
        sections = [header, present, *rest]
        if before is not None and before.shows(over, sections, self._data):
            return
        self._made += 1
        state = PageState(
            version=f"{self._boot}-{self._made}",
            title=self._title,
            over=over,
            sections=sections,
            data=self._data,
        )
        self._kept[state.version] = state
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

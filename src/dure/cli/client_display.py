"""Terminal output of a client.

A terminal shows a live display. Other outputs get lines, as a service's journal stores them: a line
for each round, when the outcome of its update is known, and a line for each unusual event. All
output goes to standard error, except for the lines of `--json`, which cover every event.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dure.cli.show import error_console, human_bytes
from dure.peer_text import printable
from dure.report.formatting import duration

About = Mapping[str, object]


class ClientDisplay:
    """Shows the activity of a client. as_json: print events as JSON lines on standard output."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = error_console()
        self.picture = ClientActivity()
        self._live: Live | None = None
        self._said = ""
        self._sent = ""
        """Beginning of the line of the newest update, until its outcome is known."""

    def __enter__(self) -> ClientDisplay:
        if not self.as_json and self.console.is_terminal:
            self._live = Live(
                get_renderable=self.picture.drawn,
                console=self.console,
                refresh_per_second=8,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def __call__(self, what: str, about: About) -> None:
        """Handle an event, such as ("training", {"round": 3})."""
        with suppress(OSError):  # nobody listens any more
            self.picture.hears(what, about)
            if what == "moved":
                return
            if self.as_json:
                print(json.dumps({"time": time.time(), "event": what, **about}), flush=True)
                return
            text = in_words(what, about)
            if self._live is None:
                self._say(what, about, text)
            elif what in _LASTING:
                self.console.print(text, markup=False, highlight=False)

    def _say(self, what: str, about: About, text: str) -> None:
        """Print a plain line for an event that deserves a line."""
        if what == "sent":
            self._sent = f"round {_round(about)}: sent {_size(about)}; "
        if what in _ON_THE_WAY:
            return
        if what == "settled":
            text = self._sent + text
            self._sent = ""
        # An unreachable server is reported once, and not at each attempt.
        if text.partition(";")[0] != self._said:
            print(f"dure: {text}", file=sys.stderr, flush=True)
        self._said = text.partition(";")[0]


_LASTING = ("checked in", "failed", "left", "over", "refused", "trust")
"""Events whose lines stay on a terminal."""

_ON_THE_WAY = ("fetching", "training", "sending", "sent", "ready", "answering", "measuring")
"""Events that the line of the round covers later."""


@dataclass
class ClientActivity:
    """Current activity of a client, for its terminal.

    moved, whole: transferred and total bytes of the current transfer. outcomes: number of updates
    that counted (True) and did not count (False).
    """

    doing: str = "connecting to the server"
    round: int | None = None
    moved: float = 0.0
    whole: float = 0.0
    last: str = ""
    outcomes: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    began: float = field(default_factory=time.monotonic)
    spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    def hears(self, what: str, about: About) -> None:
        """Update the state from an event."""
        if what == "moved":
            self.moved = float(str(about["bytes"]))
            return
        if "round" in about:
            self.round = _round(about)
        self.moved = 0.0
        self.whole = float(str(about["bytes"])) if what in ("fetching", "sending") else 0.0
        match what:
            case "settled":
                self.outcomes[bool(about["kept"])] += 1
                self.last = in_words(what, about)
            case "sent" | "ready" | "not wanted" | "checked in":
                self.doing = "waiting for the next assignment"
                if what == "not wanted":
                    self.last = in_words(what, about)
            case "failed":
                self.doing = "waiting before the next request"
                self.last = in_words(what, about)
            case "waiting":
                self.doing = in_words(what, about)
            case _:
                self.doing = what

    def drawn(self) -> RenderableType:
        """Return the display for rich."""
        words = self.doing if self.round is None else f"round {self.round} · {self.doing}"
        row = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [self.spinner, Text(words)]
        if self.whole:
            moved = min(self.moved, self.whole)
            cells += [
                ProgressBar(total=self.whole, completed=moved, width=24),
                Text(f"{human_bytes(moved)} of {human_bytes(self.whole)}", style="dim"),
            ]
        row.add_row(*cells)
        return Group(row, Text(f"  {self._record()}", style="dim"))

    def _record(self) -> str:
        """Return a text such as "1 h 05 min · 12 updates counted, 1 did not · last: …"."""
        counted = self.outcomes[True]
        did_not = self.outcomes[False]
        updates = f"{counted} {'update' if counted == 1 else 'updates'} counted"
        if did_not:
            updates += f", {did_not} not counted"
        said = [duration(round(time.monotonic() - self.began)), updates]
        return " · ".join([*said, *([f"last: {self.last}"] if self.last else [])])


def in_words(what: str, about: About) -> str:
    """Return an event as a line, without control characters from a server's words."""
    return printable(_in_words(what, about))


def _in_words(what: str, about: About) -> str:
    match what:
        case "checked in":
            differs = about.get("differs")
            close = f"; bits may differ: {', '.join(map(str, differs))}" if differs else ""  # type: ignore[call-overload]
            return f"checked in as client {about['client']}{close}"
        case "waiting":
            return f"{about['why']}"
        case "joined":
            return f"joined as client {about['client']}"
        case "head":
            return f"the head is kept in {about['path']}"
        case "roster":
            return f"the roster of {about['clients']} clients is {about['is']}"
        case "trust":
            return str(about["in"])
        case "fetching":
            return f"round {_round(about)}: fetching {_size(about)}"
        case "sending":
            return f"round {_round(about)}: sending {_size(about)}"
        case "not wanted":
            why = f": {about['why']}" if about.get("why") else ""
            return (
                f"round {_round(about)}: stopped, the server does not need the update any more{why}"
            )
        case "settled":
            return "the update counts" if about["kept"] else f"the update: {about['reason']}"
        case "failed":
            return f"round {_round(about)}: {about['error']}"
        case "left":
            return f"left the secure sum: {about['why']}"
        case "over":
            return str(about["why"])
        case _:
            return f"round {_round(about)}: {what}" if "round" in about else what


def _size(about: About) -> str:
    return human_bytes(float(str(about["bytes"])))


def _round(about: About) -> int:
    """Return the round as readers count it, from 1."""
    return int(str(about["round"])) + 1

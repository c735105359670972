"""What the terminal of a client shows: a live line on a terminal, elsewhere a line for each thing
that happens. Everything goes to standard error, but for the lines of `--json`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from rich.status import Status

from dure.cli.show import error_console, human_bytes


class Joining:
    """Shows what a client does. as_json: prints events as JSON lines on standard output."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = error_console()
        self._status: Status | None = None
        self._said = ""

    def __enter__(self) -> Joining:
        if not self.as_json and self.console.is_terminal:
            self._status = self.console.status("reaching the server")
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            with suppress(OSError):
                self._status.stop()

    def __call__(self, what: str, about: Mapping[str, object]) -> None:
        """Something has happened, such as ("training", {"round": 3})."""
        with suppress(OSError):  # nobody listens any more
            if self.as_json:
                print(json.dumps({"time": time.time(), "event": what, **about}), flush=True)
                return
            text = in_words(what, about)
            if self._status is not None:
                self._status.update(text)
                if what in _LASTING:
                    self.console.print(text, markup=False, highlight=False)
            # A server that is away is told once, and not at each attempt.
            elif text.partition(";")[0] != self._said:
                print(f"dure: {text}", file=sys.stderr, flush=True)
            self._said = text.partition(";")[0]


_LASTING = ("checked in", "failed", "over", "refused")
"""What stays to be read on a terminal."""


def in_words(what: str, about: Mapping[str, object]) -> str:
    """An event in a line."""
    match what:
        case "checked in":
            differs = about.get("differs")
            close = f"; bits may differ: {', '.join(map(str, differs))}" if differs else ""  # type: ignore[call-overload]
            return f"checked in as client {about['client']}{close}"
        case "waiting":
            return f"{about['why']}"
        case "fetching":
            return f"round {_round(about)}: fetching {human_bytes(float(str(about['bytes'])))}"
        case "sending":
            return f"round {_round(about)}: sending {human_bytes(float(str(about['bytes'])))}"
        case "settled":
            return "the update counts" if about["kept"] else f"the update: {about['reason']}"
        case "failed":
            return f"round {_round(about)}: {about['error']}"
        case "over":
            return str(about["why"])
        case _:
            return f"round {_round(about)}: {what}" if "round" in about else what


def _round(about: Mapping[str, object]) -> int:
    """As people count, from 1."""
    return int(str(about["round"])) + 1

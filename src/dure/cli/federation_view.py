"""A server's terminal output about its clients: connections, waiting, updates and bytes.

A terminal shows some lines below the progress bar, always current; other outputs get a line when
the clients change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dure.peer_text import printable
from dure.report.formatting import duration, listed, size

SECONDS = 2.0
"""Least seconds between two plain lines."""


class FederationView:
    """State of a served run, from its events."""

    def __init__(self) -> None:
        self.serving = ""
        self.status = ""
        self.token = ""
        self.waiting = ""
        self.model = ""
        """Metrics of the newest model, in words."""
        self.ended = False
        self.now: Mapping[str, Any] = {}
        """Newest report of the server about its clients."""
        self._heard = 0.0
        self._said: object = None
        self._printed = float("-inf")

    @property
    def serves(self) -> bool:
        """Whether there is a federation to show."""
        return bool(self.serving)

    def hears(self, event: Mapping[str, Any]) -> str | None:
        """Handle an event of the federation; return a line for an output that is no terminal."""
        if "serving" in event:
            self.serving = event["serving"]
            return f"serving at {self.serving}"
        if "status" in event:
            self.status = event["status"]
            self.token = event["token"]
            return f"status at {self.status}, which needs the token in {self.token}"
        if "waiting" in event:
            self.waiting = event["waiting"]
            return self.waiting
        self.now = event["federation"]
        self._heard = time.monotonic()
        self.waiting = ""
        return self._change()

    def _change(self) -> str | None:
        """Return a line if the connected or missing clients have changed, else None."""
        now = self.now
        about = (now["here"], tuple(now["missing"]))
        at = time.monotonic()
        if about == self._said or at - self._printed < SECONDS:
            return None
        # The first report is printed only if clients are missing.
        first = self._said is None and not now["missing"]
        self._said = about
        self._printed = at
        return None if first else f"{self._clients()}; {self._waits()}"

    def drawn(self) -> Table | None:
        """Return some lines for a terminal; None without content, or after the end."""
        if self.ended:
            return None
        rows = [
            ("model", self.model),
            ("serving", self.serving),
            ("status", f"{self.status} (token: {self.token})" if self.status else ""),
            ("clients", self.waiting or self._clients()),
            ("waits for", self._waits()),
            ("updates", self._updates()),
            ("bytes", self._bytes()),
        ]
        rows = [(name, text) for name, text in rows if text]
        if not rows:
            return None
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=9)
        table.add_column(overflow="ellipsis", no_wrap=True)
        for name, text in rows:
            table.add_row(name, Text(printable(text)))
        return table

    def _clients(self) -> str:
        now = self.now
        if not now:
            return ""
        said = [f"{now['here']} here", f"{len(now['at_work'])} at work"]
        if now["missing"]:
            said.append(f"{len(now['missing'])} missing: {_names(now['missing'])}")
        return ", ".join(said)

    def _waits(self) -> str:
        now = self.now
        if not now:
            return ""
        if now["doing"] == "measuring":
            return f"clients that evaluate the model of round {now['round'] - 1}"
        if now["doing"] == "adding up":
            return f"clients that add up the updates of round {now['round']}"
        # A missing client may reconnect until the deadline.
        awaited = [*now["at_work"], *now["missing"]]
        if not awaited:
            return "clients"
        left = now["left"]
        ends = ""
        if left is not None:
            # The time continues to pass between two reports.
            left = max(0.0, left - (time.monotonic() - self._heard))
            ends = f", at most {duration(round(left))} more"
        return f"{_names(awaited)} (round {now['round']}{ends})"

    def _updates(self) -> str:
        outcomes = self.now.get("outcomes", {})
        return ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes.items())

    def _bytes(self) -> str:
        if not self.now:
            return ""
        received = self.now["received"]
        sent = self.now["sent"]
        return f"{size(sent)} to clients, {size(received)} from them"


def _names(names: Sequence[str]) -> str:
    return listed(names, most=4)

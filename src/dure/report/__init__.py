"""Runs as one page: `write_report` makes a self-contained `report.html` from run folders.

    read.py     folder -> dataclasses; nothing a killed run left out or half-written stops it
    words.py    numbers and names as people write them
    charts.py   dataclasses -> what the page draws, as plain JSON
    page.py     the HTML around it: header, table, time bars, footer
    style.css, page.js    how it looks; drawing, switching, sorting, in the reader's browser

plotly.js and all data lie in the file itself: the page opens without a network and asks for none.
Nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dure.worlds.processes.fork_server import server

if TYPE_CHECKING:
    from dure.report.page import write_report as write_report

__all__ = ["write_report"]

server.keeps_here(__name__)


def __getattr__(name: str) -> Any:
    # Terminals need the words of this room alone: all of it would be half of what --help takes.
    if name != "write_report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dure.report.page import write_report

    return write_report

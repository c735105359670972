"""Reports: `write_report` makes a self-contained `report.html` from run folders.

    read.py        folder -> dataclasses; tolerates missing and half-written files of a killed run
    formatting.py  numbers and names in readable form
    charts.py      dataclasses -> data of the charts, as plain JSON
    page.py        the HTML around it: header, table, time bars, footer
    style.css, page.js    appearance; drawing, switching, sorting, in the reader's browser

plotly.js and all data are inside the file: the page opens without a network and sends no request.
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
    # Lazy: the terminal needs only `formatting`, and the whole report would be half the time of
    # --help.
    if name != "write_report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dure.report.page import write_report

    return write_report

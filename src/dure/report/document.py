"""One HTML document that opens without a network, for the report of runs and for benchmarks.

What can be read without drawing is plain HTML (it prints, and a screen reader reads it). The
charts' data goes in as one JSON element, which a script hands to plotly; common.js is what the
scripts share. A Content-Security-Policy in the document forbids every request.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

from dure.peer_text import printable
from dure.report.words import escape

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")

# Scripts and styles stand in the page itself ("inline"); images are those that plotly makes.
_NO_NETWORK = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


def document(
    title: str, sections: Sequence[str], data: object, plotly: str, script: str, style: str = ""
) -> str:
    """The whole document; empty sections are left out.

    data: what `script` draws. plotly: the source of plotly.js. script, style: the document's own,
        which come after common.js and style.css.
    """
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{source(__file__, 'style.css')}{style}</style></head>",
            # The scripts read the colours of style.css off the probe.
            '<body><span id="probe" hidden></span><main>',
            *filter(None, sections),
            "</main>",
            f'<script type="application/json" id="data">{as_json(data)}</script>',
            f'<script id="plotly">{script_text(plotly)}</script>',
            # In this order: plotly, what scripts share, the page's own.
            f"<script>{script_text(source(__file__, 'common.js'))}</script>",
            f"<script>{script_text(script)}</script>",
            "</body></html>\n",
        ]
    )


def section(name: str, heading: str, lead: str, body: str) -> str:
    """A section with a heading, and a line that says what is in it."""
    head = f'<h2 id="{name}">{heading}</h2><p class="lead">{lead}</p>'
    return f'<section aria-labelledby="{name}">{head}{body}</section>'


def plotly_source(what: str) -> str:
    """The source of plotly.js.

    Raises ImportError, which says that `what` needs it, where plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"{what} draws with plotly: pip install 'dure[report]'") from error
    return str(get_plotlyjs())


def check_plotly(what: str) -> None:
    """Raises the same ImportError, before there is anything to draw."""
    # Only looked for: its source is megabytes, which the caller may never need.
    if importlib.util.find_spec("plotly") is None:
        plotly_source(what)


def source(beside: str, name: str) -> str:
    """The text of a file that lies next to the module in the file `beside`."""
    return Path(beside).with_name(name).read_text(encoding="utf-8")


def as_json(data: object) -> str:
    """JSON that may stand inside a script element: it cannot close the element or open another."""
    # allow_nan=False: a browser's JSON.parse knows no NaN, and would draw nothing at all.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # What a chart shows of names is text like any other: nothing in it turns the reading order.
    text = _BEYOND_ASCII.sub(lambda found: printable(found[0]), text)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_text(text: str) -> str:
    """A script in which no text, such as one of plotly's, ends the element that it stands in."""
    return re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE)

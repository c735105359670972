"""A self-contained HTML document, for the report of runs and for benchmarks.

Content that needs no drawing is plain HTML (printable, and accessible to a screen reader). The
charts' data are one JSON element, which a script passes to plotly; common.js is shared by the
scripts. A Content-Security-Policy in the document forbids every request.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

from dure.peer_text import printable
from dure.report import translation
from dure.report.formatting import escape
from dure.report.translation import language, translated

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")

# Scripts and styles are in the page itself ("inline"); plotly makes images as data.
_NO_NETWORK = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


def document(
    title: str, sections: Sequence[str], data: object, plotly: str, script: str, style: str = ""
) -> str:
    """Return the whole document, without empty sections.

    Args:
        title: of the document.
        sections: HTML of each section.
        data: content that `script` draws.
        plotly: source of plotly.js.
        script: the document's own script, after common.js.
        style: the document's own style, after style.css.
    """
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="{language()}"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{source(__file__, 'style.css')}{style}{translation.style()}</style></head>",
            # The scripts read the colours of style.css off the probe.
            '<body><span id="probe" hidden></span><main>',
            *filter(None, sections),
            "</main>",
            f'<script type="application/json" id="data">{as_json(data)}</script>',
            f'<script id="plotly">{script_text(plotly)}</script>',
            # In this order: plotly, the shared script, the page's own.
            f"<script>{script_text(source(__file__, 'common.js'))}</script>",
            f"<script>{script_text(script)}</script>",
            "</body></html>\n",
        ]
    )


def section(name: str, heading: str, lead: str, body: str) -> str:
    """Return a section with a heading and an introductory line, both translated."""
    lead = translated(lead)
    head = f'<h2 id="{name}">{translated(heading)}</h2><p class="lead">{lead}</p>'
    return f'<section aria-labelledby="{name}">{head}{body}</section>'


def plotly_source(what: str) -> str:
    """Return the source of plotly.js.

    Raises ImportError, which says that `what` needs plotly, if plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"{what} draws with plotly: pip install 'dure[report]'") from error
    return str(get_plotlyjs())


def check_plotly(what: str) -> None:
    """Raise the ImportError of `plotly_source` early, before there is anything to draw."""
    # Only checks for the module: its source is megabytes, and may not be needed.
    if importlib.util.find_spec("plotly") is None:
        plotly_source(what)


def source(beside: str, name: str) -> str:
    """Return the text of a file next to the module in the file `beside`."""
    return Path(beside).with_name(name).read_text(encoding="utf-8")


def as_json(data: object) -> str:
    """Return JSON for a script element: it cannot close the element or open another."""
    # allow_nan=False: a browser's JSON.parse rejects NaN, and would draw nothing at all.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # Names in charts are untrusted text: no character may change the reading order.
    text = _BEYOND_ASCII.sub(lambda found: printable(found[0]), text)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_text(text: str) -> str:
    """Return a script without text, such as plotly's, that would end its script element."""
    return re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE)

"""The section on exposure: the data that the server and other parties could see."""

from __future__ import annotations

from collections.abc import Sequence

from dure.report.document import section
from dure.report.formatting import escape
from dure.report.html_fragments import swatch, table
from dure.report.runs import ReportedRun
from dure.report.translation import recorded


def exposures(runs: Sequence[ReportedRun]) -> str:
    """Return the section; empty if no run reports its exposure."""
    told = [
        (place, run, run.federation.exposure)
        for place, run in enumerate(runs)
        if run.federation is not None and run.federation.exposure
    ]
    if not told:
        return ""
    rows = ""
    for place, run, said in told:
        for who, what in said:
            rows += (
                f'<tr><th scope="row">{swatch(place)} {escape(run.label)}</th>'
                f'<td class="text">{escape(recorded(who))}</td>'
                f'<td class="text said">{escape(recorded(what))}</td></tr>'
            )
    lead = (
        "What each participant could learn of a client’s data from the messages. Evaluations use "
        "the server’s own test data; their metrics, and a run that ends at a target, are not "
        "covered by any epsilon."
    )
    head = ("run", "who", "could learn")
    shown = table("Exposure", "long", head, rows, texts=["who", "could learn"])
    return section("exposure", "What the server could see", lead, shown)

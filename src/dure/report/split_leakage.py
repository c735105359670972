"""Leakage of split learning in the report: exposure, defences, and leakage metrics by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dure.report.charts import JSON
from dure.report.document import section
from dure.report.formatting import UNKNOWN, escape
from dure.report.html_fragments import figure_of, grid, swatch, table
from dure.report.runs import ReportedRun
from dure.report.split_figures import LEAKS
from dure.report.translation import recorded, translated

_SHORT = {
    "norm_leak_auc": "norm AUC",
    "direction_leak_auc": "direction AUC",
    "cluster_leak_auc": "clusters AUC",
    "distance_correlation": "distance correlation",
}
"""Headings of the leakage metrics."""


def split_leakage_section(runs: Sequence[ReportedRun], drawn: Mapping[str, JSON]) -> str:
    """Return the section; empty if no run reports exposure. drawn: its figures."""
    told = [(place, run) for place, run in enumerate(runs) if run.leakage is not None]
    if not told:
        return ""
    lead = (
        "What each participant could learn, and which defence reduces it. Where it was measured: "
        "how well labels can be guessed from the tensors at the cuts, as AUC (0.5 is random "
        "guessing, 1 is all correct), and how much of the inputs is in the smashed data, as "
        "distance correlation (0 is nothing, 1 is all); the table shows the newest round, the "
        "figures every round. For several runs a figure shows their results over the leakage."
    )
    figures = [
        figure_of(f"leaks-{meter}", heading)
        for meter, heading in LEAKS.items()
        if f"leaks-{meter}" in drawn
    ]
    trades = [
        figure_of(
            f"trade-{meter}",
            translated("What it costs: {metric}", metric=translated(_SHORT[meter])),
        )
        for meter in LEAKS
        if f"trade-{meter}" in drawn
    ]
    return section(
        "leaks", "What each participant could learn", lead, _table(told) + grid(figures + trades)
    )


def _table(told: Sequence[tuple[int, ReportedRun]]) -> str:
    shown = [key for key in LEAKS if any(key in _measured(run) for _, run in told)]
    rows = ""
    for place, run in told:
        assert run.leakage is not None
        measured = _measured(run)
        cells = "".join(
            f"<td>{f'{measured[key]:.3f}' if key in measured else UNKNOWN}</td>" for key in shown
        )
        rows += (
            f'<tr><th scope="row">{swatch(place)} {escape(run.label)}</th>'
            f'<td class="text">{escape(recorded(run.leakage.defence))}</td>'
            f'<td class="text said">{escape(recorded(run.leakage.exposure))}</td>{cells}</tr>'
        )
    head = ("run", "defence", "what each participant could learn", *(_SHORT[key] for key in shown))
    return table(
        "Exposure", "long", head, rows, texts=["defence", "what each participant could learn"]
    )


def _measured(run: ReportedRun) -> Mapping[str, float]:
    return run.leakage.measured if run.leakage is not None else {}

"""Leakage of updates in the report: results of attacks, and reconstructions beside the originals.

`dure audit RUN` writes audit.json and audit/*.png into the run folder. Both are untrusted data: a
file that is no picture of that folder is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dure.report.document import section
from dure.report.formatting import UNKNOWN, count, escape, plural
from dure.report.html_fragments import picture_in, swatch, table
from dure.report.json_values import listing, mapping, number, numbers, text_of, whole
from dure.report.runs import AttackReport, AuditReport, ReportedRun
from dure.report.translation import recorded, translated

_SHORT = {
    "labels_right": "labels right",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "auc": "AUC",
    "tpr_at_0.01": "TPR at 1 %",
}
"""Headings of the figures."""


def audit_of(folder: Path, raw: Mapping[str, Any]) -> AuditReport | None:
    """Return the content of a run's audit.json; None without rows."""
    rows = [_row(folder, mapping(one)) for one in listing(raw.get("rows"))]
    if not rows:
        return None
    return AuditReport(
        rows=rows,
        guess=numbers(mapping(raw.get("guess"))),
        sums_only=raw.get("sums_only") is True,
        canaries=numbers(mapping(raw.get("canaries"))),
        promised=numbers(mapping(raw.get("promised"))),
    )


def _row(folder: Path, raw: Mapping[str, Any]) -> AttackReport:
    figures = {}
    for name, interval in mapping(raw.get("figures")).items():
        values = [number(one) for one in listing(interval)]
        if len(values) == 3 and None not in values:
            figures[str(name)] = tuple(one for one in values if one is not None)
    return AttackReport(
        attack=text_of(raw.get("attack")) or UNKNOWN,
        sum=whole(raw.get("sum")),
        change=text_of(raw.get("change")) or UNKNOWN,
        examples=number(raw.get("examples")),
        figures=figures,
        why=text_of(raw.get("why")),
        picture=picture_in(folder / "audit", raw.get("picture")),
    )


def update_leaks(runs: Sequence[ReportedRun]) -> str:
    """Return the section; empty if no run was audited."""
    told = [(place, run, run.audit) for place, run in enumerate(runs) if run.audit is not None]
    if not told:
        return ""
    lead = (
        "Attacks on the updates that a simulation has stored, by an attacker who can read the "
        "server. Each value is the mean over the attacked sums, with its 95 % interval. Labels "
        "right: the share of labels that was read from the last layer. PSNR and SSIM: of "
        "reconstructed inputs, each compared with the most similar original. AUC: how well "
        "losses distinguish members from non-members (0.5 is guessing). A weak attack does not "
        "prove that there is no stronger one."
    )
    body = "".join(_table(place, run, audit) + _pictures(audit) for place, run, audit in told)
    return section("updates", "What an update gives away", lead, body)


def _table(place: int, run: ReportedRun, audit: AuditReport) -> str:
    shown = [key for key in _SHORT if any(key in row.figures for row in audit.rows)]
    rows = "".join(_line(row, shown) for row in audit.rows)
    head = ("attack", "seen", "update", "examples", *(_SHORT[key] for key in shown))
    heading = f"<h3>{swatch(place)} {escape(run.label)}</h3>"
    aside = "".join(f'<p class="aside">{line}</p>' for line in _asides(audit))
    return heading + table("Attacks", "long", head, rows, texts=["seen", "update"]) + aside


def _line(row: AttackReport, shown: Sequence[str]) -> str:
    of = plural(row.sum, "update")
    first = (
        f'<tr><th scope="row">{escape(row.attack)}</th><td class="text">{of}</td>'
        f'<td class="text">{escape(recorded(row.change))}</td>'
    )
    if row.why is not None:
        return (
            f'{first}<td class="text said" colspan="{len(shown) + 1}">'
            f"{translated('not made: {reason}', reason=escape(row.why))}</td></tr>"
        )
    cells = "".join(f"<td>{_figure(row.figures.get(key))}</td>" for key in shown)
    return f"{first}<td>{count(row.examples)}</td>{cells}</tr>"


def _figure(interval: Sequence[float] | None) -> str:
    if interval is None:
        return UNKNOWN
    value, low, high = interval
    ends = translated("{low} to {high}", low=f"{low:.3g}", high=f"{high:.3g}")
    return f"{value:.3g}" if low == high else f"{value:.3g} <small>{ends}</small>"


def _asides(audit: AuditReport) -> list[str]:
    lines = []
    if "psnr" in audit.guess:
        lines.append(
            translated(
                "Without any update, the mean of public examples has a PSNR of {value} dB.",
                value=f"{audit.guess['psnr']:.3g}",
            )
        )
    if audit.sums_only:
        lines.append(
            translated(
                "The server of this run received only sums: it could not see the results for 1 "
                "update."
            )
        )
    told = audit.canaries
    if {"right", "guessed", "epsilon_at_least", "delta"} <= told.keys():
        lines.append(
            translated(
                "{clients}: {right} of {guessed} guesses were right, so epsilon is at least "
                "{epsilon} at delta {delta}, with 95 % confidence.",
                clients=plural(told.get("canaries"), "canary client"),
                right=count(told["right"]),
                guessed=count(told["guessed"]),
                epsilon=f"{told['epsilon_at_least']:.3g}",
                delta=f"{told['delta']:g}",
            )
        )
    if {"epsilon", "delta"} <= audit.promised.keys():
        lines.append(
            translated(
                "The accountant of this run guarantees an epsilon of at most {epsilon} at delta "
                "{delta}.",
                epsilon=f"{audit.promised['epsilon']:.3g}",
                delta=f"{audit.promised['delta']:g}",
            )
        )
    return lines


def _pictures(audit: AuditReport) -> str:
    """Return the pictures: originals on top, their reconstructions below."""
    figures = "".join(_strip(row) for row in audit.rows if row.picture is not None)
    return f'<div class="grid">{figures}</div>' if figures else ""


def _strip(row: AttackReport) -> str:
    words = f"{row.attack}, {plural(row.sum, 'update')}, {recorded(row.change)}"
    what = translated("Originals above, and reconstructions by {attack} below", attack=words)
    return (
        f"<figure><figcaption><h4>{escape(words)}</h4></figcaption>"
        f'<img src="{row.picture}" alt="{escape(what)}" style="max-width:100%"></figure>'
    )

"""Split learning in the report: parts of the model, traffic against its formula, and leakage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dure.report.charts import JSON
from dure.report.document import section
from dure.report.formatting import UNKNOWN, count, escape, plural, size
from dure.report.html_fragments import figure_of, grid, swatch, table
from dure.report.runs import MessageCounts, ReportedRun, SplitFacts, WorkerTime
from dure.report.split_figures import LEAKS, PARTS
from dure.report.translation import recorded, translated

_KINDS = {
    "Smashed": ("smashed data", "up"),
    "Outputs": ("values at the second cut", "down"),
    "OutputGradients": ("gradients at the second cut", "up"),
    "Gradients": ("gradients at the first cut", "down"),
    "HeadGradients": ("gradients of a head’s weights", "up"),
    "HeadSum": ("their sum over clients", "down"),
    "Turn": ("head, from the server", "down"),
    "Ended": ("head, to the server", "up"),
    "Handed": ("head, from client to client", "across"),
    "Sealed": ("head, sealed, by way of the server", "up, down"),
    "Query": ("values to be measured", "up"),
    "Answer": ("their results", "down"),
    "Final": ("head, at the end", "down"),
}
"""Messages by the name of their class, in the order of a step, with their direction."""


def divided_models(runs: Sequence[ReportedRun], drawn: Mapping[str, JSON]) -> str:
    """Return the section, a block for each run; empty if no model was cut. drawn: its figures."""
    blocks = "".join(
        _block(place, run, run.divided, drawn)
        for place, run in enumerate(runs)
        if run.divided is not None
    )
    if not blocks:
        return ""
    lead = _legend() + translated(
        "The model is cut: the head is with the clients, and in the U-shape its end "
        "too; the tail is on the server. Smashed data are the values at the cut. Each message is "
        "compared with its formula for a full batch, and one with a head with the bytes of its "
        "weights: the optimizer’s state is sent in addition, as large as the weights with "
        "momentum, twice as large with Adam."
    )
    return section("split", "Split learning", lead, blocks)


def _legend() -> str:
    names = "".join(
        f'<span class="key"><i class="{colour}"></i>{translated(what)}</span>'
        for what, colour in PARTS.items()
    )
    return f"{names}<br>"


def _block(place: int, run: ReportedRun, divided: SplitFacts, drawn: Mapping[str, JSON]) -> str:
    def figure(key: str, heading: str, note: str) -> str:
        name = f"{key}-{place}"
        return figure_of(name, heading, note) if name in drawn else ""

    waits = (
        "Of the first round. Where a lane is empty, it waits. An event that takes no time is a "
        "mark."
    )
    first = figure("steps", "The first steps", waits)
    kept = translated("The newest one.")
    if len(divided.newest) >= _KEPT:
        kept += translated(" Only its recorded beginning.")
    newest = figure("round", translated("Round {number}", number=divided.round + 1), kept)
    return (
        f'<div class="pipeline"><h3>{swatch(place)}<span>{escape(run.label)}</span></h3>'
        f"<p>{escape(_facts(run, divided))}</p>{_parts(divided)}{_traffic(divided)}"
        f"{first}{newest}</div>"
    )


_KEPT = 1_500
"""Most recorded spans of the newest round."""


def _facts(run: ReportedRun, divided: SplitFacts) -> str:
    clients = [one for one in run.result.workers if one.name.startswith("client")]
    said = [translated("cut at {places}", places=translated(" and ").join(divided.at))]
    # A server does not know the computing time of clients on other machines.
    if clients:
        said.append(plural(len(clients), "client"))
    if len(divided.shares) > 2:
        said.append(translated("labels stay with the clients"))
    everyone = _together(clients)
    if everyone.total:
        busy = (value / everyone.total for value in (everyone.compute, everyone.communication))
        computed, sent, waited = map("{:.0%}".format, [*busy, everyone.idle_share or 0.0])
        said.append(
            translated(
                "of their time clients computed {computed}, sent and received {sent} and waited "
                "{waited}",
                computed=computed,
                sent=sent,
                waited=waited,
            )
        )
    return "; ".join(said) + "."


def _together(clients: Sequence[WorkerTime]) -> WorkerTime:
    return WorkerTime(
        "clients",
        compute=sum(one.compute for one in clients),
        communication=sum(one.communication for one in clients),
        idle=sum(one.idle for one in clients),
    )


def _parts(divided: SplitFacts) -> str:
    """Return a table of head, tail and end: owner, weights and operations."""
    rows = ""
    for name, share, weights in zip(
        ("head", "tail", "end"), divided.shares, divided.weights, strict=False
    ):
        flops = UNKNOWN if divided.flops is None else count(divided.flops * share / 1e6)
        owner = translated("server" if name == "tail" else "clients")
        rows += (
            f'<tr><th scope="row">{translated(name)}</th><td class="text">'
            f"{owner}</td><td>{count(weights)}</td>"
            f"<td>{share:.1%}</td>"
            f"<td>{flops}</td></tr>"
        )
    of = plural(divided.examples, "example")
    step = translated("MFLOP a step of {examples}", examples=of)
    head = ("part", "with", "weights", "operations", step)
    # A server with a separate tail knows no other part.
    return table("Parts of the model", "long", head, rows, texts=["with"]) if rows else ""


def _traffic(divided: SplitFacts) -> str:
    """Return a table of messages against their formulas."""
    order = list(_KINDS)
    known = [one for one in divided.sorts if one.kind in _KINDS]
    others = [one for one in divided.sorts if one.kind not in _KINDS]
    rows = "".join(map(_row, sorted(known, key=lambda one: order.index(one.kind)) + others))
    if not rows:
        return ""
    head = ("message", "way", "formula, bytes", "measured", "ratio", "messages", "all of them")
    return table("Bytes", "long", head, rows, texts=["way"])


def _row(one: MessageCounts) -> str:
    name, way = _KINDS.get(one.kind, (escape(one.kind), UNKNOWN))
    ratio = f"{one.largest / one.formula:.4g}" if one.formula else UNKNOWN
    return (
        f'<tr><th scope="row">{translated(name)}</th><td class="text">{translated(way)}</td>'
        f"<td>{count(one.formula)}</td><td>{count(one.largest)}</td><td>{ratio}</td>"
        f"<td>{count(one.messages)}</td><td>{size(one.nbytes)}</td></tr>"
    )


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

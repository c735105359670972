"""Split learning in the report: parts of the model, traffic against its formula, and busy times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dure.report.charts import JSON
from dure.report.document import section
from dure.report.formatting import UNKNOWN, count, escape, plural, size
from dure.report.html_fragments import figure_of, swatch, table
from dure.report.runs import MessageCounts, ReportedRun, SplitFacts, WorkerTime
from dure.report.split_figures import PARTS
from dure.report.translation import translated

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

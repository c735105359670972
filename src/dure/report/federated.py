"""Federations in the report: who took part when, how stale and how large updates were, and how fair
the models are.

    worst tenth = the value at a tenth of the clients, from the worst one on, interpolated linearly
    between clients

What is drawn is what the server told of itself: assignments and updates are its first ones, counts
are of the whole run, and the models of clients are measured at the last evaluation.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dure.report.charts import CLOCK, JSON, POINTS, SPANS, SPANS_OF_ALL_RUNS, short, style
from dure.report.document import section
from dure.report.parts import swatch
from dure.report.runs import Assignment, Federation, Run, Sent
from dure.report.words import (
    count,
    duration,
    escape,
    higher_is_better,
    is_share,
    metric_name,
    metric_value,
)

ROWS = 60
UPDATES = 2_000

_COLOURS = {
    "accepted": "compute",
    "late": "communication",
    "dropped out": "checkpoint",
    "went offline": "evaluation",
}


class Told(NamedTuple):
    """A run that is a federation, and its place in the report."""

    place: int
    run: Run
    federation: Federation


@dataclass(frozen=True)
class Spread:
    """A metric over clients, each of which counts alike."""

    clients: int
    mean: float
    worst_tenth: float
    deviation: float


def spread(key: str, values: Sequence[float]) -> Spread:
    """values: the metric `key` of each client, of at least one."""
    mean = sum(values) / len(values)
    worst = quantile(values, 0.1 if higher_is_better(key) else 0.9)
    return Spread(
        len(values),
        mean,
        worst,
        (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value at a share of those of at least one client in order, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def in_a_line(run: Run) -> str | None:
    """The engine, and what came of what clients were asked, for a terminal; None for a run that
    told nothing of it."""
    if run.federation is None:
        return None
    why = f" ({run.federation.why})" if run.federation.why else ""
    engine = f"{run.federation.engine} engine{why}" if run.federation.engine else None
    now = _last(run, CLOCK)
    clock = None if now is None else f"{duration(now)} of virtual time"
    return "; ".join(filter(None, [engine, clock, _came(run, run.federation)]))


def _came(run: Run, federation: Federation) -> str:
    """40 updates, 3 late, 2 dropped out."""
    updates = sum(federation.turns.values())
    rest = {
        outcome: number
        for outcome, number in _outcomes(run, federation).items()
        if outcome != "accepted"
    }
    said = [f"{count(updates)} update{'' if updates == 1 else 's'}"]
    said += [f"{count(number)} {outcome}" for outcome, number in rest.items()]
    most = max(federation.refusals, key=federation.refusals.__getitem__, default=None)
    return ", ".join(said) + ("" if most is None else f"; refused most often: {most}")


def _outcomes(run: Run, federation: Federation) -> dict[str, int]:
    """What became of assignments, in the order of their colours. Updates that came in time, but
    could not be right, are refused and not accepted."""
    known = {outcome: federation.outcomes.get(outcome, 0) for outcome in _COLOURS}
    others = {
        outcome: number for outcome, number in federation.outcomes.items() if outcome not in known
    }
    refused = int(sum(line.metrics.get("refused") or 0 for line in run.steps))
    known["accepted"] -= refused
    return {
        outcome: number
        for outcome, number in (known | {"refused": refused} | others).items()
        if number > 0
    }


def _last(run: Run, key: str) -> float | None:
    return next(
        (value for line in reversed(run.steps) if (value := line.metrics.get(key)) is not None),
        None,
    )


def _told(runs: Sequence[Run]) -> list[Told]:
    return [
        Told(index, run, run.federation)
        for index, run in enumerate(runs)
        if run.federation is not None
    ]


# What is drawn, as plain JSON.


def figures(runs: Sequence[Run]) -> dict[str, JSON]:
    """The figures by name, those of a run with its place in the report: flights-0, staleness-0,
    norms-0, cosines-0; those of all runs with their metric: clients-accuracy, personal-accuracy.
    What there is nothing of has none."""
    told = _told(runs)
    most = min(SPANS, SPANS_OF_ALL_RUNS // max(len(told), 1))
    drawn: dict[str, JSON | None] = {}
    for index, _, federation in told:
        drawn[f"flights-{index}"] = _flights(federation.assignments, most)
        drawn[f"staleness-{index}"] = _staleness(federation.staleness)
        drawn[f"norms-{index}"] = _points(
            federation.updates, "norm", lambda sent: sent.norm, log=True
        )
        drawn[f"cosines-{index}"] = _points(federation.updates, "cosine", lambda sent: sent.cosine)
    for metric in _metrics(told):
        drawn[f"clients-{metric}"] = _clients(told, metric)
        drawn[f"personal-{metric}"] = _personal(told, metric)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _flights(assignments: Sequence[Assignment], most: int) -> JSON | None:
    asked = Counter(one.client for one in assignments)
    if not asked:
        return None
    shown = sorted(sorted(asked, key=lambda client: (-asked[client], client))[:ROWS])
    row = {client: place for place, client in enumerate(shown)}
    bars = sorted((one for one in assignments if one.client in row), key=lambda one: one.began)
    kept = bars[:most]
    outcomes = [*_COLOURS, *sorted({one.outcome for one in kept} - set(_COLOURS))]
    return {
        "kind": "lanes",
        "rows": [str(client) for client in shown],
        "series": [
            {
                "name": html.escape(outcome, quote=False),
                "color": f"var(--{_colour(outcome)})",
                "spans": [
                    [
                        row[one.client],
                        short(one.began, 8),
                        short(one.ended - one.began),
                        one.round + 1,
                    ]
                    for one in kept
                    if one.outcome == outcome
                ],
            }
            for outcome in outcomes
            if any(one.outcome == outcome for one in kept)
        ],
        "clients": len(asked),
        "left": len(bars) - len(kept),
    }


def _staleness(staleness: Mapping[int, int]) -> JSON | None:
    if not any(staleness):
        return None
    x = sorted(staleness)
    bars = {
        "type": "bar",
        "name": "updates",
        "color": "var(--compute)",
        "x": x,
        "y": [staleness[one] for one in x],
    }
    return _xy("staleness", "updates", [bars])


def _points(
    updates: Sequence[Sent], name: str, value: Callable[[Sent], float | None], log: bool = False
) -> JSON | None:
    """A point for each update; whole rounds are left out where there are too many. log: if they
    differ much."""
    every = max(1, -(-len(updates) // UPDATES))
    rounds = set(sorted({sent.round for sent in updates})[::every])
    known = [
        (sent, y) for sent in updates if sent.round in rounds and (y := value(sent)) is not None
    ]
    if not known:
        return None
    low, high = min(y for _, y in known), max(y for _, y in known)
    series = [
        {
            "type": "markers",
            "name": who,
            "color": colour,
            "symbol": symbol,
            "x": [sent.round + 1 for sent, _ in known if sent.lies == lies],
            "y": [short(y) for sent, y in known if sent.lies == lies],
            "said": [f"client {sent.client}" for sent, _ in known if sent.lies == lies],
        }
        for lies, (who, colour, symbol, _) in _HONESTY.items()
        if any(sent.lies == lies for sent, _ in known)
    ]
    return {**_xy("round", name, series, log=log and 0 < 30 * low < high), "every": every}


_HONESTY = {
    False: ("honest", "var(--run-0)", "circle", "●"),
    True: ("attacker", "var(--run-1)", "x", "✕"),
}


def _metrics(told: Sequence[Told]) -> list[str]:
    """For each run the metric to judge by, without its client_: the first that is not a loss."""
    chosen = []
    for one in told:
        keys = [
            key.removeprefix("client_")
            for key in one.federation.by_client
            if key.startswith("client_")
        ]
        chosen += sorted(keys, key=lambda key: "loss" in key)[:1]
    return list(dict.fromkeys(chosen))


def _measured(federation: Federation, key: str) -> list[float]:
    return [value for value in federation.by_client.get(key, ()) if value is not None]


def _models(told: Sequence[Told], metric: str) -> list[tuple[Told, str, list[float]]]:
    """(run, which model, the metric of each client), of the runs that are judged by it."""
    found = [
        (one, model, _measured(one.federation, f"{prefix}_{metric}"))
        for one in told
        if metric in _metrics([one])
        for prefix, model in _MODELS.items()
    ]
    return [(one, model, values) for one, model, values in found if values]


_MODELS = {"client": "global", "personal": "own"}


def _clients(told: Sequence[Told], metric: str) -> JSON | None:
    series = []
    for one, model, values in _models(told, metric):
        points = min(len(values), POINTS)
        shares = [place / max(points - 1, 1) for place in range(points)]
        look = style(one.place) | ({"dash": "dot"} if model == "own" else {})
        curve = {
            "x": [short(share) for share in shares],
            "y": [short(quantile(values, share)) for share in shares],
        }
        series.append({"type": "lines", "name": _named(one, model), **look, **curve})
    return (
        {**_xy("share of the clients", metric_name(metric), series, metric), "shares": True}
        if series
        else None
    )


def _pairs(federation: Federation, metric: str) -> list[tuple[float, float]]:
    """(the global model's, the client's own model's) of each client of which both are known."""
    both = (federation.by_client.get(f"{prefix}_{metric}", ()) for prefix in _MODELS)
    return [
        (theirs, own)
        for theirs, own in zip(*both, strict=False)
        if theirs is not None and own is not None
    ]


def _personal(told: Sequence[Told], metric: str) -> JSON | None:
    series = []
    for one in told:
        pairs = _pairs(one.federation, metric) if metric in _metrics([one]) else []
        if pairs:
            points = {"x": [short(x) for x, _ in pairs], "y": [short(y) for _, y in pairs]}
            series.append({"type": "markers", "name": _named(one), **style(one.place), **points})
    name = metric_name(metric)
    if not series:
        return None
    return {
        **_xy(f"{name} of the global model", f"{name} of the client’s own", series, metric),
        "diagonal": True,
    }


def _named(one: Told, model: str = "") -> str:
    return html.escape(one.run.label, quote=False) + (f", {model} model" if model else "")


def _xy(x: str, y: str, series: Sequence[JSON], metric: str = "", log: bool = False) -> JSON:
    return {
        "kind": "xy",
        "x": x,
        "y": y,
        "series": list(series),
        "share": is_share(metric),
        "log": log,
    }


def _colour(outcome: str) -> str:
    return _COLOURS.get(outcome, "other")


# The sections.


def federations(runs: Sequence[Run], drawn: Mapping[str, JSON]) -> str:
    """The section on who took part when, a block for each run; empty if there is none. drawn: its
    figures."""
    told = _told(runs)
    if not told:
        return ""
    lead = (
        "Who took part when: a bar is what a client was asked once, from the moment at which it "
        "was handed out to its "
        "end, on the federation’s clock."
    )
    if any(name.startswith("staleness") for name in drawn):
        lead += " The staleness of an update is how many models the server made since it handed out the one it is of."
    if any(name.startswith("norms") for name in drawn):
        lead += " Cosines are between an update and the step that the global model then took."
    return section("federations", "Federation", lead, "".join(_block(one, drawn) for one in told))


def _block(one: Told, drawn: Mapping[str, JSON]) -> str:
    index, run, federation = one
    flights = drawn.get(f"flights-{index}")
    asked = (
        _figure(f"flights-{index}", "Who took part when", _flights_note(federation, flights))
        if flights
        else ""
    )
    small = (
        [_figure(f"staleness-{index}", "Staleness of updates")]
        if f"staleness-{index}" in drawn
        else []
    )
    small += [
        _figure(f"{key}-{index}", heading, _honesty(drawn[f"{key}-{index}"]))
        for key, heading in (
            ("norms", "Norms of updates"),
            ("cosines", "Cosines between updates and steps"),
        )
        if f"{key}-{index}" in drawn
    ]
    return (
        f'<div class="pipeline"><h3>{swatch(index)}<span>{escape(run.label)}</span></h3>'
        f"<p>{escape(_facts(run, federation))}</p>{asked}{_outcome_table(run, federation)}"
        f"{_grid(small)}</div>"
    )


def _facts(run: Run, federation: Federation) -> str:
    said = in_a_line(run)
    turns = federation.turns.values()
    took = (
        f"{count(len(turns))} clients gave updates, {_between(min(turns), max(turns))} each"
        if turns
        else None
    )
    if took and run.partition is not None:
        took = took.replace(" clients", f" of {count(len(run.partition.counts))} clients", 1)
    whole = "; ".join(filter(None, [said, took])) + "."
    return whole[0].upper() + whole[1:]


def _between(low: int, high: int) -> str:
    return count(low) if low == high else f"{count(low)} to {count(high)}"


def _flights_note(federation: Federation, flights: JSON) -> str:
    parts = []
    if flights["clients"] > len(flights["rows"]):
        parts.append(
            f"{len(flights['rows'])} of {count(flights['clients'])} clients are drawn, those asked "
            f"most often."
        )
    if flights["left"]:
        parts.append(f"The last {count(flights['left'])} of their assignments are left out.")
    happened, kept = sum(federation.outcomes.values()), len(federation.assignments)
    if happened > kept:
        parts.append(f"The run itself kept its first {count(kept)} of {count(happened)}.")
    return escape(" ".join(parts))


def _honesty(figure: JSON) -> str:
    there = {one["name"] for one in figure["series"]}
    keys = "".join(
        f'<span class="key"><b style="color:{colour}" aria-hidden="true">{sign}</b> {who}</span>'
        for who, colour, _, sign in _HONESTY.values()
        if who in there
    )
    every = figure["every"]
    return keys + (f"One round of {every} is drawn." if every > 1 else "")


def _outcome_table(run: Run, federation: Federation) -> str:
    outcomes, asked = _outcomes(run, federation), sum(federation.outcomes.values())
    if not asked:
        return ""
    rows = "".join(
        f'<tr><th scope="row"><span class="key"><i class="{_colour(outcome)}"></i>{escape(outcome)}</span></th>'
        f"<td>{count(number)}</td><td>{100 * number / asked:.1f} %</td></tr>"
        for outcome, number in outcomes.items()
    )
    return _table("Outcomes", "narrow", ("outcome", "assignments", "share"), rows)


def fairness(runs: Sequence[Run], drawn: Mapping[str, JSON]) -> str:
    """The section on models measured client by client, of all runs together; empty if none was.
    drawn: its figures."""
    told = _told(runs)
    metrics = [metric for metric in _metrics(told) if f"clients-{metric}" in drawn]
    if not metrics:
        return ""
    lead = (
        "Models at the last evaluation on the data that each client held out. Clients are in order "
        "from the lowest "
        "value to the highest: the flatter a curve, the fairer the model. Each client counts "
        "alike; a tenth of the "
        "clients is at the worst tenth (p10 among the curves) or worse."
    )
    if any(f"personal-{metric}" in drawn for metric in metrics):
        lead += " A client’s own model is the one its algorithm keeps for it, or the global one after fine-tuning."
    body = "".join(_fair(told, metric, drawn) for metric in metrics)
    return section("fairness", "Client by client", lead, f'<div class="pipeline">{body}</div>')


def _fair(told: Sequence[Told], metric: str, drawn: Mapping[str, JSON]) -> str:
    name = escape(metric_name(metric))
    shown = [
        _figure(
            f"clients-{metric}",
            f"Spread of {name} over clients",
            _curve_names(drawn[f"clients-{metric}"]),
        )
    ]
    if f"personal-{metric}" in drawn:
        shown.append(
            _figure(
                f"personal-{metric}",
                "Clients’ own models against the global one",
                _better(told, metric),
            )
        )
    rows = "".join(
        f'<tr><th scope="row"><div>{swatch(one.place)}<span>{escape(one.run.label)}</span></div></th>'
        f'<td class="text">{model}</td>'
        f"<td>{count(of.clients)}</td>{''.join(f'<td>{metric_value(metric, v)}</td>' for v in _three(of))}</tr>"
        for one, model, values in _models(told, metric)
        for of in (spread(metric, values),)
    )
    head = ("run", "model", "clients", f"mean {name}", "worst tenth", "standard deviation")
    return _grid(shown) + _table(f"Spread of {name}", "long", head, rows)


def _three(of: Spread) -> tuple[float, float, float]:
    return of.mean, of.worst_tenth, of.deviation


def _curve_names(figure: JSON) -> str:
    own = any(one["name"].endswith(", own model") for one in figure["series"])
    return "Dotted: each client’s own model." if own else ""


def _better(told: Sequence[Told], metric: str) -> str:
    """Of how many clients the own model is the better one."""
    parts = []
    for one in told:
        pairs = _pairs(one.federation, metric)
        won = sum(
            (own > theirs) == higher_is_better(metric) and own != theirs for theirs, own in pairs
        )
        if pairs:
            parts.append(
                f"{escape(one.run.label)}: the own model is better for {count(won)} of "
                f"{count(len(pairs))}."
            )
    return " ".join(parts)


def _figure(name: str, heading: str, note: str = "") -> str:
    aside = f'<p class="aside">{note}</p>' if note else ""
    return (
        f"<figure><figcaption><h4>{heading}</h4>{aside}</figcaption>"
        f'<div class="chart" data-figure="{escape(name)}" role="img" aria-label="{heading}"></div></figure>'
    )


def _grid(shown: Iterable[str]) -> str:
    inside = "".join(shown)
    return f'<div class="grid">{inside}</div>' if inside else ""


def _table(name: str, kind: str, head: Sequence[str], rows: str) -> str:
    heads = "".join(
        f'<th scope="col"{_TEXT if title == "model" else ""}>{title}</th>' for title in head
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll small {kind}" role="region" aria-label="{name}" tabindex="0">{table}</div>'


_TEXT = ' class="text"'

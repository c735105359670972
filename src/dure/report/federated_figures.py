"""What the report draws of federations, as plain JSON: assignments, updates, and clients' models.

What is drawn is what the server told of itself: assignments and updates are its first ones, and the
models of clients are measured at the last evaluation.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dure.report.charts import JSON, POINTS, SPANS, SPANS_OF_ALL_RUNS, short, style, xy
from dure.report.runs import Assignment, Federation, Presence, Run, Sent, clock_of
from dure.report.words import metric_name

ROWS = 60
"""Clients that are drawn with what they were asked."""

UPDATES = 2_000
"""Updates that are drawn of a run."""


COLOURS = {
    "accepted": "compute",
    "late": "communication",
    "dropped out": "checkpoint",
    "went offline": "evaluation",
}
"""What may become of an assignment, in the order of tables."""


def colour(outcome: str) -> str:
    """The name of an outcome's colour."""
    return COLOURS.get(outcome, "other")


class Told(NamedTuple):
    """A run that is a federation, and its place in the report."""

    place: int
    run: Run
    federation: Federation


class Look(NamedTuple):
    """How the points of updates look. sign: that of a legend outside of the chart."""

    who: str
    colour: str
    symbol: str
    sign: str


HONEST = Look("honest", "var(--run-0)", "circle", "●")
ATTACKER = Look("attacker", "var(--run-1)", "x", "✕")

_MODELS = {"client": "global", "personal": "own"}
"""How metrics of clients begin, and whose model they measure."""

PREFIX = {model: prefix for prefix, model in _MODELS.items()}
"""Whose model it is, and how the metrics of it begin."""


def federations_of(runs: Sequence[Run]) -> list[Told]:
    """The federations among the runs."""
    return [
        Told(place, run, run.federation)
        for place, run in enumerate(runs)
        if run.federation is not None
    ]


def figures(runs: Sequence[Run]) -> dict[str, JSON]:
    """The figures by name; what there is nothing of has none.

    Those of a run with its place in the report: flights-0, staleness-0, norms-0, cosines-0. Those
    of all runs with their metric: clients-accuracy, personal-accuracy.
    """
    told = federations_of(runs)
    most = min(SPANS, SPANS_OF_ALL_RUNS // max(len(told), 1))
    drawn: dict[str, JSON | None] = {}
    for place, run, federation in told:
        updates = _thinned(federation.updates)
        called = _called(run)
        seconds = f"{clock_of(run) or 'virtual'} seconds"
        drawn[f"flights-{place}"] = _flights(federation, most, called, seconds)
        drawn[f"staleness-{place}"] = _staleness(federation.staleness)
        drawn[f"norms-{place}"] = _points(updates, "norm", lambda sent: sent.norm, called, log=True)
        drawn[f"cosines-{place}"] = _points(updates, "cosine", lambda sent: sent.cosine, called)
    for metric in metrics_of(told):
        drawn[f"clients-{metric}"] = _clients(told, metric)
        drawn[f"personal-{metric}"] = _personal(told, metric)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def metrics_of(told: Sequence[Told]) -> list[str]:
    """For each run the metric to judge by, without its client_: the first that is not a loss."""
    chosen = []
    for one in told:
        # Metrics of clients are named client_ for the global model, personal_ for their own.
        keys = [
            key.removeprefix("client_")
            for key in one.federation.by_client
            if key.startswith("client_")
        ]
        chosen += sorted(keys, key=lambda key: "loss" in key)[:1]
    return list(dict.fromkeys(chosen))


def models_of(told: Sequence[Told], metric: str) -> list[tuple[Told, str, list[float]]]:
    """(run, which model, the metric of each client), of the runs that are judged by it."""
    found = []
    for one in told:
        if metric not in metrics_of([one]):
            continue
        for prefix, model in _MODELS.items():
            measured = one.federation.by_client.get(f"{prefix}_{metric}", ())
            values = [value for value in measured if value is not None]
            if values:
                found.append((one, model, values))
    return found


def pairs_of(federation: Federation, metric: str) -> list[tuple[float, float]]:
    """(the global model's, the client's own model's) of each client of which both are known."""
    theirs = federation.by_client.get(f"client_{metric}", ())
    own = federation.by_client.get(f"personal_{metric}", ())
    return [
        (one, other)
        for one, other in zip(theirs, own, strict=False)
        if one is not None and other is not None
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The value at a share of those of at least one client in order, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _called(run: Run) -> Callable[[int], str]:
    """The name of each client, safe in a page."""

    def called(client: int) -> str:
        return html.escape(name_of(run, client), quote=False)

    return called


def name_of(run: Run, client: int) -> str:
    """What a client is called: by itself where it is on a network, else by the data."""
    said = None if run.federation is None else run.federation.name_of(client)
    if said is not None:
        return said
    known = run.partition is not None and 0 <= client < len(run.partition.counts)
    return run.partition.called(client) if known and run.partition is not None else str(client)


def _flights(
    federation: Federation, most: int, called: Callable[[int], str], seconds: str
) -> JSON | None:
    assignments = federation.assignments
    asked = Counter(one.client for one in assignments)
    # Who was there and never asked has a row too.
    asked.update({one.client: 0 for one in federation.there})
    if not asked:
        return None
    # Of many clients those that were asked most often, drawn in the order of their numbers.
    shown = sorted(sorted(asked, key=lambda client: (-asked[client], client))[:ROWS])
    row = {client: place for place, client in enumerate(shown)}
    bars = sorted((one for one in assignments if one.client in row), key=lambda one: one.began)
    kept = bars[:most]
    there = {one.outcome for one in kept}
    outcomes = [outcome for outcome in COLOURS if outcome in there]
    outcomes += sorted(there - set(COLOURS))
    series = _there([one for one in federation.there if one.client in row][:most], row)
    for outcome in outcomes:
        bars_of_it = [_bar(one, row) for one in kept if one.outcome == outcome]
        name = html.escape(outcome, quote=False)
        series.append({"name": name, "color": f"var(--{colour(outcome)})", "spans": bars_of_it})
    return {
        "kind": "lanes",
        "x": seconds,
        "rows": [called(client) for client in shown],
        "series": series,
        "clients": len(asked),
        "left": len(bars) - len(kept),
    }


def _there(there: Sequence[Presence], row: Mapping[int, int]) -> list[JSON]:
    """A wide bar behind the others, while a client on a network was there."""
    spans = [
        [row[one.client], short(one.began, 8), short(one.ended - one.began), None] for one in there
    ]
    return [{"name": "there", "color": "var(--line)", "wide": True, "spans": spans}] * bool(spans)


def _bar(one: Assignment, row: Mapping[int, int]) -> list[float | None]:
    # Rounds count from 1 for people, from 0 in the account.
    return [row[one.client], short(one.began, 8), short(one.ended - one.began), one.round + 1]


def _staleness(staleness: Mapping[int, int]) -> JSON | None:
    # All of them fresh: a single bar at 0 says nothing.
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
    return xy("staleness", "updates", [bars])


class Thinned(NamedTuple):
    """Updates to draw: those of one round of `every`."""

    updates: Sequence[Sent]
    every: int


def _thinned(updates: Sequence[Sent]) -> Thinned:
    """Whole rounds are left out where there are too many updates."""
    # Whole rounds: the updates of one round are to be compared with one another.
    every = max(1, -(-len(updates) // UPDATES))
    # Every so many of those that have updates.
    rounds = set(sorted({sent.round for sent in updates})[::every])
    return Thinned([sent for sent in updates if sent.round in rounds], every)


def _points(
    thinned: Thinned,
    name: str,
    value: Callable[[Sent], float | None],
    called: Callable[[int], str],
    log: bool = False,
) -> JSON | None:
    """A point for each update. log: if they differ much."""
    known = [(sent, y) for sent in thinned.updates if (y := value(sent)) is not None]
    if not known:
        return None
    series = []
    for look, lies in ((HONEST, False), (ATTACKER, True)):
        of_these = [(sent, y) for sent, y in known if sent.lies == lies]
        if of_these:
            series.append(
                {
                    "type": "markers",
                    "name": look.who,
                    "color": look.colour,
                    "symbol": look.symbol,
                    "x": [sent.round + 1 for sent, _ in of_these],
                    "y": [short(y) for _, y in of_these],
                    "said": [f"client {called(sent.client)}" for sent, _ in of_these],
                }
            )
    low = min(y for _, y in known)
    high = max(y for _, y in known)
    # Above a ratio of 30 the small ones would lie on the axis; a logarithm needs all above 0.
    figure = xy("round", name, series, log=log and 0 < 30 * low < high)
    return {**figure, "every": thinned.every}


def _clients(told: Sequence[Told], metric: str) -> JSON | None:
    """A curve for each model: its values over the clients, from the lowest on."""
    series = []
    for one, model, values in models_of(told, metric):
        # Evenly over the clients: each client a point, or quantiles where there are too many.
        points = min(len(values), POINTS)
        shares = [place / max(points - 1, 1) for place in range(points)]
        # The run's own colour for both of its models; the clients' own is dotted.
        look = style(one.place) | ({"dash": "dot"} if model == "own" else {})
        curve = {
            "x": [short(share) for share in shares],
            "y": [short(quantile(values, share)) for share in shares],
        }
        series.append({"type": "lines", "name": _named(one, model), **look, **curve})
    if not series:
        return None
    figure = xy("share of the clients", metric_name(metric), series, metric)
    return {**figure, "shares": True}


def _personal(told: Sequence[Told], metric: str) -> JSON | None:
    """A point for each client: its own model's value over the global one's."""
    series = []
    for one in told:
        pairs = pairs_of(one.federation, metric) if metric in metrics_of([one]) else []
        if pairs:
            points = {"x": [short(x) for x, _ in pairs], "y": [short(y) for _, y in pairs]}
            series.append({"type": "markers", "name": _named(one), **style(one.place), **points})
    if not series:
        return None
    name = metric_name(metric)
    figure = xy(f"{name} of the global model", f"{name} of the client’s own", series, metric)
    return {**figure, "diagonal": True}


def _named(one: Told, model: str = "") -> str:
    return html.escape(one.run.label, quote=False) + (f", {model} model" if model else "")

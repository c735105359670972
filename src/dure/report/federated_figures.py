"""Figures of federations, as plain JSON: assignments, updates, and metrics by client.

The figures show the server's own records: its first assignments and updates, and the metrics of
clients at the last evaluation.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dure.report.charts import JSON, POINTS, SPANS, SPANS_OF_ALL_RUNS, short, style, xy
from dure.report.formatting import metric_name
from dure.report.runs import (
    AssignmentSpan,
    FederationFacts,
    PresenceSpan,
    ReportedRun,
    UpdateRecord,
    clock_of,
)
from dure.report.translation import recorded, translated

ROWS = 60
"""Most clients in the figure of assignments."""

UPDATES = 2_000
"""Most updates in a run's figures."""


COLOURS = {
    "accepted": "compute",
    "late": "communication",
    "dropped out": "checkpoint",
    "went offline": "evaluation",
}
"""Outcomes of assignments, in the order of tables, with their colours."""


def colour(outcome: str) -> str:
    """Return the name of an outcome's colour."""
    return COLOURS.get(outcome, "other")


class FederationRun(NamedTuple):
    """A run that is a federation, and its place in the report."""

    place: int
    run: ReportedRun
    federation: FederationFacts


class MarkerStyle(NamedTuple):
    """Appearance of the points of updates. sign: symbol of a legend outside of the chart."""

    who: str
    colour: str
    symbol: str
    sign: str


HONEST = MarkerStyle("honest", "var(--run-0)", "circle", "●")
ATTACKER = MarkerStyle("attacker", "var(--run-1)", "x", "✕")

_MODELS = {"client": "global", "personal": "own"}
"""Prefix of clients' metrics, and the measured model."""

PREFIX = {model: prefix for prefix, model in _MODELS.items()}
"""Measured model, and the prefix of its metrics."""


def federations_of(runs: Sequence[ReportedRun]) -> list[FederationRun]:
    """Return the federations among the runs."""
    return [
        FederationRun(place, run, run.federation)
        for place, run in enumerate(runs)
        if run.federation is not None
    ]


def figures(runs: Sequence[ReportedRun]) -> dict[str, JSON]:
    """Return the figures by name, without empty figures.

    Figures of a run end in its place in the report: flights-0, staleness-0, norms-0, cosines-0.
    Figures of all runs end in their metric: clients-accuracy, personal-accuracy.
    """
    told = federations_of(runs)
    most = min(SPANS, SPANS_OF_ALL_RUNS // max(len(told), 1))
    drawn: dict[str, JSON | None] = {}
    for place, run, federation in told:
        updates = _thinned(federation.updates)
        called = _called(run)
        seconds = translated(f"{clock_of(run) or 'virtual'} seconds")
        drawn[f"flights-{place}"] = _flights(federation, most, called, seconds)
        drawn[f"staleness-{place}"] = _staleness(federation.staleness)
        drawn[f"norms-{place}"] = _points(updates, "norm", lambda sent: sent.norm, called, log=True)
        drawn[f"cosines-{place}"] = _points(updates, "cosine", lambda sent: sent.cosine, called)
    for metric in metrics_of(told):
        drawn[f"clients-{metric}"] = _clients(told, metric)
        drawn[f"personal-{metric}"] = _personal(told, metric)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def metrics_of(told: Sequence[FederationRun]) -> list[str]:
    """Return the main metric of each run, without client_: the first that is not a loss."""
    chosen = []
    for one in told:
        # Metrics are named client_ for the global model, personal_ for clients' own models.
        keys = [
            key.removeprefix("client_")
            for key in one.federation.by_client
            if key.startswith("client_")
        ]
        chosen += sorted(keys, key=lambda key: "loss" in key)[:1]
    return list(dict.fromkeys(chosen))


def models_of(
    told: Sequence[FederationRun], metric: str
) -> list[tuple[FederationRun, str, list[float]]]:
    """Return (run, model, metric of each client) for the runs whose main metric it is."""
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


def model_pairs(federation: FederationFacts, metric: str) -> list[tuple[float, float]]:
    """Return (metric of the global model, of the client's own) for clients with both."""
    theirs = federation.by_client.get(f"client_{metric}", ())
    own = federation.by_client.get(f"personal_{metric}", ())
    return [
        (one, other)
        for one, other in zip(theirs, own, strict=False)
        if one is not None and other is not None
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile at `share` of at least one value, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _called(run: ReportedRun) -> Callable[[int], str]:
    """Return a function from a client to its name, escaped for the page."""

    def called(client: int) -> str:
        return html.escape(name_of(run, client), quote=False)

    return called


def name_of(run: ReportedRun, client: int) -> str:
    """Return a client's name: its own name on a network, else its name in the data."""
    said = None if run.federation is None else run.federation.name_of(client)
    if said is not None:
        return said
    known = run.partition is not None and 0 <= client < len(run.partition.counts)
    return run.partition.called(client) if known and run.partition is not None else str(client)


def _flights(
    federation: FederationFacts, most: int, called: Callable[[int], str], seconds: str
) -> JSON | None:
    assignments = federation.assignments
    asked = Counter(one.client for one in assignments)
    # A client that was present and got no assignment has a row too.
    asked.update({one.client: 0 for one in federation.there})
    if not asked:
        return None
    # Of many clients those with the most assignments, in order of their numbers.
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
        name = html.escape(recorded(outcome), quote=False)
        series.append({"name": name, "color": f"var(--{colour(outcome)})", "spans": bars_of_it})
    return {
        "kind": "lanes",
        "x": seconds,
        "rows": [called(client) for client in shown],
        "series": series,
        "clients": len(asked),
        "left": len(bars) - len(kept),
    }


def _there(there: Sequence[PresenceSpan], row: Mapping[int, int]) -> list[JSON]:
    """Return wide bars behind the others, for the time in which clients were connected."""
    spans = [
        [row[one.client], short(one.began, 8), short(one.ended - one.began), None] for one in there
    ]
    return [
        {"name": translated("there"), "color": "var(--line)", "wide": True, "spans": spans}
    ] * bool(spans)


def _bar(one: AssignmentSpan, row: Mapping[int, int]) -> list[float | None]:
    # Rounds count from 1 for readers, from 0 in the records.
    return [row[one.client], short(one.began, 8), short(one.ended - one.began), one.round + 1]


def _staleness(staleness: Mapping[int, int]) -> JSON | None:
    # If all updates are fresh, a single bar at 0 shows nothing.
    if not any(staleness):
        return None
    x = sorted(staleness)
    bars = {
        "type": "bar",
        "name": translated("updates"),
        "color": "var(--compute)",
        "x": x,
        "y": [staleness[one] for one in x],
    }
    return xy("staleness", "updates", [bars])


class SampledUpdates(NamedTuple):
    """Updates to draw: those of every `every`-th round."""

    updates: Sequence[UpdateRecord]
    every: int


def _thinned(updates: Sequence[UpdateRecord]) -> SampledUpdates:
    """Drop whole rounds if there are too many updates."""
    # Whole rounds, so that the updates of a round can be compared with one another.
    every = max(1, -(-len(updates) // UPDATES))
    # Every `every`-th of the rounds with updates.
    rounds = set(sorted({sent.round for sent in updates})[::every])
    return SampledUpdates([sent for sent in updates if sent.round in rounds], every)


def _points(
    thinned: SampledUpdates,
    name: str,
    value: Callable[[UpdateRecord], float | None],
    called: Callable[[int], str],
    log: bool = False,
) -> JSON | None:
    """Return a point for each update. log: use a logarithm if the values differ widely."""
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
                    "name": translated(look.who),
                    "color": look.colour,
                    "symbol": look.symbol,
                    "x": [sent.round + 1 for sent, _ in of_these],
                    "y": [short(y) for _, y in of_these],
                    "said": [
                        translated("client {name}", name=called(sent.client))
                        for sent, _ in of_these
                    ],
                }
            )
    low = min(y for _, y in known)
    high = max(y for _, y in known)
    # Above a ratio of 30 small values would be on the axis; a logarithm needs values above 0.
    figure = xy("round", name, series, log=log and 0 < 30 * low < high)
    return {**figure, "every": thinned.every}


def _clients(told: Sequence[FederationRun], metric: str) -> JSON | None:
    """Return a curve for each model: its sorted values over the clients."""
    series = []
    for one, model, values in models_of(told, metric):
        # Evenly over the clients: a point a client, or quantiles if there are too many clients.
        points = min(len(values), POINTS)
        shares = [place / max(points - 1, 1) for place in range(points)]
        # Both models of a run have its colour; the clients' own models are dotted.
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


def _personal(told: Sequence[FederationRun], metric: str) -> JSON | None:
    """Return a point for each client: its own model's value over the global model's."""
    series = []
    for one in told:
        pairs = model_pairs(one.federation, metric) if metric in metrics_of([one]) else []
        if pairs:
            points = {"x": [short(x) for x, _ in pairs], "y": [short(y) for _, y in pairs]}
            series.append({"type": "markers", "name": _named(one), **style(one.place), **points})
    if not series:
        return None
    name = metric_name(metric)
    x = translated("{metric} of the global model", metric=name)
    figure = xy(x, translated("{metric} of the client’s own", metric=name), series, metric)
    return {**figure, "diagonal": True}


def _named(one: FederationRun, model: str = "") -> str:
    label = html.escape(one.run.label, quote=False)
    return translated(f"{{run}}, {model} model", run=label) if model else label

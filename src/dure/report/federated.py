"""Federations in the report: participation, staleness and norms of updates, and fairness.

    all examples = the metric over the examples of all clients together
    mean, median, worst tenth, worst = over clients, with equal weights; the worst tenth is the
    value at a tenth of the clients, from the worst client on, interpolated linearly

Counts are of the whole run; the figures are those of `dure.report.federated_figures`, from the
server's own records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dure.report.charts import JSON
from dure.report.client_bars import client_bars
from dure.report.document import section
from dure.report.federated_figures import (
    ATTACKER,
    COLOURS,
    HONEST,
    PREFIX,
    FederationRun,
    colour,
    federations_of,
    metrics_of,
    model_pairs,
    models_of,
    name_of,
    quantile,
)
from dure.report.formatting import (
    UNKNOWN,
    count,
    duration,
    escape,
    higher_is_better,
    listed,
    metric_name,
    metric_value,
    plural,
    size,
)
from dure.report.html_fragments import figure_of, grid, swatch, table
from dure.report.runs import (
    ClientFacts,
    FederationCost,
    FederationFacts,
    ReportedRun,
    clock_of,
    time_of,
)
from dure.report.translation import recorded, translated


@dataclass(frozen=True)
class ClientSpread:
    """Statistics of a metric over clients with equal weights."""

    clients: int
    mean: float
    worst_tenth: float
    deviation: float
    median: float


def spread(key: str, values: Sequence[float]) -> ClientSpread:
    """Return the statistics. values: the metric `key` of each client, for at least one client."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    # From the worst client on: of a metric that should fall, the highest values are the worst.
    worst_tenth = quantile(values, 0.1 if higher_is_better(key) else 0.9)
    return ClientSpread(len(values), mean, worst_tenth, variance**0.5, quantile(values, 0.5))


def in_a_line(run: ReportedRun) -> str | None:
    """Return engine, clock, outcomes and missing clients in a line for a terminal.

    None for a run that is no federation.
    """
    if run.federation is None:
        return None
    why = f" ({recorded(run.federation.why)})" if run.federation.why else ""
    named = run.federation.engine
    engine = translated("{engine} engine{why}", engine=named, why=why) if named else None
    # None without a federation clock.
    now = next((at for line in reversed(run.steps) if (at := time_of(line)) is not None), None)
    clock = None
    if now is not None:
        kind = translated(str(clock_of(run)))
        clock = translated("{duration} of {clock} time", duration=duration(now), clock=kind)
    told = [engine, clock, _bits(run.federation), _came(run, run.federation), _left(run)]
    return "; ".join(filter(None, told))


def _left(run: ReportedRun) -> str | None:
    """Describe the clients missing at the end, and the share of the data that was there."""
    federation = run.federation
    if federation is None or not federation.left:
        return None
    clients = federation.took_part.get("clients")
    of = "" if clients is None else translated(" of {count}", count=count(clients))
    who = listed(
        [
            translated(
                "{client} (from round {round} on)",
                client=name_of(run, client),
                round=count(round),
            )
            for client, round in federation.left.items()
        ]
    )
    share = federation.took_part.get("examples_share")
    data = (
        ""
        if share is None
        else translated(
            ", and the last model was trained on {percent} % of the examples",
            percent=f"{100 * share:.0f}",
        )
    )
    return translated(
        "{clients}{of} missing at the end: {who}{data}",
        clients=plural(len(federation.left), "client"),
        of=of,
        who=who,
        data=data,
    )


def _bits(federation: FederationFacts) -> str | None:
    """Describe whether clients on a network compute the same bits as a simulation."""
    if federation.bits is None:
        return None
    if federation.bits == "same":
        return translated("clients compute the same bits as a simulation")
    why = f" ({listed(federation.differs)})" if federation.differs else ""
    return translated("clients compute close to a simulation, not the same bits{why}", why=why)


def _came(run: ReportedRun, federation: FederationFacts) -> str:
    """Return a text such as "40 updates, 3 late, 2 dropped out"."""
    # Without the number of updates per client, the number of accepted assignments serves.
    updates = sum(federation.turns.values()) or _outcomes(run, federation).get("accepted", 0)
    said = [plural(updates, "update")]
    for outcome, number in _outcomes(run, federation).items():
        if outcome != "accepted":
            # On a network, an outcome may be a sentence about the failure.
            known = outcome in COLOURS or outcome == "refused"
            template = "{count} {outcome}" if known else "{count} failed ({outcome})"
            said.append(translated(template, count=count(number), outcome=recorded(outcome)))
    most = max(federation.refusals, key=federation.refusals.__getitem__, default=None)
    rejected = translated("; rejected most often: {reason}", reason=recorded(most or ""))
    return ", ".join(said) + ("" if most is None else rejected)


def _outcomes(run: ReportedRun, federation: FederationFacts) -> dict[str, int]:
    """Return counts of assignments by outcome, in the order of the colours, without zeros.

    Updates that arrived in time but were invalid count as refused and not as accepted.
    """
    refused = int(sum(line.metrics.get("refused") or 0 for line in run.steps))
    counts = {outcome: federation.outcomes.get(outcome, 0) for outcome in COLOURS}
    # The server's records call them accepted, since they arrived in time.
    counts["accepted"] -= refused
    counts["refused"] = refused
    for outcome, number in federation.outcomes.items():
        if outcome not in COLOURS:
            counts[outcome] = number
    # Damaged records could give less than 0.
    return {outcome: number for outcome, number in counts.items() if number > 0}


# Participation over time.


def federations(runs: Sequence[ReportedRun], drawn: Mapping[str, JSON]) -> str:
    """Return the section on participation, a block for each run; empty without federations.

    drawn: figures of the section.
    """
    told = federations_of(runs)
    if not told:
        return ""
    lead = translated(
        "Participation over time: a bar is one assignment of a client, from its start to its "
        "end, on the federation’s clock."
    )
    if any(run.federation.there for run in runs if run.federation is not None):
        lead += translated(" The pale bar behind it is the time in which the client was available.")
    if any(name.startswith("staleness") for name in drawn):
        lead += translated(
            " The staleness of an update is the number of models that the server has made since "
            "the model on which the update is based."
        )
    if any(name.startswith("norms") for name in drawn):
        lead += translated(
            " Cosines are between an update and the following step of the global model."
        )
    return section("federations", "Federation", lead, "".join(_block(one, drawn) for one in told))


def _block(one: FederationRun, drawn: Mapping[str, JSON]) -> str:
    place, run, federation = one

    def figure(key: str, heading: str, note: str = "") -> str:
        name = f"{key}-{place}"
        return figure_of(name, heading, note) if name in drawn else ""

    def updates(key: str, heading: str) -> str:
        name = f"{key}-{place}"
        return figure(key, heading, _honesty(drawn[name])) if name in drawn else ""

    flights = drawn.get(f"flights-{place}")
    note = _flights_note(federation, flights) if flights is not None else ""
    asked = figure("flights", "Participation over time", note)
    small = (
        figure("staleness", "Staleness of updates"),
        updates("norms", "Norms of updates"),
        updates("cosines", "Cosines between updates and steps"),
    )
    return (
        f'<div class="pipeline"><h3>{swatch(place)}<span>{escape(run.label)}</span></h3>'
        f"<p>{escape(_facts(run, federation))}</p>{asked}{_outcome_table(run, federation)}"
        f"{_cohort(federation)}{grid(small)}</div>"
    )


def _facts(run: ReportedRun, federation: FederationFacts) -> str:
    said = [in_a_line(run)]
    turns = federation.turns.values()
    if turns:
        # The number of clients is known only from the partition, or from a network's cohort.
        clients = len(run.partition.counts) if run.partition is not None else None
        clients = clients or len(federation.cohort) or None
        known = translated(" of {count}", count=count(clients)) if clients else ""
        each = _between(min(turns), max(turns))
        said.append(
            _everybody(run, len(turns), clients, min(turns))
            or translated(
                "{count}{of} clients sent updates, {each} each",
                count=count(len(turns)),
                of=known,
                each=each,
            )
        )
    if federation.out:
        said.append(
            translated(
                "{clients} had reached their transfer budget: {names}",
                clients=plural(len(federation.out), "client"),
                names=_some(run, federation.out),
            )
        )
    if federation.cost is not None:
        said.append(_cost(federation.cost))
    # Not str.capitalize, which would lower all other letters.
    whole = "; ".join(filter(None, said)) + "."
    return whole[0].upper() + whole[1:]


def _everybody(run: ReportedRun, gave: int, clients: int | None, least: int) -> str | None:
    """Return a sentence if every client took part in every round, else None."""
    rounds = run.result.steps
    if rounds is None or gave != clients or least < rounds:
        return None
    return translated(
        "all {count} clients took part in every one of the {rounds}, and their updates counted: "
        "no client was left out",
        count=count(gave),
        rounds=plural(rounds, "round"),
    )


def _cost(cost: FederationCost) -> str:
    """Compare the bytes and energy spent with uploading the data."""
    spent = (
        ""
        if cost.joules is None
        else translated(" and spent {joules} J", joules=f"{cost.joules:,.4g}")
    )
    raw = (
        ""
        if cost.raw_joules is None
        else translated(" and {joules} J", joules=f"{cost.raw_joules:,.4g}")
    )
    passed = (
        translated("more than the federation has sent")
        if cost.break_even is None
        else translated("which it passed in round {round}", round=count(cost.break_even))
    )
    return translated(
        "clients and server have sent {bytes}{spent}; uploading the raw data would take "
        "{raw_bytes}, {raw_seconds}{raw_energy}, {passed}",
        bytes=size(cost.nbytes),
        spent=spent,
        raw_bytes=size(cost.raw_bytes),
        raw_seconds=duration(cost.raw_seconds),
        raw_energy=raw,
        passed=passed,
    )


def _some(run: ReportedRun, clients: Sequence[int]) -> str:
    """Return the clients' names, cut to a few."""
    return listed([name_of(run, client) for client in clients])


def _between(low: int, high: int) -> str:
    if low == high:
        return count(low)
    return translated("{low} to {high}", low=count(low), high=count(high))


def _flights_note(federation: FederationFacts, flights: JSON) -> str:
    """Return a note about data that the figure leaves out."""
    parts = []
    rows = len(flights["rows"])
    if flights["clients"] > rows:
        parts.append(
            translated(
                "{drawn} of {all} clients are drawn, those asked most often.",
                drawn=rows,
                all=count(flights["clients"]),
            )
        )
    if flights["left"]:
        parts.append(
            translated(
                "The last {count} of their assignments are not shown.",
                count=count(flights["left"]),
            )
        )
    happened = sum(federation.outcomes.values())
    kept = len(federation.assignments)
    if happened > kept:
        parts.append(
            translated(
                "The run recorded only its first {count} of {all}.",
                count=count(kept),
                all=count(happened),
            )
        )
    return escape(" ".join(parts))


def _honesty(figure: JSON) -> str:
    """Return the legend of a figure of updates."""
    there = {one["name"] for one in figure["series"]}
    said = ""
    for look in (HONEST, ATTACKER):
        if translated(look.who) in there:
            sign = f'<b style="color:{look.colour}" aria-hidden="true">{look.sign}</b>'
            said += f'<span class="key">{sign} {translated(look.who)}</span>'
    every = figure["every"]
    some = translated("One round of {count} is drawn.", count=every)
    return said + (some if every > 1 else "")


def _outcome_table(run: ReportedRun, federation: FederationFacts) -> str:
    asked = sum(federation.outcomes.values())
    if not asked:
        return ""
    rows = ""
    for outcome, number in _outcomes(run, federation).items():
        key = (
            f'<span class="key"><i class="{colour(outcome)}"></i>{escape(recorded(outcome))}</span>'
        )
        numbers = f"<td>{count(number)}</td><td>{100 * number / asked:.1f} %</td>"
        rows += f'<tr><th scope="row">{key}</th>{numbers}</tr>'
    return table("Outcomes", "narrow", ("outcome", "assignments", "share"), rows)


def _cohort(federation: FederationFacts) -> str:
    """Return a table of the clients on a network, with the reasons for rejected updates."""
    if not federation.cohort:
        return ""
    failed = _failed(federation)
    # With too many clients for a table, those with the most failures come first.
    trouble = {client: sum(why.values()) for client, why in failed.items()}
    order = sorted(federation.cohort, key=lambda one: (-trouble.get(one.client, 0), one.client))
    shown = sorted(order[:MOST_MEMBERS], key=lambda one: one.client)
    left = len(order) - len(shown)
    more = translated("{count} more clients with fewer data.", count=count(left))
    note = f"<p>{more}</p>" if left else ""
    rows = "".join(_member_row(one, federation, failed.get(one.client, {})) for one in shown)
    head = ("client", "examples", "held out", "counted", "did not count", "there", "machine")
    return table("Clients", "long", head, rows) + note


MOST_MEMBERS = 100
"""Most clients in the table of a network's clients."""


def _failed(federation: FederationFacts) -> dict[int, Counter[str]]:
    """Return failed assignments: client -> reason -> number."""
    failed: dict[int, Counter[str]] = {}
    for one in federation.assignments:
        if one.outcome != "accepted":
            failed.setdefault(one.client, Counter())[one.outcome] += 1
    for client, number in federation.refused.items():
        failed.setdefault(client, Counter())["refused"] += number
    return failed


def _member_row(one: ClientFacts, federation: FederationFacts, failed: Mapping[str, int]) -> str:
    why = "; ".join(
        recorded(reason)
        if number == 1
        else translated("{reason} ({count} times)", reason=recorded(reason), count=count(number))
        for reason, number in sorted(failed.items(), key=lambda item: -item[1])
    )
    there = sum(span.ended - span.began for span in federation.there if span.client == one.client)
    machine = one.machine or translated("a training loop of its own")
    if one.differs and one.machine is not None:
        machine += translated(" (differs: {reasons})", reasons="; ".join(one.differs))
    examples = UNKNOWN if one.examples is None else count(one.examples)
    return (
        f'<tr data-client="{escape(one.name)}"><th scope="row">{escape(one.name)}</th>'
        f"<td>{examples}</td>"
        f"<td>{count(one.held_out)}</td><td>{count(federation.turns.get(one.client, 0))}</td>"
        f'<td class="text">{escape(why) or UNKNOWN}</td><td>{duration(there)}</td>'
        f'<td class="text">{escape(machine)}</td></tr>'
    )


# Fairness of the models.


def fairness(runs: Sequence[ReportedRun], drawn: Mapping[str, JSON]) -> str:
    """Return the section on metrics by client, of all runs; empty without such metrics.

    drawn: figures of the section.
    """
    told = federations_of(runs)
    metrics = [metric for metric in metrics_of(told) if f"clients-{metric}" in drawn]
    if not metrics:
        return ""
    lead = translated(
        "Models at the last evaluation on each client’s held-out data, which are not used for "
        "training. Clients are in order from the lowest value to the highest: the flatter a "
        "curve, the fairer the model. Each client counts equally; a tenth of the clients is at "
        "the worst tenth (p10 among the curves) or worse."
    )
    if any(f"personal-{metric}" in drawn for metric in metrics):
        lead += translated(
            " A client’s own model is its personal model, or the global one after fine-tuning."
        )
    body = "".join(_fair(told, metric, drawn) for metric in metrics)
    body += "".join(map(_failures, told))
    return section("fairness", "Client by client", lead, f'<div class="pipeline">{body}</div>')


def _failures(one: FederationRun) -> str:
    """Return a note about clients that could not measure, with reasons."""
    reasons: dict[str, list[int]] = {}
    for client, reason in one.federation.not_measured.items():
        reasons.setdefault(reason, []).append(client)
    said = [
        f"{_some(one.run, clients)}: {recorded(reason)}"
        for reason, clients in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    if not said:
        return ""
    more = translated("; and {count} more reasons", count=len(said) - 5) if len(said) > 5 else ""
    text = translated(
        "{run}: could not evaluate: {reasons}{more}.",
        run=one.run.label,
        reasons="; ".join(said[:5]),
        more=more,
    )
    return f"<p>{escape(text)}</p>"


def _fair(told: Sequence[FederationRun], metric: str, drawn: Mapping[str, JSON]) -> str:
    name = escape(metric_name(metric))
    clients = f"clients-{metric}"
    personal = f"personal-{metric}"
    over = translated("Spread of {metric} over clients", metric=name)
    shown = [figure_of(clients, over, _curve_names(drawn[clients]))]
    if personal in drawn:
        heading = "Clients’ own models against the global one"
        shown.append(figure_of(personal, heading, _better(told, metric)))
    rows = "".join(
        _spread_row(one, model, metric, values) for one, model, values in models_of(told, metric)
    )
    head = (
        "run",
        "model",
        "clients",
        translated("mean {metric}", metric=name),
        "worst tenth",
        "standard deviation",
        "median",
        "worst client",
        "all examples",
    )
    spread_of = translated("Spread of {metric}", metric=name)
    whole = grid(shown) + table(spread_of, "long", head, rows, texts=["model"])
    return whole + "".join(client_bars(one, metric) for one in told)


def _spread_row(one: FederationRun, model: str, metric: str, values: Sequence[float]) -> str:
    of = spread(metric, values)
    who = f"<div>{swatch(one.place)}<span>{escape(one.run.label)}</span></div>"
    cells = "".join(
        f"<td>{metric_value(metric, value)}</td>"
        for value in (of.mean, of.worst_tenth, of.deviation, of.median)
    )
    key = f"{PREFIX[model]}_{metric}"
    cells += f"<td>{_worst(one, key)}</td>"
    cells += f"<td>{metric_value(metric, one.run.result.final.get(key))}</td>"
    return (
        f'<tr><th scope="row">{who}</th><td class="text">{translated(model)}</td>'
        f"<td>{count(of.clients)}</td>{cells}</tr>"
    )


def _worst(one: FederationRun, key: str) -> str:
    """Return the worst client's value and name."""
    values = one.federation.by_client.get(key, ())
    known = [
        (value, client)
        for client, value in zip(one.federation.clients, values, strict=False)
        if value is not None
    ]
    if not known:
        return UNKNOWN
    value, client = (min if higher_is_better(key) else max)(known)
    return f"{metric_value(key, value)} ({escape(name_of(one.run, client))})"


def _curve_names(figure: JSON) -> str:
    ending = translated("{run}, own model", run="")
    own = any(one["name"].endswith(ending) for one in figure["series"])
    return "Dotted: each client’s own model." if own else ""


def _better(told: Sequence[FederationRun], metric: str) -> str:
    """Return for how many clients the personalised model is better than the global model."""
    parts = []
    for one in told:
        pairs = model_pairs(one.federation, metric)
        won = sum(
            # Better in the direction of the metric; equal counts for neither.
            (own > theirs) == higher_is_better(metric) and own != theirs
            for theirs, own in pairs
        )
        if pairs:
            parts.append(
                translated(
                    "{run}: the own model is better for {count} of {all}.",
                    run=escape(one.run.label),
                    count=count(won),
                    all=count(len(pairs)),
                )
            )
    return " ".join(parts)

"""The live page's section on the present: each run's state, and a federation's clients.

A server's content is that of /status (docs/watching.md): names and reasons come from clients, and
are untrusted data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.record.history import is_spread, judging
from dure.report.document import section
from dure.report.formatting import (
    UNKNOWN,
    count,
    duration,
    escape,
    listed,
    metric_name,
    metric_value,
    plural,
    size,
)
from dure.report.html_fragments import swatch, table
from dure.report.json_values import listing, mapping, number, text_of
from dure.report.live.run_follower import (
    FAILED,
    OVER,
    RUNNING,
    STARTING,
    STOPPED,
    FollowedRun,
    RunsSnapshot,
)
from dure.report.translation import recorded, translated

MOST_CLIENTS = 200
"""Most rows of clients; clients with trouble come first."""

MOST_REFUSALS = 10
"""Most recent refusals in the section."""

_TROUBLE = ("missing", "away")

_SAID = {
    STARTING: "{run} starts{reason}.",
    RUNNING: "{run} is training{reason}.",
    OVER: "{run} has ended{reason}.",
    FAILED: "{run} has failed{reason}.",
    STOPPED: "{run} has stopped{reason}.",
}


def now(look: RunsSnapshot, server: Mapping[str, Any]) -> str:
    """Return the section. server: content of /status if a server shows this page, else empty."""
    if not look.followed:
        lead = "No run has started in this folder. Runs that start there are shown here."
        return section("now", "Now", lead, "")
    labels = [run.label for run in look.runs.runs]
    rows = "".join(_row(place, labels[place], one) for place, one in enumerate(look.followed))
    head = ("run", "state", "done", "loss", "measured", "time", "sent")
    body = table("status of the runs", "long", head, rows, texts=("run", "state"))
    for one in look.followed:
        body += _why(one)
    body += _server(server) if server else "".join(map(_federation, look.followed))
    return section("now", "Now", _lead(look), body)


def _lead(look: RunsSnapshot) -> str:
    """Summarise the state of all runs in a sentence."""
    if len(look.followed) == 1:
        one = look.followed[0]
        ended = one.run.result.ended
        by = f" ({escape(recorded(ended))})" if one.state == OVER and ended else ""
        what = translated(_SAID[one.state], run=escape(one.run.label), reason=by)
    else:
        going = sum(one.goes_on for one in look.followed)
        what = translated(
            "{runs} of {all} in progress.",
            runs=plural(going, "run"),
            all=count(len(look.followed)),
        )
    if look.goes_on:
        return what
    return what + translated(" All runs have ended: below is the final report.")


def _row(place: int, label: str, one: FollowedRun) -> str:
    run = one.run
    result = run.result
    steps = UNKNOWN if result.steps is None else plural(result.steps, result.unit)
    share = _share(one)
    done = "" if share is None else f" <small>{share:.0%}</small>"
    # Of a run in progress, the bytes of all workers up to the last evaluation.
    newest = run.evaluations[-1] if run.evaluations else None
    sent = newest.bytes_sent if newest is not None else None
    state = f'<span class="state {one.state}">{recorded(one.state)}</span>'
    return (
        f'<tr data-key="{place}"><th scope="row" class="text"><div>'
        f"{swatch(place)}<span>{escape(label)}</span></div></th>"
        f'<td class="text">{state}</td>'
        f"<td>{steps}{done}</td><td>{metric_value('loss', result.train_loss)}</td>"
        f"<td>{_measured(one)}</td><td>{duration(result.seconds)}</td><td>{size(sent)}</td></tr>"
    )


def _measured(one: FollowedRun) -> str:
    """Return the newest value of the main metric."""
    final = one.run.result.final
    names = [name for name in final if not is_spread(name)]
    if not names:
        return UNKNOWN
    name = min(names, key=judging)
    return f"{metric_value(name, final[name])} <small>{escape(metric_name(name))}</small>"


def _share(one: FollowedRun) -> float | None:
    """Return the finished share of the run, by the nearest limit; None if no limit is known."""
    stop = mapping(one.run.config.get("stop"))
    result = one.run.result
    so_far = {
        "epochs": result.epochs,
        "steps": result.steps,
        "rounds": result.steps,
        "seconds": result.seconds,
    }
    shares = [
        min(done / limit, 1.0)
        for name, done in so_far.items()
        if (limit := number(stop.get(name))) and done is not None
    ]
    return max(shares, default=None)


def _why(one: FollowedRun) -> str:
    """Return the reason for a failed or stopped run; empty for other runs."""
    why = text_of(one.now.get("failed"))
    if one.state == FAILED and why:
        return f'<p class="trouble">{escape(one.run.label)}: {escape(why)}</p>'
    if one.state == STOPPED:
        killed = translated(
            "{run}: no process trains in its folder, and the run has not ended: it was killed. "
            "Resume it with dure train --resume.",
            run=escape(one.run.label),
        )
        return f'<p class="trouble">{killed}</p>'
    return ""


def _federation(one: FollowedRun) -> str:
    """Return a server's facts about its clients, from the run folder that it writes."""
    told = mapping(one.now.get("federation"))
    if not told or not one.goes_on:
        return ""
    facts = [
        ("round", count(number(told.get("round")))),
        ("clients here", count(number(told.get("here")))),
        ("at work", _named(told.get("at_work"))),
        ("missing", _named(told.get("missing"))),
        ("updates", _outcomes(told.get("outcomes"))),
        ("received", size(number(told.get("received")))),
        ("sent", size(number(told.get("sent")))),
    ]
    return _facts(facts)


def _named(names: object) -> str:
    known = [str(name) for name in listing(names)]
    return f"{count(len(known))}: {listed(known)}" if known else translated("nobody")


def _outcomes(outcomes: object) -> str:
    pairs = [
        translated("{count} {outcome}", count=count(number(often)), outcome=recorded(name))
        for name, often in mapping(outcomes).items()
    ]
    return ", ".join(pairs) or translated("none yet")


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    """Return pairs of a name and a text, escaped."""
    inside = "".join(
        f"<div><dt>{escape(translated(name))}</dt><dd>{escape(text)}</dd></div>"
        for name, text in facts
    )
    return f'<dl class="facts">{inside}</dl>'


# The server's knowledge of its clients.


def _server(told: Mapping[str, Any]) -> str:
    clients = mapping(told.get("clients"))
    moved = mapping(told.get("bytes"))
    facts = [
        ("server", recorded(str(told.get("state")))),
        ("round", count(number(told.get("round")))),
        ("deadline", duration(number(told.get("seconds_to_deadline")))),
        *((name.replace("_", " "), count(number(often))) for name, often in clients.items()),
        ("updates", _outcomes(told.get("updates"))),
        ("received", size(number(moved.get("received")))),
        ("sent", size(number(moved.get("sent")))),
    ]
    return _facts(facts) + _clients(listing(told.get("who"))) + _refusals(told)


def _clients(who: Sequence[Any]) -> str:
    seats = [one for one in who if isinstance(one, dict)]
    if not seats:
        return ""
    # A stable sort: clients with trouble first, then in order of their numbers.
    shown = sorted(seats, key=_calm)[:MOST_CLIENTS]
    rows = "".join(map(_client, shown))
    head = ("client", "state", "examples", "round", "deadline", "last")
    body = table("clients", "long", head, rows, texts=("client", "state", "last"))
    left = len(seats) - len(shown)
    rest = translated("{clients} in /status.", clients=plural(left, "more client"))
    more = f'<p class="aside">{rest}</p>' if left else ""
    return f"<h3>{translated('Clients')}</h3>{body}{more}"


def _calm(seat: Mapping[str, Any]) -> bool:
    last = str(seat.get("last") or "accepted")
    troubled = seat.get("state") in _TROUBLE or seat.get("quarantined_seconds") is not None
    return not (troubled or not last.startswith("accepted"))


def _client(seat: Mapping[str, Any]) -> str:
    state = str(seat.get("state"))
    away = number(seat.get("quarantined_seconds"))
    quarantine = translated("in quarantine, {duration}", duration=duration(away))
    said = recorded(state) if away is None else quarantine
    mark = "quarantined" if away is not None else state.replace(" ", "-")
    name = text_of(seat.get("name")) or translated("client {name}", name=seat.get("client"))
    return (
        f'<tr data-key="{escape(seat.get("client"))}">'
        f'<th scope="row" class="text">{escape(name)}</th>'
        f'<td class="text"><span class="state {escape(mark)}">{escape(said)}</span></td>'
        f"<td>{count(number(seat.get('examples')))}</td><td>{count(number(seat.get('round')))}</td>"
        f"<td>{duration(number(seat.get('seconds_to_deadline')))}</td>"
        f'<td class="text said">{escape(recorded(str(seat.get("last") or UNKNOWN)))}</td></tr>'
    )


def _refusals(told: Mapping[str, Any]) -> str:
    newest = [one for one in listing(told.get("newest_refusals")) if isinstance(one, dict)]
    if not newest:
        return ""
    lines = "".join(
        f"<li>{escape(one.get('time'))}, {escape(_whose(one))}: {escape(one.get('kind'))}, "
        f"{escape(one.get('reason'))}</li>"
        for one in reversed(newest[-MOST_REFUSALS:])
    )
    return f'<h3>{translated("Refused last")}</h3><ul class="notes">{lines}</ul>'


def _whose(refusal: Mapping[str, Any]) -> str:
    client = refusal.get("client")
    if client is None:
        return str(refusal.get("address") or translated("a stranger"))
    return translated("client {name}", name=client)

"""Parse the "facts" in summary.json: reports of ranks and servers about themselves.

Any entry may be missing, as everywhere in a run folder; then the report shows less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dure.report.json_values import (
    listing,
    mapping,
    number,
    numbers,
    rows,
    text_of,
    whole,
    whole_number,
)
from dure.report.runs import (
    AssignmentSpan,
    BusySpan,
    ClientFacts,
    FederationCost,
    FederationFacts,
    LeakageFacts,
    MessageCounts,
    ParameterServerFacts,
    PartySpan,
    PresenceSpan,
    RankFacts,
    ShardFacts,
    SplitFacts,
    StageFacts,
    UpdateRecord,
)


def ranks_of(summary: Mapping[str, Any]) -> list[RankFacts]:
    """Return the ranks' facts; [] if any rank has none."""
    told = [mapping(facts) for facts in listing(summary.get("facts"))]
    workers = [mapping(worker) for worker in listing(summary.get("per_worker"))]
    # Facts and workers are matched by position: with one missing, all would be wrong.
    if len(told) != len(workers):
        return []
    ranks: list[RankFacts] = []
    for facts, worker in zip(told, workers, strict=True):
        rank = _rank(facts, worker, f"rank {len(ranks)}")
        if rank is None:
            return []
        ranks.append(rank)
    return ranks


def _rank(facts: Mapping[str, Any], worker: Mapping[str, Any], name: str) -> RankFacts | None:
    place = mapping(facts.get("at"))
    at = [number(place.get(axis)) for axis in ("data", "pipeline", "tensor")]
    # Facts without these keys are those of a federation's server.
    if None in at or not isinstance(facts.get("held"), dict):
        return None
    seconds = number(worker.get("inside_seconds"))
    steps = number(worker.get("inside_steps"))
    return RankFacts(
        name=str(worker.get("name", name)),
        at=(whole(at[0]), whole(at[1]), whole(at[2])),
        stages=[_stage(mapping(stage)) for stage in listing(facts.get("stages"))],
        held=numbers(facts["held"]),
        peak_memory=number(worker.get("peak_memory")) or None,
        # Per step; None if no layer is divided.
        layer_collective_seconds=seconds / steps if seconds and steps else None,
        schedule=text_of(facts.get("schedule")),
    )


def _stage(raw: Mapping[str, Any]) -> StageFacts:
    return StageFacts(
        number=whole(raw.get("stage")),
        begins=str(raw.get("begins", "")),
        parameters=whole(raw.get("parameters")),
        there=whole(raw.get("there")),
        back=whole(raw.get("back")),
    )


def federation_of(summary: Mapping[str, Any]) -> FederationFacts | None:
    """Return the facts of a federation's server; None for any other run."""
    facts = mapping(next(iter(listing(summary.get("facts"))), None))
    if not isinstance(facts.get("flights"), list):
        return None
    return FederationFacts(
        engine=text_of(facts.get("engine")),
        assignments=rows(facts["flights"], _assignment),
        outcomes=_by_name(facts.get("outcomes")),
        staleness=_by_number(facts.get("staleness")),
        turns=_by_number(facts.get("turns")),
        updates=rows(facts.get("updates"), _sent),
        by_client={
            str(metric): list(map(number, listing(values)))
            for metric, values in mapping(facts.get("by_client")).items()
        },
        why=text_of(facts.get("why")),
        refusals=_by_name(facts.get("refusals")),
        clients=[whole(client) for client in listing(facts.get("measured_clients"))],
        not_measured=dict(rows(facts.get("not_measured"), _client_and_reason)),
        out=[client for client, _ in rows(facts.get("out_of_transfers"), _pair)],
        there=rows(facts.get("there"), _presence),
        cohort=[_member(mapping(one)) for one in listing(facts.get("cohort"))],
        bits=text_of(facts.get("bits")),
        differs=_texts(facts.get("differs")),
        refused=_by_number(facts.get("refused_clients")),
        exposure=rows(facts.get("exposure"), _exposure),
        cost=_cost(mapping(facts.get("cost"))),
        left=_by_number(facts.get("left")),
        took_part=numbers(mapping(facts.get("took_part"))),
    )


def _cost(told: Mapping[str, Any]) -> FederationCost | None:
    raw = mapping(told.get("raw_data"))
    nbytes = number(told.get("bytes"))
    raw_bytes = number(raw.get("bytes"))
    raw_seconds = number(raw.get("seconds"))
    if nbytes is None or raw_bytes is None or raw_seconds is None:
        return None
    return FederationCost(
        nbytes=nbytes,
        joules=number(told.get("joules")),
        raw_bytes=raw_bytes,
        raw_seconds=raw_seconds,
        raw_joules=number(raw.get("joules")),
        break_even=number(told.get("break_even")),
    )


def _exposure(raw: Sequence[Any]) -> tuple[str, str]:
    who, what = raw
    return str(who), str(what)


def _presence(raw: Sequence[Any]) -> PresenceSpan:
    client, began, ended = raw
    first = number(began)
    last = number(ended)
    if first is None or last is None:
        raise ValueError("who was there came and went")
    return PresenceSpan(whole_number(client), first, last)


def _member(raw: Mapping[str, Any]) -> ClientFacts:
    machine = mapping(raw.get("machine"))
    said = [
        f"torch {machine['torch']}" if "torch" in machine else "",
        str(machine.get("capability", "")),
        f"{whole(machine.get('threads'))} threads" if "threads" in machine else "",
    ]
    client = whole(raw.get("client"))
    return ClientFacts(
        client=client,
        name=text_of(raw.get("name")) or str(client),
        examples=None if raw.get("examples") is None else whole(raw["examples"]),
        held_out=whole(raw.get("held_out")),
        machine=", ".join(filter(None, said)) or None,
        differs=_texts(raw.get("differs")),
    )


def _texts(raw: object) -> list[str]:
    return [str(one) for one in listing(raw)]


def _assignment(raw: Sequence[Any]) -> AssignmentSpan:
    # A later dure may write more entries; a row that is too short raises, and `rows` drops it.
    client, round, began, ended, outcome = raw[:5]
    first = number(began)
    last = number(ended)
    if first is None or last is None:
        raise ValueError("an assignment has a beginning and an end")
    return AssignmentSpan(
        whole_number(client), whole_number(round), began=first, ended=last, outcome=str(outcome)
    )


def _sent(raw: Sequence[Any]) -> UpdateRecord:
    round, client, lies, norm, cosine = raw
    return UpdateRecord(
        whole_number(round),
        whole_number(client),
        bool(lies),
        norm=number(norm),
        cosine=number(cosine),
    )


def servers_of(summary: Mapping[str, Any]) -> ParameterServerFacts | None:
    """Return the facts of a parameter server; None without one."""
    facts = mapping(next(iter(listing(summary.get("facts"))), None))
    told = mapping(facts.get("parameter_server"))
    if not isinstance(told.get("shards"), list):
        return None
    sizes = listing(told.get("shard_bytes"))
    owners = listing(told.get("owners"))
    shards = [
        [*listing(keys), _entry(sizes, place), _entry(owners, place)]
        for place, keys in enumerate(listing(told["shards"]))
    ]
    return ParameterServerFacts(
        shards=rows(shards, _held),
        staleness=_by_number(told.get("staleness")),
        counts=text_of(told.get("staleness_counts")) or "clocks",
        pushes=whole(told.get("pushes")),
        push_bytes=_sum(told.get("push_bytes")),
        lost=dict(rows(told.get("lost"), _lost)),
        busy=rows(told.get("spans"), _busy),
    )


def _entry(listed: Sequence[Any], place: int) -> Any:
    return listed[place] if place < len(listed) else None


def _sum(raw: object) -> int | None:
    """Return the sum of a list of counts; None for a malformed list."""
    counts = listing(raw)
    if not counts or any(number(one) is None for one in counts):
        return None
    return sum(map(whole, counts))


def _lost(raw: Sequence[Any]) -> tuple[str, str]:
    name, why = raw
    return str(name), str(why)


def _held(raw: Sequence[Any]) -> ShardFacts:
    vector, start, stop, nbytes, owner = raw
    return ShardFacts(
        whole_number(vector),
        whole_number(start),
        whole_number(stop),
        nbytes=None if number(nbytes) is None else whole(nbytes),
        owner=None if number(owner) is None else whole(owner),
    )


def _busy(raw: Sequence[Any]) -> BusySpan:
    who, category, began, seconds, clock = raw
    first = number(began)
    length = number(seconds)
    if first is None or length is None or length < 0:
        raise ValueError("what took time has a beginning and a length")
    return BusySpan(
        str(who),
        category=str(category),
        began=first,
        seconds=length,
        clock=None if number(clock) is None else whole(clock),
    )


def divided_of(summary: Mapping[str, Any]) -> SplitFacts | None:
    """Return the facts of split learning; None if no model was cut."""
    facts = mapping(next(iter(listing(summary.get("facts"))), None))
    told = mapping(facts.get("split"))
    at = [one for one in listing(told.get("at")) if isinstance(one, str)]
    if not at:
        return None
    formulas = mapping(told.get("formulas"))
    return SplitFacts(
        at=at,
        shares=[share for raw in listing(told.get("shares")) if (share := number(raw)) is not None],
        weights=list(map(whole, listing(told.get("weights")))),
        examples=whole(told.get("examples")),
        flops=number(told.get("flops")),
        first=rows(told.get("first"), _doing),
        newest=rows(told.get("newest"), _doing),
        round=whole(told.get("round")),
        sorts=[one._replace(formula=_known(formulas, one.kind)) for one in _sorts(told)],
    )


def _sorts(told: Mapping[str, Any]) -> list[MessageCounts]:
    return rows(told.get("kinds"), _sort)


def _sort(raw: Sequence[Any]) -> MessageCounts:
    kind, *counts = raw
    messages, nbytes, largest = map(whole_number, counts)
    return MessageCounts(str(kind), messages, nbytes, largest, formula=None)


def _known(formulas: Mapping[str, Any], kind: str) -> int | None:
    return whole(formulas[kind]) if number(formulas.get(kind)) else None


def _doing(raw: Sequence[Any]) -> PartySpan:
    who, what, began, seconds = raw
    first = number(began)
    length = number(seconds)
    if first is None or length is None or length < 0:
        raise ValueError("what took time has a beginning and a length")
    return PartySpan(str(who), str(what), first, length)


def leakage_of(summary: Mapping[str, Any]) -> LeakageFacts | None:
    """Return the leakage facts of split learning; None if the run has none."""
    facts = mapping(next(iter(listing(summary.get("facts"))), None))
    told = mapping(facts.get("leakage"))
    exposure = text_of(told.get("exposure"))
    if exposure is None:
        return None
    defence = text_of(told.get("defence")) or "none"
    return LeakageFacts(defence, exposure, numbers(mapping(told.get("measured"))))


def promises_of(summary: Mapping[str, Any]) -> Sequence[Any]:
    """Return the run's differential-privacy promises, a mapping each (`PrivacyGuarantee.facts`)."""
    facts = mapping(next(iter(listing(summary.get("facts"))), None))
    return listing(facts.get("promises"))


def _by_name(raw: object) -> dict[str, int]:
    """Return counts by name."""
    return {str(key): whole(value) for key, value in mapping(raw).items()}


def _by_number(raw: object) -> dict[int, int]:
    """Return counts by number, from pairs: keys of JSON are texts."""
    return dict(rows(raw, _pair))


def _pair(raw: Sequence[Any]) -> tuple[int, int]:
    key, value = raw
    return whole_number(key), whole_number(value)


def _client_and_reason(raw: Sequence[Any]) -> tuple[int, str]:
    client, reason, _ = raw
    return whole_number(client), str(reason)

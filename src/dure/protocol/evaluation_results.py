"""Merging of the measurements of single clients into one message."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dure.protocol.messages import EvaluationResults


def merge_evaluations(said: Sequence[EvaluationResults]) -> EvaluationResults:
    """Merge measurements into one message, sorted by client.

    The messages `said` may arrive in any order. A client that occurs in two messages counts as in
    the first. The result has sums for a metric only if every message with this metric has sums of
    the same form.
    """
    rows: dict[int, tuple[EvaluationResults, int]] = {}
    failures: dict[int, str] = {}
    for one in said:
        for place, client in enumerate(one.clients):
            rows.setdefault(client, (one, place))
        for client, reason in one.failures.items():
            failures.setdefault(client, reason)
    clients = sorted(rows)
    values: dict[str, list[float]] = {}
    examples: dict[str, list[int]] = {}
    sums: dict[str, list[list[float]]] = {}
    forms: dict[str, str] = {}
    for name in dict.fromkeys(name for one in said for name in one.values):
        values[name] = [_at(*rows[client], name) for client in clients]
        examples[name] = [_count_at(*rows[client], name) for client in clients]
        have = [one for one in said if name in one.values]
        told = {one.forms.get(name) for one in have if name in one.sums}
        if all(name in one.sums for one in have) and len(told) == 1:
            sums[name] = [_sums_at(*rows[client], name) for client in clients]
            forms[name] = told.pop() or ""
    return EvaluationResults(clients, values, examples, sums, forms, dict(sorted(failures.items())))


def _at(one: EvaluationResults, place: int, name: str) -> float:
    told = one.values.get(name, [])
    return told[place] if place < len(told) else math.nan


def _count_at(one: EvaluationResults, place: int, name: str) -> int:
    told = one.examples.get(name, [])
    return told[place] if place < len(told) else 0


def _sums_at(one: EvaluationResults, place: int, name: str) -> list[float]:
    told = one.sums.get(name, [])
    return told[place] if place < len(told) else []

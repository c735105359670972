"""Event log of a federation, for the report.

The log records participation, staleness, and the geometry of updates.

Norms and cosines compare every update, as the rule got it, with the following step of the global
model: of trained weights, without buffers. They are measured only in runs with malicious clients,
because they take two passes over each update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.federated.server.combining import RoundResult
from dure.protocol.carrier import STEP, AssignmentRecord

MOST = 5_000
"""Largest number of recorded assignments and of recorded updates, the first of a run.

Counters cover the whole run.
"""


class Log:
    """Record of a run for its report.

    liars: returns the malicious clients of a round; None without malicious clients. names: whether
    participation is recorded. It is not recorded if differential privacy depends on secret
    sampling.
    """

    def __init__(self, liars: Callable[[int], Collection[int]] | None, names: bool = True) -> None:
        self.liars = liars
        self.names = names
        self.flights: list[list[Any]] = []
        self.outcomes: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.turns: Counter[int] = Counter()
        self.refusals: Counter[str] = Counter()
        self.wrong: Counter[int] = Counter()
        self.updates: list[list[Any]] = []
        self._seen: list[tuple[int, int, list[Tensor] | None]] = []

    def saw(self, client: int, round: int, taken: list[Tensor] | None) -> None:
        """Record an update, from the model with this number; None for a refused update."""
        # The whole update, until `moved`: the step for the comparison is not known before.
        if self.liars is not None and len(self.updates) < MOST:
            self._seen.append((client, round, taken))

    def flew(self, flown: Sequence[AssignmentRecord], result: RoundResult) -> None:
        """Record the events before a new model, and the statistics of its updates."""
        flown = [flight for flight in flown if flight.outcome != STEP]
        self.outcomes.update([flight.outcome for flight in flown])
        self.staleness.update(result.staleness)
        self.refusals.update(result.refused.values())
        if not self.names:
            return
        self.turns.update(result.clients)
        self.wrong.update(result.wrong)
        # The counters above continue; lists of a long run would grow without bound.
        for flight in flown[: MOST - len(self.flights)]:
            # To a microsecond, which is enough for a plot.
            began = round(flight.began, 6)
            ended = round(flight.ended, 6)
            self.flights.append([flight.client, flight.round, began, ended, flight.outcome])

    def moved(self, number: int, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Record norm and cosine of each update against the following step of the global model.

        The step is from model `number` to the next; before and after are its weights.
        """
        if self.liars is None or not self._seen:
            return
        # In float64: at the end of training a step is small compared with the weights.
        step = [_wide(new) - _wide(old) for new, old in zip(after, before, strict=True)]
        for client, round, taken in self._seen:
            lies = client in self.liars(round)
            measured = (None, None) if taken is None else _norm_and_cosine(taken, step)
            self.updates.append([number, client, lies, *measured])
        self._seen = []

    def facts(self) -> dict[str, Any]:
        """Return the record, as JSON."""
        return {
            "flights": self.flights,
            "outcomes": dict(self.outcomes),
            "refusals": dict(self.refusals),
            "staleness": sorted(self.staleness.items()),
            "turns": sorted(self.turns.items()),
            "refused_clients": sorted(self.wrong.items()),
            "updates": self.updates,
        }

    def state(self) -> dict[str, Any]:
        return {
            "flights": list(self.flights),
            "updates": list(self.updates),
            "outcomes": dict(self.outcomes),
            "staleness": dict(self.staleness),
            "turns": dict(self.turns),
            "refusals": dict(self.refusals),
            "wrong": dict(self.wrong),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.flights = list(state["flights"])
        self.updates = list(state["updates"])
        self.outcomes = Counter(state["outcomes"])
        self.staleness = Counter(state["staleness"])
        self.turns = Counter(state["turns"])
        self.refusals = Counter(state["refusals"])
        # Checkpoints of dure up to 0.1 do not have this count.
        self.wrong = Counter(state.get("wrong", {}))


def _norm_and_cosine(
    delta: Sequence[Tensor], step: Sequence[Tensor]
) -> tuple[float | None, float | None]:
    """Return the update's norm, and its cosine with the step; None if undefined."""
    delta = [_wide(part) for part in delta]
    dot = sum(float(torch.dot(d, s)) for d, s in zip(delta, step, strict=True))
    norm = math.sqrt(sum(float(torch.dot(d, d)) for d in delta))
    length = math.sqrt(sum(float(torch.dot(s, s)) for s in step))
    # Malicious clients may send infinities, which JSON cannot represent.
    if not math.isfinite(norm):
        return None, None
    return norm, dot / (norm * length) if norm and length else None


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor flat and in float64; a complex number becomes two real numbers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).double()

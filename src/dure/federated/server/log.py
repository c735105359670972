"""What the report tells of a federation.

It tells who took part when, how stale updates were, and how they lay to one another.

Norms and cosines are of every update, as the rule got it, against the step that the global model
then took: of trained weights, without buffers. They are measured only where clients lie, since that
takes two passes over each update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.federated.server.combining import Result
from dure.protocol.carrier import STEP, Flight

MOST = 5_000
"""Flights and updates that are remembered, the first ones of a run.

What is counted is counted to its end.
"""


class Log:
    """What is remembered of a run for its report.

    liars: who lies in a round; None where nobody does. names: whether it is remembered who took
    part. It is not where differential privacy counts on that nobody knows whose coins fell how.
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
        """An update of a client, from the model of this number; None for one that was refused."""
        # The whole update, until `moved`: the step that it is compared with is not known before.
        if self.liars is not None and len(self.updates) < MOST:
            self._seen.append((client, round, taken))

    def flew(self, flown: Sequence[Flight], result: Result) -> None:
        """What happened until a new model was made, and what it was made of."""
        flown = [flight for flight in flown if flight.outcome != STEP]
        self.outcomes.update([flight.outcome for flight in flown])
        self.staleness.update(result.staleness)
        self.refusals.update(result.refused.values())
        if not self.names:
            return
        self.turns.update(result.clients)
        self.wrong.update(result.wrong)
        # Counters above go on; lists of a long run would grow without bound.
        for flight in flown[: MOST - len(self.flights)]:
            # To a microsecond, which is enough for a picture.
            began = round(flight.began, 6)
            ended = round(flight.ended, 6)
            self.flights.append([flight.client, flight.round, began, ended, flight.outcome])

    def moved(self, number: int, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """How the updates that were seen lay to the step that the global model then took.

        The step is from model `number` to the next one, whose weights were these before and after.
        """
        if self.liars is None or not self._seen:
            return
        # In float64: at the end of training a step is small against the weights it is the
        # difference of.
        step = [_wide(new) - _wide(old) for new, old in zip(after, before, strict=True)]
        for client, round, taken in self._seen:
            lies = client in self.liars(round)
            measured = (None, None) if taken is None else _norm_and_cosine(taken, step)
            self.updates.append([number, client, lies, *measured])
        self._seen = []

    def facts(self) -> dict[str, Any]:
        """What was remembered, as JSON."""
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
        # Checkpoints of dure up to 0.1 have not counted them.
        self.wrong = Counter(state.get("wrong", {}))


def _norm_and_cosine(
    delta: Sequence[Tensor], step: Sequence[Tensor]
) -> tuple[float | None, float | None]:
    """The update's norm, and the cosine between it and the step; None where there is none."""
    delta = [_wide(part) for part in delta]
    dot = sum(float(torch.dot(d, s)) for d, s in zip(delta, step, strict=True))
    norm = math.sqrt(sum(float(torch.dot(d, d)) for d in delta))
    length = math.sqrt(sum(float(torch.dot(s, s)) for s in step))
    # Liars may send infinities, which JSON cannot say.
    if not math.isfinite(norm):
        return None, None
    return norm, dot / (norm * length) if norm and length else None


def _wide(tensor: Tensor) -> Tensor:
    """In float64 and flat; a complex number is two real ones, as rules see it."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).double()

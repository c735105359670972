"""How long a schedule takes, and what it holds: its actions run with given times, on no machine.

A rank does its actions one after another. A message is there `send` seconds after it was sent,
whatever the ranks do meanwhile, and a receive waits for it:

    start(a)     = end of the action before it on its rank
    end(a)       = start(a) + time(a), if a computes
    end(receive) = max(start(receive), end(its send) + send)

    bubble            = 1 - busy / (p · makespan)     the share of the ranks' time that is idle
    idle_over_busy    = bubble / (1 - bubble)         the same over the time in which they compute
    bubble_over_ideal = (makespan - ideal) / ideal    ideal: the computing of the rank that computes
                                                      longest

A forward's activations are held from its start until its backward, or its weight gradient, has
ended. With the times of a measured run, action by action, this gives what that run would have been
without disturbances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dure.parallel.pipeline.schedule import RECEIVES, SENDS, Action, Kind, Schedule
from dure.parallel.pipeline.validate import running_order
from dure.record.idleness import over_busy


class Span(NamedTuple):
    """An action that computed, with its rank, from start to end in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Times:
    """Seconds of each stage's actions, and of a message, which occupies no rank.

    measured: of single actions; these go before all others.

    backward is not used where input and weight gradients are apart, and the other way round. A
    receive takes no time but waiting, unless it is measured; of a send it is what its message takes
    that is measured.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    send: float = 0.0
    measured: Mapping[Action, float] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls, stages: int, forward: float = 1, backward: float = 2, send: float = 0
    ) -> Times:
        """All stages alike; input and weight gradients are half a backward each."""
        half = (backward / 2,) * stages
        return cls(
            forward=(forward,) * stages,
            backward=(backward,) * stages,
            input_gradient=half,
            weight_gradient=half,
            send=send,
        )

    @property
    def computing(self) -> dict[Kind, tuple[float, ...]]:
        """Seconds by kind of action, for each stage."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "input_gradient": self.input_gradient,
            "weight_gradient": self.weight_gradient,
        }

    def of(self, action: Action) -> float:
        """Seconds of an action: on its rank, or of a send until its message is there."""
        # What was measured of this very action goes before the times of its stage.
        if action in self.measured:
            return self.measured[action]
        if action.kind in SENDS:
            return self.send
        if action.kind in RECEIVES:
            return 0.0
        return self.computing[action.kind][action.stage]


@dataclass(frozen=True)
class Simulation:
    """What came of it, or of a measured run.

    spans: of the actions that compute. peak_activations: of each rank, the most forwards, of one
    stage and one micro-batch each, whose activations were held at once.
    """

    ranks: int
    spans: tuple[Span, ...]
    peak_activations: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank computes."""
        seconds = [0.0] * self.ranks
        for span in self.spans:
            seconds[span.rank] += span.end - span.start
        return tuple(seconds)

    @property
    def ideal(self) -> float:
        """Seconds that it would take if the rank that computes longest never waited."""
        return max(self.busy)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they are idle."""
        return 1 - sum(self.busy) / (self.ranks * self.makespan) if self.makespan else 0.0

    @property
    def idle_over_busy(self) -> float | None:
        """Seconds in which the ranks are idle, over those in which they compute."""
        return over_busy(self.bubble)

    @property
    def bubble_over_ideal(self) -> float:
        """Seconds more than `ideal`, as a share of it."""
        return (self.makespan - self.ideal) / self.ideal if self.ideal else 0.0


def simulate(schedule: Schedule, times: Times) -> Simulation:
    """Runs a schedule that `check` has passed.

    Raises ScheduleError at a deadlock, and ValueError if times are missing.
    """
    for kind, seconds in times.computing.items():
        if len(seconds) != schedule.stages:
            raise ValueError(
                f"times of {len(seconds)} stages for {kind}, and there are {schedule.stages}: give "
                "one for each"
            )
    clocks = [0.0] * schedule.ranks
    arrivals: dict[Action, float] = {}
    spans = []
    # In an order that can happen, so each send comes before its receive, and one walk is enough.
    for rank, action in running_order(schedule):
        if action.kind in SENDS:
            # A send takes none of the rank's time.
            arrivals[action] = clocks[rank] + times.of(action)
            continue
        start = clocks[rank]
        if action.kind in RECEIVES:
            start = max(start, arrivals[action.counterpart])
        clocks[rank] = start + times.of(action)
        if action.computes:
            spans.append(Span(rank, action, start, clocks[rank]))
    # by time, whichever rank was walked first
    spans.sort(key=lambda span: (span.start, span.rank))
    return Simulation(schedule.ranks, tuple(spans), tuple(map(peak_of, schedule.actions)))


def peak_of(actions: Sequence[Action]) -> int:
    """The most activations that a rank holds at once."""
    held = most = 0
    for action in actions:
        held += action.kind == "forward"
        # A backward frees its activations; an input gradient leaves them for the weight gradient.
        most = max(most, held)
        held -= action.kind in ("backward", "weight_gradient")
    return most

"""Simulation of a schedule with given times of actions: duration, idle time and stored activations.

A rank executes its actions one after another. A message arrives `send` seconds after it was sent,
independently of the ranks' work, and a receive waits for its message:

    start(a)     = end of the preceding action on the rank
    end(a)       = start(a) + time(a), if a computes
    end(receive) = max(start(receive), end(its send) + send)

    bubble            = 1 - busy / (p · makespan)     the share of the ranks' time that is idle
    idle_over_busy    = bubble / (1 - bubble)         idle time over computing time
    bubble_over_ideal = (makespan - ideal) / ideal    ideal: the computing time of the rank that
                                                      computes longest

A forward's activations are stored from its start until the end of its backward, or of its weight
gradient. With the times of a measured run, action by action, the simulation shows that run without
disturbances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dure.parallel.pipeline.schedule import RECEIVES, SENDS, Action, Kind, Schedule
from dure.parallel.pipeline.validate import running_order
from dure.record.idleness import over_busy


class ActionSpan(NamedTuple):
    """Action that computed, with its rank, from start to end in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Times:
    """Seconds of each stage's actions, and of a message, which occupies no rank.

    `backward` is used only if input and weight gradients are not separate, and `input_gradient` and
    `weight_gradient` only if they are. A receive takes no time but waiting, unless it is measured.
    The measured time of a send is the time until its message arrives.

    Args:
        forward: seconds of a forward, by stage.
        backward: seconds of a backward, by stage.
        input_gradient: seconds of an input gradient, by stage.
        weight_gradient: seconds of a weight gradient, by stage.
        send: seconds from a send until its message arrives.
        measured: seconds of single actions, which override all others.
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
        """Return equal times for all stages, with half a backward for each kind of gradient."""
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
        """Return the seconds of an action on its rank; of a send, until the message arrives."""
        # A measured time of this action overrides the times of its stage.
        if action in self.measured:
            return self.measured[action]
        if action.kind in SENDS:
            return self.send
        if action.kind in RECEIVES:
            return 0.0
        return self.computing[action.kind][action.stage]


@dataclass(frozen=True)
class ScheduleSimulation:
    """Result of a simulation, or of a measured run.

    spans: spans of the actions that compute. peak_activations: for each rank, the largest number of
    forwards (of a stage and a micro-batch each) whose activations were stored at the same time.
    """

    ranks: int
    spans: tuple[ActionSpan, ...]
    peak_activations: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the start of the first action to the end of the last action."""
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
        """Seconds that the schedule would take if the rank that computes longest never waited."""
        return max(self.busy)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they are idle."""
        return 1 - sum(self.busy) / (self.ranks * self.makespan) if self.makespan else 0.0

    @property
    def idle_over_busy(self) -> float | None:
        """Idle seconds of all ranks, over their computing seconds."""
        return over_busy(self.bubble)

    @property
    def bubble_over_ideal(self) -> float:
        """Seconds above `ideal`, as a share of `ideal`."""
        return (self.makespan - self.ideal) / self.ideal if self.ideal else 0.0


def simulate(schedule: Schedule, times: Times) -> ScheduleSimulation:
    """Simulate a schedule that has passed `check`.

    Raises ScheduleError at a deadlock, and ValueError if times are missing.
    """
    for kind, seconds in times.computing.items():
        if len(seconds) != schedule.stages:
            raise ValueError(
                f"there are times of {len(seconds)} stages for {kind}, but {schedule.stages} "
                "stages: give one for each"
            )
    clocks = [0.0] * schedule.ranks
    arrivals: dict[Action, float] = {}
    spans = []
    # `running_order` puts each send before its receive, so that a single pass is enough.
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
            spans.append(ActionSpan(rank, action, start, clocks[rank]))
    # by time, independent of the order of ranks in the loop
    spans.sort(key=lambda span: (span.start, span.rank))
    return ScheduleSimulation(schedule.ranks, tuple(spans), tuple(map(peak_of, schedule.actions)))


def peak_of(actions: Sequence[Action]) -> int:
    """Return the largest number of activations that a rank stores at the same time."""
    held = most = 0
    for action in actions:
        held += action.kind == "forward"
        # A backward frees its activations; an input gradient leaves them for the weight gradient.
        most = max(most, held)
        held -= action.kind in ("backward", "weight_gradient")
    return most

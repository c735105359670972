"""FedAvg: rounds of clients, with stragglers, under the virtual clock.

The picture shows the assignments of `dure.worlds.simulated`, as the coordinator sends them: a
client downloads the model, trains, and uploads its update. A round ends when all clients have
answered, or at a deadline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dure.drawing.lanes import LaneArrow, LanePanel, LaneSpan, lanes_picture
from dure.drawing.options import FedAvgDrawing
from dure.drawing.picture import Picture
from dure.drawing.virtual_run import check_counts, conditions_of, context_of, random_task
from dure.federated.algorithms.fed_avg import FedAvg
from dure.federated.server.sampling import parse
from dure.fleet.conditions import Conditions
from dure.protocol.carrier import STEP, AssignmentRecord, Clients, Combine, CoordinatorProtocol
from dure.worlds.simulated import FederationSimulation, Simulated

_EXAMPLES = 16
"""Examples of a client."""


class RecordedFederation(FederationSimulation):
    """Simulation that stores the assignments of all rounds."""

    def __init__(self, conditions: Conditions, clients: Clients, seed: int) -> None:
        super().__init__(conditions, clients, seed)
        self.assignments: list[AssignmentRecord] = []
        self.models: list[float] = []

    def carry(self, coordinator: CoordinatorProtocol) -> Combine:
        combine = super().carry(coordinator)
        # The server empties the list after every model.
        self.assignments += [one for one in self.flown if one.outcome != STEP]
        self.models.append(self.now)
        return combine


@dataclass(frozen=True)
class FedAvgRounds:
    """Rounds of FedAvg: their panel, the share in which clients wait, and late updates."""

    panel: LanePanel
    waiting: float
    late: int


def fed_avg_rounds(how: FedAvgDrawing) -> FedAvgRounds:
    """Simulate rounds in which all clients take part."""
    check_counts(24, clients=how.clients, rounds=how.rounds)
    clients, deadline = how.clients, how.deadline
    if deadline is not None and not (math.isfinite(deadline) and deadline > 0):
        raise ValueError(f"--deadline is {deadline:g}: give a time above 0")
    selection = "uniform" if deadline is None else f"uniform:1:{deadline:g}:1"
    strategy = FedAvg(clients=clients, batch_size=_EXAMPLES, selection=parse(selection))
    task = random_task(_EXAMPLES * clients)
    strategy.check(task, Simulated())
    conditions = conditions_of(
        clients, _EXAMPLES, how.transfer, how.slow, how.factor, federated=True
    )
    made: list[RecordedFederation] = []

    def carrier(sides: Clients, seed: int) -> RecordedFederation:
        made.append(RecordedFederation(conditions, sides, seed))
        return made[-1]

    learner = strategy.learner(task, context_of(conditions, carrier), 0)
    for _ in range(how.rounds):
        learner.advance(0)
    simulation = made[0]
    end = simulation.models[-1]
    spans = []
    arrows = []
    names = tuple(f"client {number}" for number in range(clients))
    begun = 0.0
    for number, over in enumerate(simulation.models):
        spans.append(LaneSpan("server", "s", begun, over, f"round {number}"))
        begun = over
    busy = 0.0
    for one in simulation.assignments:
        device = conditions.devices.of(one.client, 0)
        name = names[one.client]
        received = one.began + one.down / device.down
        trained = received + one.compute_seconds
        late = " late" if one.outcome == "late" else ""
        spans += [
            LaneSpan(name, "c", one.began, min(received, end)),
            LaneSpan(name, "f", received, min(trained, end), f"train{late}"),
        ]
        arrows.append(LaneArrow("server", name, "c", one.began, received))
        if trained < end:
            spans.append(LaneSpan(name, "c", trained, min(one.ended, end)))
            arrows.append(LaneArrow(name, "server", "b", trained, min(one.ended, end)))
        busy += min(one.ended, end) - one.began
    late_count = sum(one.outcome == "late" for one in simulation.assignments)
    rule = "waits for all" if deadline is None else f"deadline {deadline:g}"
    panel = LanePanel("", ("server", *names), tuple(spans), tuple(arrows), names, end)
    waiting = panel.waiting_share()
    title = f"{rule}: clients wait for {100 * waiting:.1f} % of the time, {end:.4g} units"
    if deadline is not None:
        title += f", {late_count} late update{'s' * (late_count != 1)}"
    return FedAvgRounds(replace(panel, title=title), waiting, late_count)


def fed_avg_picture(how: FedAvgDrawing, width: int = 100) -> Picture:
    """Draw rounds without and, if it is given, with a deadline. width: columns of a terminal."""
    drawn = [fed_avg_rounds(replace(how, deadline=None))]
    if how.deadline is not None:
        drawn.append(fed_avg_rounds(how))
    figures = (
        f"{how.clients} clients, {how.slow} of them {how.factor:g} times slower; a client trains "
        f"for 1, a transfer of the model takes {how.transfer:g}."
    )
    legend = [
        ("s", "round of the server"),
        ("f", "local training"),
        ("c", "model down"),
        ("b", "update up"),
        ("idle", "idle"),
    ]
    caption = [
        "The server sends the model, clients train on their data, and the server averages their "
        "updates. Without a deadline the slowest client ends the round.",
    ]
    panels = [one.panel for one in drawn]
    return lanes_picture("FedAvg", figures, legend, panels, caption, width)

"""Parameter server: gradients of workers, messages, and waiting, under the virtual clock.

The picture shows one round of `dure.parameter_server.simulated`, whose state machines are those of
real servers and workers. All workers are equally fast, except the slow workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dure.drawing.lanes import LaneArrow, LanePanel, LaneSpan, lanes_picture
from dure.drawing.options import ParameterServerDrawing
from dure.drawing.picture import Picture
from dure.drawing.virtual_run import (
    advanced,
    check_counts,
    conditions_of,
    context_of,
    random_task,
    recorded_transmissions,
)
from dure.fleet.virtual_network import Transmission
from dure.parameter_server.simulated import SimulatedParameterServer
from dure.parameter_server.strategy import ParameterServer
from dure.worlds.simulated import Simulated

_EXAMPLES = 8
"""Examples of a worker's part of a batch."""

LEGEND = [
    ("f", "compute: forward and backward"),
    ("b", "gradients pushed"),
    ("c", "weights pulled"),
    ("idle", "idle"),
]
"""Classes of servers and workers."""


@dataclass(frozen=True)
class ServerRound:
    """Round of servers and workers: its panel, and the figures that the learner reports."""

    panel: LanePanel
    waiting: float
    staleness: float
    seconds: float


def message_arrows(found: Sequence[Transmission]) -> tuple[list[LaneSpan], list[LaneArrow]]:
    """Return the spans of busy worker links, and an arrow for each message."""
    spans = []
    arrows = []
    for one in found:
        kind = "b" if type(one.message).__name__ == "Push" else "c"
        arrows.append(LaneArrow(one.sender, one.receiver, kind, one.left, one.there))
        if one.sender.startswith("worker"):
            spans.append(LaneSpan(one.sender, "c", one.left, one.gone))
        if one.receiver.startswith("worker"):
            spans.append(LaneSpan(one.receiver, "c", one.arriving, one.there))
    return spans, arrows


def server_round(staleness: int | None, how: ParameterServerDrawing) -> ServerRound:
    """Simulate a round. staleness: bound of this run; None is unbounded."""
    check_counts(16, workers=how.workers, servers=how.servers, steps=how.steps)
    strategy = ParameterServer(
        servers=how.servers,
        workers=how.workers,
        batch_size=_EXAMPLES * how.workers,
        staleness=staleness,
        period=how.steps,
    )
    task = random_task(_EXAMPLES * how.workers * how.steps)
    strategy.check(task, Simulated())
    conditions = conditions_of(how.workers, _EXAMPLES, how.transfer, how.slow, how.factor)
    learner = strategy.learner(task, context_of(conditions), 0)
    assert isinstance(learner, SimulatedParameterServer)
    found = recorded_transmissions(learner.virtual.network)
    numbers = advanced(learner)
    spans, arrows = message_arrows(found)
    for name, category, began, seconds, clock in learner.spans:
        if category == "compute":
            spans.append(LaneSpan(name, "f", began, began + seconds, f"step {clock}"))
    names = tuple(f"worker {number}" for number in range(how.workers))
    end = float(numbers["virtual_seconds"])
    mode = {0: "synchronous", None: "asynchronous"}.get(staleness, "bounded staleness")
    bound = "" if staleness is None else f", staleness {staleness}"
    title = (
        f"{mode}{bound}: workers do not compute for {100 * numbers['waiting']:.1f} % of the time, "
        f"mean staleness {numbers['staleness']:.2f}, {end:.4g} units"
    )
    lanes = (*(f"server {number}" for number in range(how.servers)), *names)
    panel = LanePanel(title, lanes, tuple(spans), tuple(arrows), names, end)
    return ServerRound(panel, float(numbers["waiting"]), float(numbers["staleness"]), end)


def parameter_server_picture(
    staleness: Sequence[int | None], how: ParameterServerDrawing, width: int = 100
) -> Picture:
    """Draw a round for each staleness. width: columns of a terminal."""
    rounds = [server_round(bound, how) for bound in staleness]
    figures = (
        f"{how.workers} workers, {how.slow} of them {how.factor:g} times slower; {how.steps} "
        f"steps; a gradient takes 1, a message with all weights {how.transfer:g}."
    )
    caption = [
        "A worker pulls weights, computes a gradient of its part of the batch, and pushes it. "
        "A run of the servers and workers under the virtual clock.",
    ]
    panels = [one.panel for one in rounds]
    return lanes_picture("Parameter server", figures, LEGEND, panels, caption, width)

"""Parameter server: gradients of workers, messages, and waiting, under the virtual clock.

The picture shows one round of `dure.parameter_server.simulated`, whose state machines are those of
real servers and workers. All workers are equally fast, except the slow workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dure.drawing.lanes import LaneArrow, LanePanel, LaneSpan, lanes_picture
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


def server_round(
    staleness: int | None,
    workers: int = 3,
    servers: int = 1,
    steps: int = 4,
    transfer: float = 0.2,
    slow: int = 1,
    factor: float = 2.0,
) -> ServerRound:
    """Simulate a round.

    Args:
        staleness: steps by which a worker may be ahead of the slowest; None is unbounded.
        workers: number of workers.
        servers: number of servers.
        steps: steps of the round.
        transfer: units of time of a message with all weights.
        slow: number of slow workers.
        factor: slowness of these workers.
    """
    check_counts(16, workers=workers, servers=servers, steps=steps)
    strategy = ParameterServer(
        servers=servers,
        workers=workers,
        batch_size=_EXAMPLES * workers,
        staleness=staleness,
        period=steps,
    )
    task = random_task(_EXAMPLES * workers * steps)
    strategy.check(task, None)
    conditions = conditions_of(workers, _EXAMPLES, transfer, slow, factor)
    learner = strategy.learner(task, context_of(conditions), 0)
    assert isinstance(learner, SimulatedParameterServer)
    found = recorded_transmissions(learner.virtual.network)
    numbers = advanced(learner)
    spans, arrows = message_arrows(found)
    for name, category, began, seconds, clock in learner.spans:
        if category == "compute":
            spans.append(LaneSpan(name, "f", began, began + seconds, f"step {clock}"))
    names = tuple(f"worker {number}" for number in range(workers))
    end = float(numbers["virtual_seconds"])
    mode = {0: "synchronous", None: "asynchronous"}.get(staleness, "bounded staleness")
    bound = "" if staleness is None else f", staleness {staleness}"
    title = (
        f"{mode}{bound}: workers do not compute for {100 * numbers['waiting']:.1f} % of the time, "
        f"mean staleness {numbers['staleness']:.2f}, {end:.4g} units"
    )
    lanes = (*(f"server {number}" for number in range(servers)), *names)
    panel = LanePanel(title, lanes, tuple(spans), tuple(arrows), names, end)
    return ServerRound(panel, float(numbers["waiting"]), float(numbers["staleness"]), end)


def parameter_server_picture(
    staleness: Sequence[int | None] = (0, None),
    workers: int = 3,
    servers: int = 1,
    steps: int = 4,
    transfer: float = 0.2,
    slow: int = 1,
    factor: float = 2.0,
    width: int = 100,
) -> Picture:
    """Draw a round for each staleness. The other arguments are those of `server_round`.

    width: columns of a terminal.
    """
    rounds = [
        server_round(bound, workers, servers, steps, transfer, slow, factor) for bound in staleness
    ]
    figures = (
        f"{workers} workers, {slow} of them {factor:g} times slower; {steps} steps; a gradient "
        f"takes 1, a message with all weights {transfer:g}."
    )
    caption = [
        "A worker pulls weights, computes a gradient of its part of the batch, and pushes it. "
        "A run of the servers and workers under the virtual clock.",
    ]
    panels = [one.panel for one in rounds]
    return lanes_picture("Parameter server", figures, LEGEND, panels, caption, width)

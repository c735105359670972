"""Downpour SGD: replicas with data of their own, which push and fetch at their own pace.

The picture shows one round of `dure.parameter_server.simulated_replicas`, under the virtual clock.
"""

from __future__ import annotations

from dure.drawing.lanes import LanePanel, LaneSpan, lanes_picture
from dure.drawing.options import DownpourDrawing
from dure.drawing.parameter_server import LEGEND, ServerRound, message_arrows
from dure.drawing.picture import Picture
from dure.drawing.virtual_run import (
    advanced,
    check_counts,
    conditions_of,
    context_of,
    random_task,
    recorded_transmissions,
)
from dure.parameter_server.downpour import Downpour
from dure.parameter_server.simulated_replicas import SimulatedReplicas
from dure.worlds.simulated import Simulated

_EXAMPLES = 8
"""Examples of a replica's batch."""


def downpour_round(how: DownpourDrawing) -> ServerRound:
    """Simulate a round."""
    check_counts(
        24,
        fetch_every=how.fetch_every,
        push_every=how.push_every,
        replicas=how.replicas,
        servers=how.servers,
        steps=how.steps,
    )
    strategy = Downpour(
        replicas=how.replicas,
        servers=how.servers,
        batch_size=_EXAMPLES,
        fetch_every=how.fetch_every,
        push_every=how.push_every,
        period=how.steps,
    )
    task = random_task(_EXAMPLES * how.replicas * how.steps)
    strategy.check(task, Simulated())
    conditions = conditions_of(how.replicas, _EXAMPLES, how.transfer, how.slow, how.factor)
    learner = strategy.learner(task, context_of(conditions), 0)
    assert isinstance(learner, SimulatedReplicas)
    found = recorded_transmissions(learner.virtual.network)
    numbers = advanced(learner)
    spans, arrows = message_arrows(found)
    for name, began, seconds, step in learner.computations:
        spans.append(LaneSpan(name, "f", began, began + seconds, f"step {step}"))
    # In the messages a replica has the name of a worker.
    spans = [one._replace(lane=_replica(one.lane)) for one in spans]
    arrows = [
        one._replace(source=_replica(one.source), target=_replica(one.target)) for one in arrows
    ]
    names = tuple(f"replica {number}" for number in range(how.replicas))
    end = float(numbers["virtual_seconds"])
    busy = sum(seconds for _, _, seconds, _ in learner.computations)
    waiting = 1 - busy / (end * how.replicas)
    title = (
        f"fetch every {how.fetch_every}, push every {how.push_every}: replicas do not compute "
        f"for {100 * waiting:.1f} % of the time, mean staleness {numbers['staleness']:.2f}, "
        f"{end:.4g} units"
    )
    lanes = (*(f"server {number}" for number in range(how.servers)), *names)
    panel = LanePanel(title, lanes, tuple(spans), tuple(arrows), names, end)
    return ServerRound(panel, waiting, float(numbers["staleness"]), end)


def _replica(name: str) -> str:
    return name.replace("worker", "replica")


def downpour_picture(how: DownpourDrawing, width: int = 100) -> Picture:
    """Draw a round. width: columns of a terminal."""
    drawn = downpour_round(how)
    figures = (
        f"{how.replicas} replicas, {how.slow} of them {how.factor:g} times slower; {how.steps} "
        f"steps each; a gradient takes 1, a message with all weights {how.transfer:g}."
    )
    caption = [
        "A replica trains on its own weights and data; pushes and fetches run beside its "
        "computation. No replica waits for another before the end of the round.",
    ]
    legend = [LEGEND[0], ("b", "summed gradients pushed"), ("c", "weights fetched"), LEGEND[3]]
    return lanes_picture("Downpour SGD", figures, legend, [drawn.panel], caption, width)

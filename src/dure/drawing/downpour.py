"""Downpour SGD: replicas with data of their own, which push and fetch at their own pace.

The picture shows one round of `dure.parameter_server.simulated_replicas`, under the virtual clock.
"""

from __future__ import annotations

from dure.drawing.lanes import LanePanel, LaneSpan, lanes_picture
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

_EXAMPLES = 8
"""Examples of a replica's batch."""


def downpour_round(
    fetch_every: int = 2,
    push_every: int = 2,
    replicas: int = 3,
    servers: int = 1,
    steps: int = 6,
    transfer: float = 0.2,
    slow: int = 1,
    factor: float = 2.0,
) -> ServerRound:
    """Simulate a round.

    Args:
        fetch_every: steps between fetches of the weights.
        push_every: steps between pushes of the summed gradients.
        replicas: number of replicas.
        servers: number of servers.
        steps: steps of each replica.
        transfer: units of time of a message with all weights.
        slow: number of slow replicas.
        factor: slowness of these replicas.
    """
    check_counts(
        24,
        fetch_every=fetch_every,
        push_every=push_every,
        replicas=replicas,
        servers=servers,
        steps=steps,
    )
    strategy = Downpour(
        replicas=replicas,
        servers=servers,
        batch_size=_EXAMPLES,
        fetch_every=fetch_every,
        push_every=push_every,
        period=steps,
    )
    task = random_task(_EXAMPLES * replicas * steps)
    strategy.check(task, None)
    conditions = conditions_of(replicas, _EXAMPLES, transfer, slow, factor)
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
    names = tuple(f"replica {number}" for number in range(replicas))
    end = float(numbers["virtual_seconds"])
    busy = sum(seconds for _, _, seconds, _ in learner.computations)
    waiting = 1 - busy / (end * replicas)
    title = (
        f"fetch every {fetch_every}, push every {push_every}: replicas do not compute for "
        f"{100 * waiting:.1f} % of the time, mean staleness {numbers['staleness']:.2f}, "
        f"{end:.4g} units"
    )
    lanes = (*(f"server {number}" for number in range(servers)), *names)
    panel = LanePanel(title, lanes, tuple(spans), tuple(arrows), names, end)
    return ServerRound(panel, waiting, float(numbers["staleness"]), end)


def _replica(name: str) -> str:
    return name.replace("worker", "replica")


def downpour_picture(
    fetch_every: int = 2,
    push_every: int = 2,
    replicas: int = 3,
    servers: int = 1,
    steps: int = 6,
    transfer: float = 0.2,
    slow: int = 1,
    factor: float = 2.0,
    width: int = 100,
) -> Picture:
    """Draw a round. The arguments are those of `downpour_round`; width: columns of a terminal."""
    drawn = downpour_round(
        fetch_every, push_every, replicas, servers, steps, transfer, slow, factor
    )
    figures = (
        f"{replicas} replicas, {slow} of them {factor:g} times slower; {steps} steps each; a "
        f"gradient takes 1, a message with all weights {transfer:g}."
    )
    caption = [
        "A replica trains on its own weights and data; pushes and fetches run beside its "
        "computation. No replica waits for another before the end of the round.",
    ]
    legend = [LEGEND[0], ("b", "summed gradients pushed"), ("c", "weights fetched"), LEGEND[3]]
    return lanes_picture("Downpour SGD", figures, legend, [drawn.panel], caption, width)

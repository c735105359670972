"""How long the server of split learning computes, under the virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.split.strategy import Split

EXAMPLES = 24
SPEED = 8.0
INSTANT = "equal:inf:inf:inf"


def task_of() -> dure.Task:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 6, generator=numbers)
    return dure.Task(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 3)),
        nn.functional.cross_entropy,
        (inputs, inputs[:, :3].argmax(1)),
    )


def run(strategy: dure.Strategy, rounds: int = 2, **conditions: Any) -> dure.Run:
    world = dure.Simulated(**conditions)
    stop = dure.Stop(rounds=rounds, steps=rounds)
    return dure.train(task_of(), strategy, world, stop, check=False)


@pytest.mark.parametrize("cut", [("1",), ("1", "2")], ids="-".join)
@pytest.mark.parametrize("kind", [dure.SplitLearning, dure.ParallelSplit, dure.SplitFed])
def test_a_server_takes_the_share_of_its_part(kind: type[Split], cut: tuple[str, ...]) -> None:
    strategy = kind(cut=cut, clients=3, batch_size=4)
    done = run(strategy, devices=INSTANT, server_examples_per_second=SPEED)
    share = done.summary["facts"][0]["split"]["shares"][1]
    seconds = pytest.approx(2 * EXAMPLES * share / SPEED, rel=1e-9)
    server, *clients = done.summary["per_worker"]
    assert server["compute_seconds"] == seconds
    # Nobody else takes any time, and one server computes one thing after another.
    assert done.summary["numbers"]["virtual_seconds"] == seconds
    assert all(one["idle_seconds"] == seconds for one in clients)


def test_a_holder_of_labels_takes_the_share_of_its_part() -> None:
    strategy = dure.VerticalSplit(batch_size=8)
    task = dure.Task(
        lambda: dure.VerticalModel(
            [nn.Linear(3, 4), nn.Linear(3, 4)], nn.Linear(8, 3), "concat", [[0, 1, 2], [3, 4, 5]]
        ),
        nn.functional.cross_entropy,
        task_of().train,
    )
    conditions: dict[str, Any] = {"devices": INSTANT, "server_examples_per_second": SPEED}
    done = dure.train(task, strategy, dure.Simulated(**conditions), dure.Stop(steps=3))
    # 24 products in the heads, and 24 in the tail.
    assert done.summary["numbers"]["virtual_seconds"] == pytest.approx(3 * 8 * 0.5 / SPEED)


def test_what_is_learned_does_not_depend_on_the_servers_speed() -> None:
    strategy = dure.SplitFed(version=2, clients=3, batch_size=4)
    slow = run(strategy, devices="lognormal:1", server_examples_per_second=SPEED)
    fast = run(strategy, devices="lognormal:1")
    for one, other in zip(slow.model.parameters(), fast.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_a_speed_is_above_zero(speed: float) -> None:
    with pytest.raises(ValueError, match="server_examples_per_second is"):
        dure.Simulated(server_examples_per_second=speed)


@pytest.mark.parametrize("strategy", [dure.FedAvg(clients=3), dure.ParameterServer(1, 2)])
def test_others_have_no_such_server(strategy: dure.Strategy) -> None:
    with pytest.raises(ValueError, match="applies only to the server of split learning"):
        run(strategy, server_examples_per_second=SPEED)

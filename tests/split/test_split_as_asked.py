"""What a task asks of training, asked of a divided model: unfreezing is done, the rest refused."""

from __future__ import annotations

from typing import Any

import pytest

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.strategy import Strategy
from small import EXAMPLES, largest_difference, small_task

STEPS = -(-EXAMPLES // 8)


@pytest.mark.parametrize("cut", [("1",), ("1", "2")], ids=["one cut", "U-shape"])
def test_both_sides_of_the_cut_leave_alone_what_is_frozen_still(cut: tuple[str, ...]) -> None:
    def scheduled(step: int) -> float:
        return 0.9**step

    task = small_task(unfreeze={"0.*": 2, "2.*": 3, "4.bias": 4}, lr_schedule=scheduled)
    split = dure.SplitLearning(cut=cut, clients=1, batch_size=8)
    many = dure.train(task, split, stop=dure.Stop(rounds=1), seed=3)
    one = dure.train(task, dure.SingleWorker(8), stop=dure.Stop(steps=STEPS), seed=3)
    assert largest_difference(many, one) < 1e-12
    free = dure.train(small_task(lr_schedule=scheduled), split, stop=dure.Stop(rounds=1), seed=3)
    assert largest_difference(many, free) > 1e-6


@pytest.mark.parametrize(
    "strategy",
    [dure.ParallelSplit(clients=3, batch_size=8), dure.SplitFed(clients=3, batch_size=8)],
    ids=lambda one: one.name,
)
def test_what_is_frozen_in_a_first_round_is_as_it_was(strategy: Strategy) -> None:
    task = small_task(unfreeze={"0.*": 100, "4.*": 100})
    run = dure.train(task, strategy, stop=dure.Stop(rounds=1), seed=3)
    first = seeded_model(task, 3).state_dict()
    # A mean of equal weights may be rounded.
    moved = [
        name
        for name, one in run.model.state_dict().items()
        if float((one - first[name]).abs().max()) > 1e-14
    ]
    assert moved == ["2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("strategy", "asked", "message"),
    [
        (
            dure.SplitLearning(clients=2),
            {"clip_norm": 1.0},
            "each side of the cut has only its part",
        ),
        (dure.ParallelSplit(clients=2), {"precision": "bf16"}, "values and gradients at the cut"),
        (dure.SplitFed(clients=2), {"ema": 0.9}, "no side has the whole model"),
        (dure.SplitLearning(clients=2), {"compile": "eager"}, "no side calls the whole model"),
        (dure.VerticalSplit(), {"clip_norm": 1.0}, "each party has only a part of the model"),
        (dure.VerticalSplit(), {"unfreeze": {"0.*": 2}}, "each party has only a part of the model"),
    ],
)
def test_what_a_divided_model_cannot_do_is_refused_by_name(
    strategy: Strategy, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"cannot train with .*{message}"):
        dure.train(small_task(**asked), strategy, stop=dure.Stop(rounds=1, steps=None))


@pytest.mark.parametrize(
    ("strategy", "asked", "message"),
    [
        (
            dure.FedAvg(clients=2),
            {"compile": True},
            "each site of a network compiles its own model",
        ),
        (dure.SplitLearning(clients=2), {"unfreeze": {"0.*": 2}}, "do not compare it"),
    ],
)
def test_what_clients_of_a_network_cannot_do_is_refused(
    strategy: Strategy, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dure.train(
            small_task(**asked), strategy, dure.Network(port=0), dure.Stop(rounds=1), out=None
        )

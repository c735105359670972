"""The formulas of the study of split learning: what runs count is what they say, to the byte."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "split_study"))

from costs import Shape, Work, crossover, travels, trips

import dure
from dure.split.strategy import Split

INPUTS = 20
FIRST = 6
SECOND = 5
CLASSES = 3
HEAD = INPUTS * FIRST + FIRST
MIDDLE = FIRST * SECOND + SECOND
END = SECOND * CLASSES + CLASSES
WHOLE = HEAD + MIDDLE + END
LABEL = 8
ONE_CUT = Shape(values=FIRST, targets=LABEL, client=HEAD, tensors=2, whole=WHOLE)
TWO_CUTS = Shape(values=FIRST + SECOND, targets=0, client=HEAD + END, tensors=4, whole=WHOLE)
SHAPES = {("1",): ONE_CUT, ("1", "2"): TWO_CUTS}

SYSTEMS: dict[str, tuple[str, Any]] = {
    "split": ("split", dure.SplitLearning),
    "parallel split": ("parallel", dure.ParallelSplit),
    "SplitFed v1": ("split-fed", dure.SplitFed),
    "SplitFed v2": ("split-fed", partial(dure.SplitFed, version=2)),
}


def task_of(examples: int, optimizer: Any) -> dure.Task:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, INPUTS, generator=numbers)
    return dure.Task(
        lambda: nn.Sequential(
            nn.Linear(INPUTS, FIRST),
            nn.ReLU(),
            nn.Linear(FIRST, SECOND),
            nn.Linear(SECOND, CLASSES),
        ),
        nn.functional.cross_entropy,
        (inputs, inputs[:, :CLASSES].argmax(1)),
        optimizer=optimizer,
    )


def run(task: dure.Task, strategy: dure.Strategy, rounds: int) -> dure.Run:
    return dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=rounds), check=False)


@pytest.mark.parametrize("moments", [0, 1, 2], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("cut", SHAPES, ids="-".join)
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_run_sends_what_the_formula_says_and_waits_as_often(
    name: str, cut: tuple[str, ...], moments: int
) -> None:
    optimizer = [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adam, lr=0.01),
    ][moments]
    task = task_of(50, optimizer)
    formula, make = SYSTEMS[name]
    # Clients have more and fewer examples.
    strategy: Split = make(cut=cut, clients=3, batch_size=4, partition="quantity-skew:1")
    division = strategy.division(task, 0)
    assert division is not None
    assert len(set(division.counts)) > 1
    work = Work(division.counts, batch=4, rounds=2)
    done = run(task, strategy, rounds=2)
    assert done.summary["bytes_sent"] == travels(formula, SHAPES[cut], work, moments)
    sent = sum(done.summary["facts"][0]["split"]["messages_sent"])
    together, in_a_row = trips(formula, len(cut), work)
    # A client's message is one wait; the first head of clients in turn was no client's message.
    assert sent + (formula == "split") == work.rounds * together
    assert in_a_row <= together


def test_fed_avg_sends_the_whole_model_both_ways() -> None:
    task = task_of(50, partial(torch.optim.SGD, lr=0.1))
    strategy = dure.FedAvg(clients=3, fraction=1.0, batch_size=4)
    done = run(task, strategy, rounds=2)
    assert done.summary["bytes_sent"] == travels("fed-avg", ONE_CUT, Work([17, 17, 16], 4, 2))


def test_split_learning_sends_less_than_fed_avg_where_the_formula_says_so() -> None:
    even = crossover(ONE_CUT)
    # 2 q n b + t n + 2 b |head| = 2 b |W|
    assert even == 8 * (WHOLE - HEAD) / (8 * FIRST + LABEL)
    for examples, less in ((math.floor(even), True), (math.ceil(even), False)):
        task = task_of(2 * examples, partial(torch.optim.SGD, lr=0.1))
        same: dict[str, Any] = {"clients": 2, "batch_size": 4}
        federated = run(task, dure.FedAvg(fraction=1.0, **same), rounds=1)
        for strategy in (dure.SplitFed(**same), dure.SplitLearning(handover="server", **same)):
            divided = run(task, strategy, rounds=1)
            sent = divided.summary["bytes_sent"]
            assert (sent < federated.summary["bytes_sent"]) == less

"""A side of the cut at work: whose tensors it holds, and what it reads."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dure
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.data.examples import Examples
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.stage import Microbatch
from dure.split.cutting import CutStages, cut_at
from dure.split.sides import Side, SideRunner, copied, weighted_loss
from dure.split.simulated import SimulatedSplitLearner
from dure.split.strategy import Split
from dure.tasks.loss_shares import CountedLoss, LossShare


class Read(Dataset[Any]):
    """Examples that count how often they are read."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.times += 1
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Linear(4, 3))


def task_of(train: Any) -> dure.Task:
    return dure.Task(
        model=layers,
        loss=nn.functional.cross_entropy,
        train=train,
        test=train,
        optimizer=partial(torch.optim.Adam, lr=0.1),
    )


def reads(cut: tuple[str, ...], rounds: int) -> int:
    """How many examples are read in so many rounds."""
    read = Read()
    split = dure.SplitLearning(cut=cut, clients=2, batch_size=4)
    dure.train(task_of(read), split, dure.Simulated(), dure.Stop(rounds=rounds))
    return read.times


def test_a_client_that_has_the_end_of_the_model_reads_each_batch_once() -> None:
    # Two rounds beside one: what is read before the first, and for evaluation, is not counted.
    further = [reads(cut, 2) - reads(cut, 1) for cut in (("1",), ("1", "3"))]
    assert further[0] == further[1] > 0


class Drawn(Examples):
    """Examples to which noise is added as they are read."""

    def __init__(self) -> None:
        super().__init__(torch.randn(24, 6), torch.arange(24) % 3)
        self.draws = True

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(indices)
        return inputs + torch.randn(inputs.shape), targets


def trained(strategy: Split, meanwhile: bool) -> dict[str, Tensor]:
    """After two rounds. meanwhile: whether what nobody waits for is computed at once."""
    torch.manual_seed(0)
    task = task_of(Drawn())
    learner = strategy.learner(task, RankContext(Group()), 0)
    assert isinstance(learner, SimulatedSplitLearner)
    nodes = {one.name: one for one in (learner.server, *learner.clients)}
    for client in learner.clients:
        client.seconds = lambda examples, stages, back: 0.0
    for number in range(2):
        said = deque(("server", *one) for one in learner.server.begin(number))
        while said:
            sender, to, message = said.popleft()
            said += [(to, *one) for one in nodes[to].receive(sender, message, 0.0)]
            if meanwhile:
                nodes[to].meanwhile()
        assert learner.server.order.over
    return {name: one.clone() for name, one in learner.weights().items()}


@pytest.mark.parametrize("cut", [("1",), ("1", "3")], ids=["one cut", "two cuts"])
@pytest.mark.parametrize("kind", [dure.SplitLearning, dure.ParallelSplit, dure.SplitFed])
def test_what_nobody_waits_for_has_the_same_bits_whenever_it_is_computed(
    kind: type[Split], cut: tuple[str, ...]
) -> None:
    strategy = kind(cut=cut, clients=2, batch_size=4)
    late, early = (trained(strategy, meanwhile) for meanwhile in (False, True))
    assert all(torch.equal(late[name], early[name]) for name in late)


def test_parties_that_share_a_side_do_not_see_each_other() -> None:
    inputs = torch.randn(24, 6)
    task = task_of((inputs, torch.arange(24) % 3))
    cut = cut_at(task, layers(), ("1",), 4)
    loss = weighted_loss(CountedLoss(task.loss, task.train))
    side = Side(CutStages(cut, [0], RandomStream(0, carried=False), loss), task)
    first = side.own()

    def step(party: SideRunner, number: int) -> None:
        batch = Microbatch(4, LossShare(1.0, 1.0), lambda: (inputs[4 * number :][:4], None))
        values = party.forward(0, number, batch, [])
        party.backward(0, [torch.ones_like(one) for one in values])
        party.update(party.gradients(0), number)

    # One after another, and by turns, each with steps of its own.
    alone = [SideRunner(side, copied(first), number) for number in range(2)]
    for party in alone:
        for number in range(3):
            step(party, party.number + number)
    mixed = [SideRunner(side, copied(first), number) for number in range(2)]
    for number in range(3):
        for party in mixed:
            step(party, party.number + number)
    for one, other in zip(alone, mixed, strict=True):
        for name in ("weights", "buffers"):
            pairs = zip(getattr(one.own, name), getattr(other.own, name), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        for a, b in zip(one.own.optimizer, other.own.optimizer, strict=True):
            assert a.keys() == b.keys() != set()
            assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(alone[0].own.weights[0], alone[1].own.weights[0])

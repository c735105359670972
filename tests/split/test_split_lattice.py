"""Split learning is SGD: in turn on the clients' data, jointly, or as FedAvg of whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.strategy import Strategy
from dure.data.client_part import ClientExamples, divide
from dure.data.partition import IID, QuantitySkew
from dure.split.strategy import Split

SIZE = 8
ROUNDS = 2
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
CUTS = [("1",), ("2",), ("1", "2")]


class Skips(nn.Module):
    """Layers of which some values pass over others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        one = torch.tanh(self.first(inputs))
        two = torch.relu(self.second(one)) + one
        result: Tensor = self.third(two + one)
        return result


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)
    ).double()


def skips() -> nn.Module:
    return Skips().double()


def task_of(
    model: Callable[[], nn.Module] = layers,
    optimizer: Optimizer = SGD,
    examples: int = 52,
    schedule: Callable[[int], float] | None = None,
) -> dure.Task:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, 6, generator=numbers, dtype=torch.float64)
    targets = torch.randint(0, 3, (examples,), generator=numbers)
    return dure.Task(
        model=model,
        loss=nn.functional.cross_entropy,
        train=(inputs, targets),
        test=(inputs, targets),
        optimizer=optimizer,
        lr_schedule=schedule,
    )


def trained(task: dure.Task, strategy: Strategy, rounds: int = ROUNDS) -> dict[str, Tensor]:
    run = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=rounds))
    return dict(run.model.state_dict())


def by_hand(task: dure.Task, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """One model, and one optimizer, on these batches in this order."""
    model = seeded_model(task, 0)
    optimizer = task.optimizer(model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    inputs, targets = task.train.batch(torch.arange(len(task.train)))
    for step, batch in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (task.lr_schedule(step) if task.lr_schedule else 1.0)
        optimizer.zero_grad()
        task.loss(model(inputs[batch]), targets[batch]).backward()  # type: ignore[union-attr]
        optimizer.step()
    return dict(model.state_dict())


def parts_of(task: dure.Task, clients: int, skew: bool = False) -> Sequence[ClientExamples]:
    partition = QuantitySkew(1.0) if skew else IID()
    return divide(partition, clients, task.train, SIZE, 0, joins=False)


def in_turn(parts: Sequence[ClientExamples], rounds: int = ROUNDS) -> Iterable[Tensor]:
    for number in range(rounds):
        for part in parts:
            steps = part.batches.steps_per_epoch
            yield from (part.at(number * steps + step) for step in range(steps))


def jointly(parts: Sequence[ClientExamples], rounds: int = ROUNDS) -> Iterable[Tensor]:
    every = [part.batches.steps_per_epoch for part in parts]
    for number in range(rounds):
        for step in range(max(every)):
            there = zip(parts, every, strict=True)
            yield torch.cat([part.at(number * n + step) for part, n in there if step < n])


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cut", CUTS, ids="-".join)
def test_in_turn_is_sgd_on_the_clients_data_in_that_order(cut: tuple[str, ...], name: str) -> None:
    task = task_of(optimizer=OPTIMIZERS[name])
    split = dure.SplitLearning(cut=cut, clients=3, batch_size=SIZE)
    right = by_hand(task, in_turn(parts_of(task, 3)))
    assert apart(trained(task, split), right) < 1e-12


@pytest.mark.parametrize("cut", CUTS, ids="-".join)
def test_heads_handed_over_by_peers_and_by_the_server_have_the_same_bits(
    cut: tuple[str, ...],
) -> None:
    task = task_of(optimizer=OPTIMIZERS["adam"])
    peer, server = (
        trained(task, dure.SplitLearning(cut=cut, clients=3, batch_size=SIZE, handover=who))
        for who in ("peer", "server")
    )
    assert apart(peer, server) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cut", CUTS, ids="-".join)
@pytest.mark.parametrize("skew", [False, True], ids=["alike", "skewed"])
def test_parallel_is_one_model_on_the_joint_batch(
    cut: tuple[str, ...], name: str, skew: bool
) -> None:
    task = task_of(optimizer=OPTIMIZERS[name])
    partition = QuantitySkew(1.0) if skew else IID()
    split = dure.ParallelSplit(cut=cut, clients=3, batch_size=SIZE, partition=partition)
    right = by_hand(task, jointly(parts_of(task, 3, skew)))
    assert apart(trained(task, split), right) < 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cut", CUTS, ids="-".join)
def test_split_fed_with_copies_is_fed_avg(cut: tuple[str, ...], name: str) -> None:
    task = task_of(optimizer=OPTIMIZERS[name])
    partition = QuantitySkew(1.0)
    split = dure.SplitFed(cut=cut, clients=3, batch_size=SIZE, local_epochs=2, partition=partition)
    whole = dure.FedAvg(clients=3, batch_size=SIZE, local_epochs=2, partition=partition)
    assert apart(trained(task, split), trained(task, whole)) < 1e-12


def test_split_fed_weighs_clients_by_what_the_loss_counts() -> None:
    sizes = [20, 12, 6, 4]
    whose = torch.tensor([client for client, size in enumerate(sizes) for _ in range(size)])
    task = task_of(examples=sum(sizes))
    inputs, targets = task.train.batch(torch.arange(len(whose)))
    targets = targets.clone()
    targets[:16] = -100
    targets[whose == 3] = -100  # this client learns nothing
    classes = torch.tensor([1.0, 10.0, 0.1], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=classes)
    examples = dure.Examples(inputs, targets, keys=[f"client {one}" for one in whose.tolist()])
    task = dure.Task(layers, loss, examples, optimizer=SGD)
    right: dict[str, Tensor] = {}
    total = float(classes[targets[targets >= 0]].sum())
    for client in range(3):
        mine = whose == client
        model = seeded_model(task, 0)
        optimizer = SGD(model.parameters())
        loss(model(inputs[mine]), targets[mine]).backward()
        optimizer.step()
        share = float(classes[targets[mine & (targets >= 0)]].sum()) / total
        for name, weight in model.state_dict().items():
            right[name] = right.get(name, torch.zeros(())) + share * weight
    split = dure.SplitFed(clients=None, partition="natural-key", batch_size=64, cut=("1",))
    assert apart(trained(task, split, rounds=1), right) < 1e-12


def test_a_round_in_which_no_loss_counts_anything_leaves_the_model() -> None:
    task = task_of(optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.5))
    inputs, targets = task.train.batch(torch.arange(len(task.train)))
    ignored = dure.Task(layers, task.loss, (inputs, targets * 0 - 100), optimizer=task.optimizer)
    found = trained(ignored, dure.SplitFed(clients=2, batch_size=SIZE), rounds=2)
    assert apart(found, dict(seeded_model(ignored, 0).state_dict())) == 0


ALL: list[type[Split]] = [dure.SplitLearning, dure.ParallelSplit, dure.SplitFed]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("model", [layers, skips])
def test_one_client_is_a_single_worker_at_every_cut(
    kind: type[Split], model: Callable[[], nn.Module]
) -> None:
    task = task_of(model)
    stop = dure.Stop(epochs=1)
    right = dure.train(task, dure.SingleWorker(batch_size=SIZE), stop=stop).model.state_dict()
    for cut in CUTS:
        split = kind(cut=cut, clients=1, batch_size=SIZE)
        assert apart(trained(task, split, rounds=1), dict(right)) == 0


def test_only_the_version_with_one_tail_depends_on_the_order_of_clients() -> None:
    task = task_of()
    orders = []
    for version in (1, 2):
        split = dure.SplitFed(clients=3, batch_size=SIZE, version=version)
        # The seed draws the order; the data are those of everyone, whoever has them.
        runs = [
            dure.train(task, split, dure.Simulated(), dure.Stop(rounds=1), seed=0),
            dure.train(task, split, dure.Simulated(devices="lognormal:1"), dure.Stop(rounds=1)),
        ]
        one, other = (dict(run.model.state_dict()) for run in runs)
        # Whoever is slow, the clients come in the round's order.
        assert apart(one, other) == 0
        orders.append(one)
    assert apart(*orders) > 1e-6


def test_schedules_count_the_steps_of_all() -> None:
    task = task_of(schedule=lambda step: 1 / (1 + step))
    split = dure.SplitLearning(clients=3, batch_size=SIZE)
    assert apart(trained(task, split), by_hand(task, in_turn(parts_of(task, 3)))) < 1e-12


def test_a_step_is_the_same_whoever_is_fast() -> None:
    task = task_of()
    split = dure.ParallelSplit(clients=4, batch_size=SIZE)
    slow = dure.Simulated(devices="lognormal:1", server_mbit=1)
    run = dure.train(task, split, slow, dure.Stop(rounds=1))
    assert apart(dict(run.model.state_dict()), trained(task, split, rounds=1)) == 0


@pytest.mark.parametrize("kind", ALL)
def test_the_time_of_clients_is_computing_links_and_waiting(kind: type[Split]) -> None:
    world = dure.Simulated(devices="lognormal:1")
    run = dure.train(task_of(), kind(clients=3, batch_size=SIZE), world, dure.Stop(rounds=2))
    parts = [run.summary[f"{what}_seconds"] for what in ("compute", "idle", "communication")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(3 * run.summary["numbers"]["virtual_seconds"], rel=1e-12)

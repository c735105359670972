"""FedAvg as a whole: bytes, refusals, and the same bits whoever is visited first."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import dure
from dure.contracts.stop import Stop
from dure.data.partition import IID, Dirichlet, LabelShards, NaturalKey
from dure.errors import WorkerFailedError
from dure.federated.algorithms.fed_avg import FedAvg
from dure.federated.server.sampling import uniform
from dure.worlds.simulated import Simulated
from small import examples, network, same_bits, small_task


def train(strategy: FedAvg, rounds: int = 2, task: Any = None, **options: Any) -> dure.Run:
    return dure.train(
        task if task is not None else small_task(), strategy, stop=Stop(rounds=rounds), **options
    )


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
    ).double()


@pytest.mark.parametrize("partition", [IID(), LabelShards(2), Dirichlet(0.5, 2)])
def test_the_same_seed_gives_the_same_bits_and_the_order_of_arrival_changes_none(partition):
    task = small_task(model=with_batch_norm)
    strategy = FedAvg(clients=5, fraction=0.6, local_steps=3, batch_size=None, partition=partition)
    first, second, shuffled = (
        dure.train(task, strategy, world, Stop(rounds=3))
        for world in (Simulated(), Simulated(), Simulated(devices="lognormal:2"))
    )
    assert same_bits(first, second)
    assert same_bits(first, shuffled)
    assert [s.loss for s in first.history.steps] == [s.loss for s in shuffled.history.steps]
    assert not same_bits(first, dure.train(task, strategy, stop=Stop(rounds=3), seed=1))


@pytest.mark.parametrize("model", [with_batch_norm, None])
def test_every_byte_is_counted_as_the_formula_says(model):
    task = small_task(model=model) if model is not None else small_task()
    made = task.model()
    size = sum(t.nbytes for t in [*made.parameters(), *made.buffers()])
    run = train(FedAvg(clients=5, fraction=0.4), rounds=4, task=task)
    turns = [client for round in range(4) for client in uniform(0, round, 5, 0.4)]
    server, *clients = run.summary["per_worker"]
    assert server["name"] == "server"
    assert (server["bytes_sent"], server["bytes_received"]) == (8 * size, 8 * size)
    for client, counted in enumerate(clients):
        expected = turns.count(client) * size
        assert (counted["name"], counted["bytes_sent"], counted["bytes_received"]) == (
            *(f"client {client}", expected),
            expected,
        )
    assert run.summary["bytes_sent"] == run.summary["bytes_received"] == 16 * size
    assert run.summary["bytes_sent_per_worker"] == 8 * size / 5
    assert run.summary["workers"] == 5
    assert [step.bytes_sent for step in run.history.steps] == [
        2 * size * round for round in (1, 2, 3, 4)
    ]


def test_natural_clients_are_those_that_the_data_name():
    run = train(FedAvg(clients=None, partition=NaturalKey()), rounds=1)
    assert [worker["name"] for worker in run.summary["per_worker"]] == [
        "server",
        'client 0 ("owner 0")',
        'client 1 ("owner 1")',
        'client 2 ("owner 2")',
    ]
    assert run.summary["samples"] == 41


def test_samples_and_epochs_count_every_local_pass():
    run = train(FedAvg(clients=4, local_epochs=3), rounds=2)
    assert run.summary["samples"] == 2 * 3 * 41
    assert run.summary["epochs"] == 6.0
    steps = train(FedAvg(clients=1, local_steps=5, batch_size=4), rounds=2)
    assert steps.summary["samples"] == 2 * 20


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (FedAvg(fraction=0.0), "fraction is 0.0, but it has to be in (0, 1]"),
        (FedAvg(fraction=1.5), "fraction is 1.5"),
        (FedAvg(fraction=float("nan")), "fraction is nan"),
        (FedAvg(clients=0), "clients is 0, but it has to be 1 or more"),
        (FedAvg(clients=42), "the run has 42 clients, but only 41 training examples"),
        (FedAvg(local_epochs=0), "local_epochs is 0, but it has to be 1 or more"),
        (FedAvg(local_steps=0), "local_steps is 0, but it has to be 1 or more"),
        (FedAvg(batch_size=0), "batch_size is 0, but it has to be 1 or more"),
        (FedAvg(server_lr=0.0), "server_lr is 0.0, but it has to be greater than 0"),
        (FedAvg(clients=20, partition=LabelShards(3)), "41 examples cannot be cut into 60 shards"),
        (
            FedAvg(clients=2, partition=NaturalKey()),
            "3 natural clients (owner 0, owner 1, owner 2), not 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_before_any_work(strategy, complaint, tmp_path):
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        train(strategy, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_partition_by_label_wants_labels():
    inputs = examples().inputs
    task = small_task(train=(inputs, inputs[:, :3]), test=None, loss=nn.functional.mse_loss)
    with pytest.raises(ValueError, match="needs one class label per example"):
        train(FedAvg(clients=2, partition=LabelShards(2)), task=task)
    assert train(FedAvg(clients=2), task=task).summary["steps"] == 2


def test_ranks_are_no_clients():
    with pytest.raises(
        ValueError, match=r"FedAvg does not run in Processes; it needs a world of clients"
    ):
        dure.train(small_task(), FedAvg(), dure.Processes(2))


def fails_on(bad: float):
    """A loss that fails where an example of client 2's comes by."""

    def loss(outputs, targets):
        if (targets == 2).any():
            if bad:
                return outputs.sum() * bad
            raise KeyError("no such class")
        return nn.functional.cross_entropy(outputs, targets)

    targets = torch.arange(30) // 10
    train = dure.Examples(
        torch.randn(30, 6).double(), targets, keys=[str(label) for label in targets.tolist()]
    )
    return small_task(train=train, loss=loss, test=None)


def test_a_client_s_own_error_names_client_and_round():
    with pytest.raises(
        WorkerFailedError, match=r"client 2 \(.2.\) failed in round 1: KeyError: 'no such class'"
    ) as caught:
        train(FedAvg(clients=None, partition=NaturalKey()), task=fails_on(0.0))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_client_whose_loss_is_not_finite_is_refused_by_its_name_and_the_others_count_on():
    with pytest.warns(UserWarning, match=r'client 2 \("2"\) is rejected: its first loss'):
        run = train(FedAvg(clients=None, partition=NaturalKey()), task=fails_on(float("nan")))
    assert run.summary["facts"][0]["refused_clients"] == [[2, len(run.history.steps)]]
    assert all(math.isfinite(step.loss) for step in run.history.steps)


class Masked(nn.Module):
    """The small network, and a buffer that nobody changes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.net = network()
        self.register_buffer("mask", buffer, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.mark.parametrize("aggregate", ["mean", "median"])
@pytest.mark.parametrize(
    "buffer",
    [
        torch.full((4, 4), float("-inf"), dtype=torch.float64).triu(1),
        torch.tensor([float("nan"), 1.0]),
        torch.polar(torch.ones(4), torch.arange(4.0)),
    ],
    ids=["mask", "nan", "complex"],
)
def test_a_buffer_that_nobody_changes_stays_and_changes_nothing(buffer, aggregate):
    strategy = FedAvg(clients=4, aggregate=aggregate)
    world = Simulated(engine="loop")
    task = small_task(model=lambda: Masked(buffer.clone()))
    run, plain = train(strategy, task=task, world=world), train(strategy, world=world)
    assert [step.numbers["refused"] for step in run.history.steps] == [0, 0]
    assert all(map(torch.equal, run.model.parameters(), plain.model.parameters()))
    assert torch.equal((run.model.mask + 0j).nan_to_num(7.0), (buffer + 0j).nan_to_num(7.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_buffer_that_became_infinite_or_nan_is_a_reason_to_refuse(value):
    class Spoiled(Masked):
        def forward(self, x):
            self.mask.fill_(value)
            return self.net(x)

    run = train(FedAvg(clients=4), task=small_task(model=lambda: Spoiled(torch.zeros(2))))
    assert [step.numbers["refused"] for step in run.history.steps] == [4, 4]

"""Heads of clients' own: only the tail is shared, and no head travels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.collectives.group import Group
from dure.contracts.world import RankContext
from dure.fleet.virtual_network import VirtualNetwork, nbytes
from dure.split.messages import Ended, HeadGradients, HeadHandover, HeadSum, SideState, Turn
from dure.split.simulated import SimulatedSplitLearner
from dure.split.strategy import Split
from dure.tasks.builtin import load_task

CLIENTS = 3
SYSTEMS: list[Split] = [
    # Behind two layers, so that heads have batch norm.
    dure.SplitLearning(("2",), handover="peer"),
    dure.SplitLearning(("2",), handover="server"),
    dure.ParallelSplit(("2",)),
    dure.SplitFed(("2",), version=1),
    dure.SplitFed(("2",), version=2),
    dure.SplitLearning(("2", "3")),
    dure.ParallelSplit(("2", "3")),
]
every_system = pytest.mark.parametrize("system", SYSTEMS, ids=lambda one: one.label)


def task() -> dure.Task:
    numbers = torch.Generator().manual_seed(0)
    labels = torch.arange(42) % 3
    # Clients see the same classes under another sign: one head does not fit all of them.
    inputs = torch.randn(42, 6, generator=numbers) + 2 * nn.functional.one_hot(labels, 6)
    return dure.Task(
        model=lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 3)
        ),
        loss=nn.functional.cross_entropy,
        train=(inputs, labels),
        test=(inputs[:9], labels[:9]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        metrics={"accuracy": dure.accuracy},
    )


def personal(system: Split, **changes: Any) -> Split:
    return replace(
        system, **{"clients": CLIENTS, "batch_size": 4, "personal_heads": True, **changes}
    )


def trained(system: Split, rounds: int = 2, **options: Any) -> dure.Run:
    return dure.train(task(), system, dure.Simulated(), dure.Stop(rounds=rounds), **options)


def learner(system: Split) -> SimulatedSplitLearner:
    made = system.learner(task(), RankContext(Group()), 0)
    assert isinstance(made, SimulatedSplitLearner)
    return made


def tensors(own: SideState) -> list[Tensor]:
    return [*own.weights, *own.buffers]


def same(one: dure.Run, other: dure.Run) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that is sent."""
    sent: list[Any] = []
    send = VirtualNetwork.send

    def noted(self: VirtualNetwork, sender: str, said: Any) -> None:
        sent.extend(message for _, message in said)
        send(self, sender, said)

    monkeypatch.setattr(VirtualNetwork, "send", noted)
    return sent


@every_system
def test_one_client_with_a_head_of_its_own_is_one_with_that_of_all(system: Split) -> None:
    alone = personal(system, clients=1)
    assert same(trained(alone), trained(replace(alone, personal_heads=False)))


@every_system
def test_heads_go_apart_and_the_model_of_all_has_their_mean(system: Split) -> None:
    made = learner(personal(system))
    made.advance(0)
    heads = [tensors(one.party.own) for one in made.clients]
    assert not torch.equal(heads[0][0], heads[1][0])
    shares = [len(part.indices) / 42 for part in made.parts]
    mean = sum(share * head[0].double() for share, head in zip(shares, heads, strict=True))
    torch.testing.assert_close(made.weights()["0.weight"].double(), mean, rtol=0, atol=1e-6)


@every_system
def test_no_head_travels_and_the_rest_is_as_much_as_with_one_head(
    system: Split, messages: list[Any]
) -> None:
    trained(personal(system))
    assert not [one for one in messages if isinstance(one, HeadHandover | HeadGradients | HeadSum)]
    assert not any(one.head for one in messages if isinstance(one, Turn | Ended))
    at_the_cut = sum(map(nbytes, messages))
    messages.clear()
    trained(personal(system, personal_heads=False))
    heads = (HeadHandover, HeadGradients, HeadSum, Turn, Ended)
    assert at_the_cut == sum(nbytes(one) for one in messages if not isinstance(one, heads))


def test_a_head_in_parallel_makes_the_step_of_one_model_with_many_heads() -> None:
    made = learner(personal(dure.ParallelSplit(("2",)), batch_size=None))
    before = [[one.clone() for one in each.party.own.weights] for each in made.clients]
    tail = made.model[3:]
    made._load()
    weights = [one.clone() for one in tail.parameters()]
    made.advance(0)
    heads = []
    for own in before:
        head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        for parameter, weight in zip(head.parameters(), own, strict=True):
            parameter.data = weight
        heads.append(head)
    end = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    for parameter, weight in zip(end.parameters(), weights, strict=True):
        parameter.data = weight
    batches = [made.train.batch(part.at(0)) for part in made.parts]
    values = torch.cat([head(x) for head, (x, _) in zip(heads, batches, strict=True)])
    nn.functional.cross_entropy(end(values), torch.cat([y for _, y in batches])).backward()
    for head, one in zip(heads, made.clients, strict=True):
        for parameter, found in zip(head.parameters(), one.party.own.weights, strict=True):
            torch.testing.assert_close(found, parameter - 0.1 * parameter.grad)


@pytest.mark.parametrize("system", SYSTEMS[:5], ids=lambda one: one.label)
def test_a_run_that_goes_on_has_the_same_bits(system: Split, tmp_path: Path) -> None:
    kept = personal(system, cut=("1",), held_out=0.2, batch_size=64)
    named = load_task("digits")
    whole = dure.train(named, kept, stop=dure.Stop(rounds=3))
    dure.train(named, kept, stop=dure.Stop(rounds=1), out=tmp_path / "run")
    resumed = dure.resume(tmp_path / "run", stop=dure.Stop(rounds=3))
    assert same(whole, resumed)
    assert whole.summary["personal_loss"] == resumed.summary["personal_loss"]


@every_system
def test_a_head_is_measured_on_what_its_client_holds_out(system: Split) -> None:
    made = learner(personal(system, held_out=0.25))
    made.advance(0)
    found = made.evaluate()
    losses = 0.0
    for one, part in zip(made.clients, made.parts, strict=True):
        assert not set(part.held_out.tolist()) & set(part.indices.tolist())
        made._load()
        made._load_own(one.number)
        inputs, targets = made.train.batch(part.held_out)
        made.model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(made.model(inputs), targets, reduction="sum")
        losses += float(loss)
        made.model.train()
    count = sum(len(part.held_out) for part in made.parts)
    assert count >= CLIENTS
    assert found["personal_loss"] == pytest.approx(losses / count, rel=1e-5)


def test_heads_of_their_own_may_be_what_a_run_is_to_reach() -> None:
    kept = personal(dure.SplitLearning(), held_out=0.2)
    stop = dure.Stop(rounds=1, target={"personal_accuracy": 0.01})
    run = dure.train(task(), kept, dure.Simulated(), stop)
    assert run.summary["to_target"]["personal_accuracy"]["reached"] is not None


def test_data_are_held_out_for_heads_of_their_own_alone() -> None:
    with pytest.raises(ValueError, match="give personal_heads too"):
        trained(dure.SplitLearning(held_out=0.2))
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        trained(personal(dure.SplitLearning(), held_out=1.0))

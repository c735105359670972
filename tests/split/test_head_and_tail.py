"""A head and a tail that were written apart train as the model undivided, and know nothing of each
other."""

from __future__ import annotations

import gc
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dure
from dure.cli.main import main
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.contracts.strategy import Strategy
from dure.fleet.virtual_network import NodeLink, VirtualNetwork
from dure.split.client import SplitClient
from dure.split.messages import SERVER
from dure.split.orders import Amounts
from dure.split.separate_models.form import decoded, encoded, form_of
from dure.split.separate_models.sides import ClientPart, ServerPart
from dure.split.server import TailServer
from dure.split.sides import SideRunner
from dure.split.simulated import SimulatedSplitLearner
from dure.split.strategy import Split
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.parts import ModelParts

SIZE = 8
ROUNDS = 2
cross_entropy = nn.functional.cross_entropy
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def double(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double()


def head() -> nn.Module:
    return double(nn.Linear(6, 8))


def tail() -> nn.Module:
    return double(nn.ReLU(inplace=True), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))


def middle() -> nn.Module:
    return double(nn.Tanh(), nn.Linear(8, 7))


def end() -> nn.Module:
    return double(nn.ReLU(inplace=True), nn.Linear(7, 3))


class Gives(nn.Module):
    """A head whose values are in a dict, some of them of no use and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8).double()
        self.idle = nn.Linear(6, 5).double()

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        values = torch.tanh(self.first(inputs))
        mask = inputs > 0
        return {"pair": (values, self.idle(inputs)), "mask": mask, "scale": 0.5}


class Takes(nn.Module):
    """A tail for that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(14, 3).double()

    def forward(self, given: dict[str, Any]) -> Tensor:
        values, _ = given["pair"]
        joined = torch.cat([values, given["mask"].double() * given["scale"]], dim=1)
        result: Tensor = self.layer(joined)
        return result


def examples(count: int = 52) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=numbers, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=numbers)


def two_files(
    shape: str = "one cut",
    optimizer: Optimizer = SGD,
    make_head: Callable[[], nn.Module] = head,
    make_tail: Callable[[], nn.Module] | None = None,
    make_end: Callable[[], nn.Module] = end,
    **others: Any,
) -> tuple[dure.HeadTask, dure.TailTask]:
    data = {"train": examples(), "test": examples(), "optimizer": optimizer, **others}
    if shape == "one cut":
        return (
            dure.HeadTask(model=make_head, **data),
            dure.TailTask(model=make_tail or tail, loss=cross_entropy, optimizer=optimizer),
        )
    return (
        dure.HeadTask(model=make_head, end=make_end, loss=cross_entropy, **data),
        dure.TailTask(model=make_tail or middle, optimizer=optimizer),
    )


def trained(task: dure.Task, strategy: Strategy, rounds: int = ROUNDS, **others: Any) -> dure.Run:
    return dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=rounds), **others)


def undivided(task: dure.Task) -> dure.Task:
    """The same model, as a task of its own that knows of no files."""
    return dure.Task(
        model=task.model,
        loss=task.loss,
        train=task.train,
        test=task.test,
        optimizer=task.optimizer,
    )


def apart(one: dure.Run, other: dure.Run) -> float:
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


SHAPES = {"one cut": ("tail",), "labels stay": ("tail", "end")}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "kind",
    [
        dure.SplitLearning,
        partial(dure.SplitLearning, handover="server"),
        dure.ParallelSplit,
        dure.SplitFed,
        partial(dure.SplitFed, version=2),
    ],
    ids=["peer", "server", "parallel", "v1", "v2"],
)
def test_apart_has_the_bits_of_the_composed_model_cut_there(
    kind: Callable[..., Split], shape: str, name: str
) -> None:
    task = dure.joined(*two_files(shape, OPTIMIZERS[name]))
    one = trained(task, kind(clients=3, batch_size=SIZE))
    other = trained(undivided(task), kind(clients=3, batch_size=SIZE, cut=SHAPES[shape]))
    assert apart(one, other) == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [dure.SplitLearning, dure.ParallelSplit, dure.SplitFed])
def test_one_client_is_a_single_worker(kind: type[Split], shape: str) -> None:
    task = dure.joined(*two_files(shape))
    # The model as one is trained by any system, with the optimizer that both name.
    stop = dure.Stop(epochs=1)
    right = dure.train(task, dure.SingleWorker(batch_size=SIZE), stop=stop)
    assert apart(trained(task, kind(clients=1, batch_size=SIZE), rounds=1), right) == 0


def test_each_side_has_its_own_optimizer() -> None:
    both = two_files()
    adam = dure.TailTask(model=tail, loss=cross_entropy, optimizer=OPTIMIZERS["adam"])
    run = trained(dure.joined(both[0], adam), dure.SplitLearning(clients=1, batch_size=SIZE), 1)
    model = seeded_model(dure.joined(*both), 0)
    assert isinstance(model, ModelParts)
    # By hand, on the batches of a single worker.
    optimizers = [SGD(model.head.parameters()), OPTIMIZERS["adam"](model.tail.parameters())]  # type: ignore[union-attr]
    for batch in _batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs, targets = (one[batch] for one in examples())
        cross_entropy(model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name]), name


def _batches() -> Iterator[Tensor]:
    from dure.data.client_part import divide
    from dure.data.partition import IID

    part = divide(IID(), 1, undivided(dure.joined(*two_files())).train, SIZE, 0, joins=False)[0]
    yield from (part.at(step) for step in range(part.batches.steps_per_epoch))


@pytest.mark.parametrize("kind", [dure.SplitLearning, dure.ParallelSplit, dure.SplitFed])
def test_a_head_may_give_a_tree_and_values_that_learn_nothing(kind: type[Split]) -> None:
    # With weight decay a gradient of zeros would move weights that get none.
    decay = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    task = dure.joined(*two_files(optimizer=decay, make_head=Gives, make_tail=Takes))
    strategy = kind(clients=2, batch_size=SIZE)
    run = trained(task, strategy)
    first = seeded_model(task, 0).state_dict()
    assert torch.equal(run.model.state_dict()["head.idle.weight"], first["head.idle.weight"])
    assert not torch.equal(run.model.state_dict()["head.first.weight"], first["head.first.weight"])
    whole = trained(undivided(task), kind(clients=2, batch_size=SIZE, cut=("tail",)))
    assert apart(run, whole) < 1e-12


class Passes(nn.Module):
    """A middle that gives two values, of which one comes of the head's idle layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 7).double()
        self.spare = nn.Linear(5, 4).double()

    def forward(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        values, idle = given["pair"]
        return torch.tanh(self.layer(values)), self.spare(idle)


class EndsWithFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3).double()

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.layer(given[0])
        return result


def test_weights_that_no_loss_depends_on_get_no_gradient_on_either_side() -> None:
    decay = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    task = dure.joined(
        *two_files("labels stay", decay, make_head=Gives, make_tail=Passes, make_end=EndsWithFirst)
    )
    run = trained(task, dure.SplitLearning(clients=1, batch_size=SIZE), rounds=1)
    right = dure.train(task, dure.SingleWorker(batch_size=SIZE), stop=dure.Stop(epochs=1))
    assert apart(run, right) == 0
    first = seeded_model(task, 0).state_dict()
    for name in ("head.idle.weight", "tail.spare.weight"):
        assert torch.equal(run.model.state_dict()[name], first[name])


# What each side has


def owned(start: Any) -> set[int]:
    """The ids of the parameters that an object leads to. Not entered are code, and the simulation
    itself, which gives both sides their time."""
    found: set[int] = set()
    seen = {id(start)}
    ahead = [start]
    while ahead:
        one = ahead.pop()
        if isinstance(one, nn.Parameter):
            found.add(id(one))
        if isinstance(one, (ModuleType, type, SimulatedSplitLearner, type(gc.get_referents))):
            continue
        parts = gc.get_referents(one)
        if isinstance(one, FunctionType):
            parts = [one.__closure__, one.__defaults__]
        for part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                ahead.append(part)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [dure.SplitLearning, dure.ParallelSplit, dure.SplitFed])
def test_no_side_leads_to_a_parameter_of_the_other(
    kind: type[Split], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners: list[SimulatedSplitLearner] = []
    advance = SimulatedSplitLearner.advance

    def noted(self: SimulatedSplitLearner, control_flags: int) -> Any:
        learners.append(self)
        return advance(self, control_flags)

    monkeypatch.setattr(SimulatedSplitLearner, "advance", noted)
    trained(dure.joined(*two_files(shape)), kind(clients=2, batch_size=SIZE), rounds=1)
    (learner,) = learners
    model = learner.model
    assert isinstance(model, ModelParts)
    tails = set(map(id, model.only("tail").parameters()))
    heads = set(map(id, model.only("head", "end").parameters()))
    at_server = owned(learner.server)
    assert tails <= at_server
    assert not heads & at_server
    for client in learner.clients:
        at_client = owned(client)
        assert heads <= at_client
        assert not tails & at_client


@pytest.mark.parametrize("shape", SHAPES)
def test_deployed_has_the_bits_of_the_simulation(shape: str) -> None:
    """Each side made of its own task alone; between them go messages, and forms as bytes."""
    mine, theirs = two_files(
        shape, OPTIMIZERS["adam"], make_head=noisy, make_tail=noisy_tail(shape)
    )
    strategy = dure.SplitLearning(clients=2, batch_size=SIZE)
    run = trained(dure.joined(mine, theirs), strategy, rounds=1)
    parts = _parts(mine, 2)
    train, _ = examples_for(mine)
    losses = CountedLoss(mine.loss, train)

    clients = [ClientPart(mine, _model(mine), train, SIZE, 0) for _ in parts]
    server = ServerPart(theirs, _model(theirs), decoded(encoded(clients[0].leaving)), 0)
    side = server.side()
    plan = strategy.of(theirs).plan
    amounts = Amounts([one.batches.steps_per_epoch for one in parts], [26, 26])
    order = plan.order(amounts, None, lambda number: SideRunner(side, side.own(), number), 0)
    structure = None if plan.rules.labels_stay else clients[0].targets.structure
    network = VirtualNetwork()
    machine = TailServer(order, server.batching, structure)
    network.add(SERVER, machine, NodeLink())
    sides = []
    for number, (one, part) in enumerate(zip(clients, parts, strict=True)):
        own = one.side(losses, server.leaving and decoded(encoded(server.leaving)))
        sides.append(own)
        party = SideRunner(own, own.own(), number)
        network.add(
            f"client {number}",
            SplitClient(number, party, plan.rules, train, part.at, losses, 0, lambda *_: 0.0),
            NodeLink(),
        )
    network.send(SERVER, machine.begin(0))
    assert network.run(lambda: order.over, float("inf"))
    side.take(order.tails[0].own)
    # The second client had the last turn.
    state = {**clients[1].model.state_dict(), **server.model.state_dict()}
    right = run.model.state_dict()
    assert state.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(tensor, state[name]), name


def noisy() -> nn.Module:
    return double(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))


def noisy_tail(shape: str) -> Callable[[], nn.Module]:
    last = 3 if shape == "one cut" else 7
    return lambda: double(nn.Linear(8, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, last))


def _model(task: dure.Task) -> ModelParts:
    model = seeded_model(task, 0)
    assert isinstance(model, ModelParts)
    return model


def _parts(task: dure.Task, clients: int) -> Any:
    from dure.data.client_part import divide
    from dure.data.partition import IID

    return divide(IID(), clients, task.train, SIZE, 0, joins=True)


def test_first_weights_are_the_same_alone_and_together() -> None:
    mine, theirs = two_files("labels stay")
    both = seeded_model(dure.joined(mine, theirs), 7).state_dict()
    alone = {**seeded_model(mine, 7).state_dict(), **seeded_model(theirs, 7).state_dict()}
    assert alone.keys() == both.keys()
    assert all(torch.equal(alone[name], both[name]) for name in both)
    # And no part is drawn like another one.
    twins = dure.joined(*two_files(make_head=middle_like, make_tail=middle_like))
    model = seeded_model(twins, 7)
    assert isinstance(model, ModelParts)
    assert not torch.equal(model.head[0].weight, model.tail[0].weight)  # type: ignore[index]


def middle_like() -> nn.Module:
    return double(nn.Linear(6, 6))


def test_the_trained_parts_are_what_the_files_make() -> None:
    run = trained(dure.joined(*two_files()), dure.SplitLearning(clients=2, batch_size=SIZE), 1)
    model = run.model
    assert isinstance(model, ModelParts)
    assert model.head is not None
    own = head()
    own.load_state_dict(model.head.state_dict())
    inputs, _ = examples()
    assert torch.equal(own(inputs), model.only("head")(inputs))


def tanh_head() -> nn.Module:
    return double(nn.Linear(6, 8), nn.Tanh())


def test_a_tail_may_write_into_what_it_receives() -> None:
    # Undivided this is an error of autograd's, for the derivative of tanh needs what tanh gave.
    task = dure.joined(*two_files(make_head=tanh_head))
    for kind in (dure.SplitLearning, dure.ParallelSplit):
        run = trained(task, kind(clients=2, batch_size=SIZE))

        def tail_of_its_own() -> nn.Module:
            return double(nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))

        other = dure.joined(*two_files(make_head=tanh_head, make_tail=tail_of_its_own))
        assert apart(run, trained(other, kind(clients=2, batch_size=SIZE))) == 0


# Draws and buffers


@pytest.mark.parametrize(
    "strategy",
    [
        dure.SplitLearning(clients=3, batch_size=SIZE),
        dure.SplitLearning(clients=3, batch_size=SIZE, handover="server"),
        dure.ParallelSplit(clients=3, batch_size=SIZE),
        dure.SplitFed(clients=3, batch_size=SIZE),
        dure.SplitFed(clients=3, batch_size=SIZE, version=2),
    ],
    ids=["peer", "server", "parallel", "v1", "v2"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    strategy: Split, shape: str, tmp_path: Any
) -> None:
    task = dure.joined(
        *two_files(shape, OPTIMIZERS["adam"], make_head=noisy, make_tail=noisy_tail(shape))
    )
    whole = trained(task, strategy, rounds=3)
    trained(task, strategy, rounds=1, out=tmp_path / "run", checkpoint_every=1)
    resumed = dure.resume(tmp_path / "run", stop=dure.Stop(rounds=3), task=task)
    assert apart(whole, resumed) == 0
    # They draw: another seed gives other weights, and statistics have moved.
    assert int(whole.model.state_dict()["head.1.num_batches_tracked"]) > 0


class Replaces(nn.Module):
    """Counts its passes in a buffer that it makes anew each time."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8).double()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes = self.passes + 1
        result: Tensor = self.layer(inputs)
        return result


def test_a_buffer_in_whose_place_another_is_put_is_the_clients_own() -> None:
    task = dure.joined(*two_files(make_head=Replaces))
    run = trained(task, dure.SplitFed(clients=2, batch_size=13), rounds=1)
    # Two steps of each client, averaged: what one has counted is none of the other's.
    assert float(run.model.state_dict()["head.passes"]) == 2


# What is refused before any work


class Ragged(nn.Module):
    """Gives a value of the whole batch besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8).double()

    def forward(self, inputs: Tensor) -> Any:
        values = self.layer(inputs)
        return values, values.mean(dim=0, keepdim=True)


class Spread(nn.Module):
    """Its tail."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()

    def forward(self, given: Any) -> Tensor:
        values, mean = given
        result: Tensor = self.layer(values - mean)
        return result


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8).double()

    def forward(self, inputs: Tensor) -> Any:
        return {self.layer(inputs)}


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8).double()

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs), len(inputs)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 8).double()

    def forward(self, inputs: Tensor) -> Any:
        return self.layer(inputs)


SHARED = nn.Linear(6, 6).double()


def shared() -> nn.Module:
    return nn.Sequential(SHARED, nn.Linear(6, 3).double())


def wrong_width() -> nn.Module:
    return double(nn.Linear(9, 3))


def single() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 3))


def two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, second, third, fourth = parameters
    return torch.optim.SGD([{"params": [first, second]}, {"params": [third, fourth]}], lr=0.1)


def elsewhere(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(SHARED.parameters(), lr=0.1)


REFUSED: dict[str, tuple[Callable[[], Any], Strategy, str]] = {
    "width": (
        lambda: two_files(make_tail=wrong_width),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        r"tail rejects what the head gives, float64 \(B, 8\).*9x3",
    ),
    "dtype": (
        lambda: two_files(make_tail=single),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        r"tail rejects what the head gives, float64 \(B, 8\).*Float",
    ),
    "end": (
        lambda: two_files("labels stay", make_end=wrong_width),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        r"end rejects what the tail gives, float64 \(B, 7\)",
    ),
    "examples": (
        lambda: two_files(make_head=Fails),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        "head rejects its examples",
    ),
    "a set": (
        lambda: two_files(make_head=Sets),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        "head returns a set, which cannot be sent",
    ),
    "a count": (
        lambda: two_files(make_head=Counts),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        "values that are not tensors have to be the same for every batch",
    ),
    "whole batches": (
        lambda: two_files(make_head=Ragged, make_tail=Spread),
        dure.ParallelSplit(clients=2, batch_size=SIZE),
        "cannot be joined",
    ),
    "tied": (
        lambda: two_files(make_head=lambda: SHARED, make_tail=shared),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        "head.weight and tail.0.weight are one tensor",
    ),
    "groups": (
        lambda: two_files(optimizer=two_groups),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        "optimizer of the head cannot be created with its 2 parameters",
    ),
    "another's": (
        lambda: two_files(optimizer=elsewhere),
        dure.SplitLearning(clients=2, batch_size=SIZE),
        "optimizer of the head has parameters that do not belong to the head",
    ),
    "all at once": (
        lambda: two_files(optimizer=torch.optim.LBFGS),  # type: ignore[arg-type]
        dure.SplitLearning(clients=2, batch_size=SIZE),
        "LBFGS",
    ),
    "another cut": (
        two_files,
        dure.SplitLearning(clients=2, batch_size=SIZE, cut=("2",)),
        "files, which already divide the model",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_fit_is_refused_by_name_before_any_work(why: str) -> None:
    make, strategy, said = REFUSED[why]
    with pytest.raises(ValueError, match=said):
        trained(dure.joined(*make()), strategy)


def test_what_cannot_be_one_batch_can_be_trained_in_turn() -> None:
    task = dure.joined(*two_files(make_head=Ragged, make_tail=Spread))
    trained(task, dure.SplitLearning(clients=2, batch_size=SIZE), rounds=1)


def test_the_loss_is_on_one_side() -> None:
    mine, theirs = two_files()
    u_head, u_tail = two_files("labels stay")
    with pytest.raises(ValueError, match="neither task has a loss"):
        dure.joined(mine, u_tail)
    with pytest.raises(ValueError, match="both tasks have a loss"):
        dure.joined(u_head, theirs)
    with pytest.raises(ValueError, match="has a loss but no end"):
        dure.HeadTask(model=head, loss=cross_entropy)
    with pytest.raises(ValueError, match="has an end"):
        dure.HeadTask(model=head, end=end)
    with pytest.raises(ValueError, match="TailTask has data"):
        dure.TailTask(model=tail, train=examples())
    with pytest.raises(ValueError, match="takes a HeadTask and a TailTask"):
        dure.joined(theirs, mine)  # type: ignore[arg-type]


def test_one_file_alone_is_not_trained_here() -> None:
    mine, theirs = two_files()
    for task in (mine, theirs):
        for strategy in (dure.SplitLearning(clients=2), dure.FedAvg(clients=2)):
            with pytest.raises(ValueError, match=r"has only the .*: to train it here"):
                trained(task, strategy)


def test_parts_with_optimizers_of_their_own_are_not_trained_as_one() -> None:
    mine, _ = two_files()
    other = dure.TailTask(model=tail, loss=cross_entropy, optimizer=OPTIMIZERS["adam"])
    with pytest.raises(ValueError, match="optimizers, schedules or fields"):
        trained(dure.joined(mine, other), dure.FedAvg(clients=2))


def frozen() -> nn.Module:
    return head().requires_grad_(False)


def plain() -> nn.Module:
    return nn.Identity()


@pytest.mark.parametrize("make", [frozen, plain])
def test_a_head_that_trains_nothing_is_told_of_and_the_tail_learns(
    make: Callable[[], nn.Module],
) -> None:
    def last() -> nn.Module:
        return double(nn.Linear(8, 3)) if make is frozen else double(nn.Linear(6, 3))

    task = dure.joined(*two_files(make_head=make, make_tail=last))
    with pytest.warns(UserWarning, match="the head has no trainable parameter"):
        run = trained(task, dure.SplitLearning(clients=2, batch_size=SIZE))
    first = seeded_model(task, 0).state_dict()
    assert not torch.equal(run.model.state_dict()["tail.0.weight"], first["tail.0.weight"])


def test_examples_that_pass_the_head_as_they_are_are_told_of() -> None:
    class Also(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 8).double()

        def forward(self, inputs: Tensor) -> Any:
            return [self.layer(inputs), inputs[:, :2]]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 3).double()

        def forward(self, given: Any) -> Any:
            return self.layer(torch.cat(given, dim=1))

    task = dure.joined(*two_files(make_head=Also, make_tail=Both))
    with pytest.warns(UserWarning, match="of the examples on unchanged"):
        trained(task, dure.SplitLearning(clients=2, batch_size=SIZE), rounds=1)


MEMORY: list[Tensor] = []


class Remembers(nn.Module):
    """A head that hands something on behind the back of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8).double()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs)
        MEMORY[:] = [result]
        return result


class Recalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()

    def forward(self, given: Tensor) -> Tensor:
        extra = MEMORY[0] if MEMORY and len(MEMORY[0]) == len(given) else given
        result: Tensor = self.layer(given + extra)
        return result


def test_what_goes_past_what_the_head_returns_is_found_before_the_first_step() -> None:
    MEMORY.clear()
    task = dure.joined(*two_files(make_head=Remembers, make_tail=Recalls))
    with pytest.raises(ValueError, match="something besides the head's output"):
        trained(task, dure.SplitLearning(clients=2, batch_size=SIZE))


# What the page says


def test_the_files_of_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "split.md").read_text()
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.M | re.S)
    written = {name: (tmp_path / name).write_text(body) for name, body in blocks}
    assert sorted(written) == ["both.py", "head.py", "tail.py"]
    lines = re.findall(r"^(dure \w+ both\.py:.*)$", page, re.M)
    assert len(lines) == 2
    monkeypatch.chdir(tmp_path)
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0


# Forms


def test_a_form_travels_as_json() -> None:
    def given(size: int) -> Any:
        return {"a": (torch.ones(size, 3, dtype=torch.int64), None), "b": [torch.ones(2, size), 1]}

    form = form_of(given(4), given(8), (4, 8), "the head")
    again = decoded(encoded(form))
    assert again == form
    assert str(form) == "{'a': (int64 (B, 3), None), 'b': [float32 (2, B), 1]}"
    assert [one.dim for one in form.crossings()] == [0, 1]
    tensors = [torch.zeros(6, 3, dtype=torch.int64), torch.zeros(2, 6)]
    whole = again.whole(tensors)
    assert whole["a"][0] is tensors[0]
    assert whole["b"][1] == 1
    form.check(tensors, 6, "the head")
    with pytest.raises(ValueError, match="has to return"):
        form.check(tensors, 5, "the head")


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b'{"nest":{"type":"tensor"},"tensors":[],"few":2,"many":4}',
        b'{"nest":{"type":"tensor"},"tensors":[{"dtype":"save","few":[2],"many":[4],"order":[0],'
        b'"differentiable":true}],"few":2,"many":4}',
        b'{"nest":{"type":"tensor"},"tensors":[{"dtype":"float32","few":[-2],"many":[4],'
        b'"order":[0],"differentiable":true}],"few":2,"many":4}',
    ],
)
def test_what_is_no_form_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a form of a head's output"):
        decoded(text)

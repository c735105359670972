"""Values of a wrong kind are said in one sentence, wherever they are given."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import pytest
import torch
from torch import nn

import dure
from dure import catalog
from dure.arguments import above, at_least, between, check_fields, check_ranges
from dure.run.registry import TEXTS, strategy_class
from small import small_task


class HasName(Protocol):
    name: str


def trained(strategy: Any, world: Any = None, stop: Any = None, **more: Any) -> Callable[[], Any]:
    return lambda: dure.train(small_task(), strategy, world, stop, **more)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (trained("fed-prox"), "the strategy is the str 'fed-prox': give dure.FedProx()"),
        (trained("fed-prix"), "there is no strategy 'fed-prix', did you mean 'fed-prox'"),
        (trained(dure.FedAvg), "FedAvg is a class: give an instance"),
        (trained(dure.FedAvg(), "simulated"), "the world is the str 'simulated'"),
        (trained(dure.LocalSGD(), 3), "the world is 3: give dure.Processes"),
        (trained(dure.LocalSGD(), dure.Processes), "Processes is a class"),
        (trained(dure.FedAvg(), stop=7), "stop is 7: give dure.Stop"),
        (trained(dure.FedAvg(), stop=dure.Stop(rounds="7")), "rounds is '7', but it has to be"),  # type: ignore[arg-type]
        (trained(dure.FedAvg(), seed="7"), "seed is '7', but it has to be an integer"),
        (trained(dure.FedAvg(), out=7), "out is 7, but it has to be a path"),
        (trained(dure.FedAvg(), evaluate_every=0.5), "evaluate_every is 0.5"),
        (trained(dure.FedAvg(), on_progress=7), "on_progress is 7, but it has to be a function"),
        (lambda: dure.train("heart", dure.FedAvg()), "give dure.load_task"),  # type: ignore[arg-type]
        (lambda: dure.compare(small_task(), dure.FedAvg()), "give a list of strategies"),  # type: ignore[arg-type]
        (lambda: dure.compare(small_task(), [()]), "is not a pair"),  # type: ignore[list-item]
        (lambda: dure.compare(small_task(), ["diloco"]), "give dure.DiLoCo()"),  # type: ignore[list-item]
        (lambda: dure.resume(7), "folder is 7, but it has to be a path"),  # type: ignore[arg-type]
        (lambda: dure.load_task(7), "load a task by its name"),  # type: ignore[arg-type]
        (lambda: dure.load_task("digits", lr="0.1"), "lr is '0.1', but it has to be a number"),
        (
            trained(dure.SplitLearning(cut=(1,))),
            "cut is \\(1,\\), but .* each element of which is a",
        ),  # type: ignore[arg-type]
        (
            lambda: dure.SecureAggregation(range=float("inf")),
            "range is inf, but it has to be greater than 0",
        ),
        (lambda: small_task(loss=nn.MSELoss), "Task\\(loss=MSELoss\\) is a class"),
        (lambda: small_task(train="digits"), "data of the type str are not supported"),
        (
            lambda: small_task(train={"inputs": torch.ones(3)}),
            "data of the type dict are not supported",
        ),
    ],
)
def test_a_slip_is_answered_by_what_to_write(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: dure.Stop(epoch=3), "Stop has no 'epoch', did you mean 'epochs'"),  # type: ignore[call-arg]
        (lambda: dure.DataParallel(clip_norm=1.0), "it is an argument of dure.Task"),  # type: ignore[call-arg]
        (lambda: dure.FedAvg(epochs=3), "it is an argument of dure.Stop"),  # type: ignore[call-arg]
        (lambda: dure.Task(modle=nn.Identity), "Task has no 'modle', did you mean 'model'"),  # type: ignore[call-arg]
        (lambda: dure.Simulated(engin="loop"), "did you mean 'engine'"),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_argument_is_answered_by_the_one_that_is_meant(
    call: Callable[[], Any], sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        call()


def test_copies_pickles_and_signatures_of_settings_are_as_ever() -> None:
    stop = dure.Stop(epochs=2)
    assert copy.deepcopy(stop) == pickle.loads(pickle.dumps(stop)) == dataclasses.replace(stop)
    assert list(inspect.signature(dure.Stop).parameters)[:2] == ["epochs", "steps"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dure.FedAvg(fraction="0.5"), "fraction is '0.5', but it has to be a number"),  # type: ignore[arg-type]
        (lambda: dure.FedAvg(clients=2.5), "clients is 2.5, but it has to be an integer or"),  # type: ignore[arg-type]
        (lambda: dure.FedAvg(clients=True), "clients is True"),
        (lambda: dure.FedAvg(partition=7), "partition is 7, but it has to be a Partition"),  # type: ignore[arg-type]
        (lambda: dure.DataParallel(overlap=16), "it has to be 'auto'"),  # type: ignore[arg-type]
        (lambda: dure.Parallel(mesh={"data": 2}), "it has to be a Mesh"),  # type: ignore[arg-type]
        (lambda: dure.FedBuff(buffer=10**30), "buffer is 10+, which is too large for a count"),
        (lambda: dure.LocalSGD(period=10**20), "period is 10+, which is too large for a count"),
        (lambda: dure.FedAvg(server_lr=1e308), r"server_lr is 1e\+308, which would cause overflow"),
        (lambda: dure.FedProx(mu=math.nan), "mu is nan, which is not a number"),
    ],
)
def test_a_field_of_a_strategy_is_of_its_type(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dure.train(small_task(), make(), stop=dure.Stop(rounds=1))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dure.Dirichlet("a"), "alpha is 'a', but it has to be a number"),  # type: ignore[arg-type]
        (lambda: dure.TopK("a"), "ratio is 'a', but it has to be a number"),  # type: ignore[arg-type]
        (lambda: dure.Processes("2"), "ranks is '2', but it has to be an integer or None"),  # type: ignore[arg-type]
        (lambda: dure.Threads("2"), "threads is '2', but it has to be an integer or None"),  # type: ignore[arg-type]
    ],
)
def test_a_field_of_a_setting_is_of_its_type(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_field_of_any_type_takes_anything() -> None:
    @dataclass(frozen=True)
    class Own:
        anything: Any = None
        method: HasName | None = None

    check_fields(Own(anything="seven", method=7))  # type: ignore[arg-type]


TEXT_OF = {"partition": "label-shards:3", "compression": "top-k:0.25", "selection": "poisson"}


@pytest.mark.parametrize("field", TEXT_OF)
def test_python_takes_the_texts_that_the_command_line_takes(field: str) -> None:
    having = [
        kind
        for kind in map(strategy_class, catalog.SYSTEMS)
        if hasattr(kind, "__match_args__") and field in kind.__match_args__
    ]
    assert having
    for kind in having:
        value = getattr(kind(**{field: TEXT_OF[field]}), field)
        assert isinstance(value, tuple(TEXTS))
        assert str(value) == TEXT_OF[field]


@dataclass(frozen=True)
class WithRanges:
    count: int = field(default=1, metadata=at_least(1))
    rate: float = field(default=0.5, metadata=above(0, finite=True))
    share: float = field(default=0.0, metadata=between(0, 1, "[)"))
    limit: int | None = field(default=None, metadata=at_least(0))


@dataclass(frozen=True)
class WithOtherDefault(WithRanges):
    count: int = 5


@pytest.mark.parametrize("kind", [WithRanges, WithOtherDefault])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, None),
        ({"count": 1, "rate": 1e-9, "share": 0.9, "limit": 0}, None),
        ({"count": 0}, "count is 0, but it has to be 1 or more"),
        ({"rate": 0.0}, "rate is 0.0, but it has to be greater than 0 and finite"),
        ({"rate": math.inf}, "rate is inf, but it has to be greater than 0 and finite"),
        ({"share": 1.0}, "share is 1.0, but it has to be in [0, 1)"),
        ({"share": math.nan}, "share is nan, but it has to be in [0, 1)"),
        ({"limit": -1}, "limit is -1, but it has to be 0 or more"),
    ],
)
def test_a_range_is_declared_with_its_field_and_kept_with_another_default(
    kind: type[WithRanges], given: dict[str, Any], sentence: str | None
) -> None:
    refused = None
    try:
        check_ranges(kind(**given))
    except ValueError as error:
        refused = str(error)
    assert refused == sentence


class NeedsLoss(torch.optim.SGD):
    def step(self, loss: Callable[[], float]) -> None:  # type: ignore[override]
        super().step(loss)


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (torch.optim.LBFGS, "LBFGS.step needs closure"),
        (NeedsLoss, "NeedsLoss.step needs loss"),
        (partial(torch.optim.SGD, lr=1e300), r"the learning rate is 1e\+300"),
        (partial(torch.optim.SGD, lr=math.inf), "the learning rate is inf"),
        (lambda parameters: None, "returned a NoneType, which has no step"),
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [dure.SingleWorker(), dure.ZeRO(), dure.FedAvg(clients=2), dure.SplitFed(clients=2)],
    ids=lambda one: one.name,
)
def test_an_optimizer_that_cannot_step_is_refused_before_any_work(
    optimizer: Any, sentence: str, strategy: dure.Strategy
) -> None:
    begun: list[Any] = []
    with pytest.raises(ValueError, match=sentence):
        dure.train(small_task(optimizer=optimizer), strategy, on_progress=begun.append)
    assert not begun

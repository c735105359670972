"""States of optimizers that lay on a disk: what was written is loaded, what was not is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from dure.tensors.optimizer_state import load_optimizer

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=torch.tensor(0.1)),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5),
    "rprop": partial(torch.optim.Rprop, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(4, 4))


def stepped(make: Callable[[Any], Optimizer]) -> tuple[nn.Module, Optimizer]:
    """After two steps, in which the last layer was not used."""
    network = model()
    optimizer = make(network.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = network[:2](torch.ones(1, 3)).sum().square()  # type: ignore[index]
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    return network, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_has_written_is_loaded(name: str) -> None:
    _, optimizer = stepped(OPTIMIZERS[name])
    written = copy.deepcopy(optimizer.state_dict())
    other = OPTIMIZERS[name](model().parameters())
    load_optimizer(other, written)
    again = other.state_dict()
    assert repr(again) == repr(written)


def of_state(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """Of the state of the second parameter, a bias of two."""
    return lambda written: change(written["state"][1])


def of_group(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda written: change(written["param_groups"][0])


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "other shape": of_state(lambda own: own.update(exp_avg=torch.zeros(3))),
    "empty": of_state(lambda own: own.update(exp_avg=torch.zeros(0))),
    "a number": of_state(lambda own: own.update(exp_avg=1.0)),
    "missing": of_state(lambda own: own.pop("exp_avg")),
    "one more": of_state(lambda own: own.update(more=torch.zeros(2))),
    "a count of one bit": of_state(lambda own: own.update(step=torch.tensor(True))),
    "no mapping": lambda written: written["state"].update({1: 7}),
    "no names": lambda written: written["state"].update({1: {3: torch.zeros(2)}}),
    "no such parameter": lambda written: written["state"].update({99: {}}),
    "a parameter that is true": lambda written: written["state"].update(
        {True: written["state"].pop(1)}
    ),
    "no rate": of_group(lambda group: group.pop("eps")),
    "a rate of text": of_group(lambda group: group.update(lr="fast")),
    "no finite rate": of_group(lambda group: group.update(lr=float("nan"))),
    "one beta": of_group(lambda group: group.update(betas=(0.9,))),
    "a switch of text": of_group(lambda group: group.update(amsgrad="no")),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_it_cannot_have_written_is_refused(what: str) -> None:
    _, optimizer = stepped(OPTIMIZERS["adam"])
    written = copy.deepcopy(optimizer.state_dict())
    DAMAGE[what](written)
    with pytest.raises(ValueError, match=r"."):
        load_optimizer(OPTIMIZERS["adam"](model().parameters()), written)


class Own(Optimizer):
    """A user's own, which keeps what it likes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter] = {f"kept {place}": torch.ones(place + 5)}


def test_what_a_user_s_own_has_written_is_its_own_affair() -> None:
    _, optimizer = stepped(Own)
    other = Own(model().parameters())
    load_optimizer(other, copy.deepcopy(optimizer.state_dict()))
    assert repr(other.state_dict()) == repr(optimizer.state_dict())

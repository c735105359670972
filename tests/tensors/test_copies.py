"""A copy has nothing in common with its model; a model that cannot have one is left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dure.tasks import models
from dure.tensors.copies import copy_of


def plain(**what: object) -> nn.Module:
    """A layer that holds something."""
    model = nn.Linear(3, 3)
    for name, value in what.items():
        setattr(model, name, value)
    return model


def knowing(wrap: Callable[[nn.Module], object]) -> nn.Module:
    """A layer that holds something that knows it."""
    model = nn.Linear(3, 3)
    model.known = wrap(model)
    return model


def hooked() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda gradient: gradient)
    return model


def overlapping() -> nn.Module:
    model = nn.Linear(3, 3)
    model.other = nn.Parameter(model.weight.data)
    return model


def hidden(model: nn.Module) -> object:
    """In a list and a layer that torch does not see."""
    layer = nn.ReLU()
    layer.known = lambda inputs: model(inputs)
    return [layer]


class Single(nn.Linear):
    """There is one of it, whatever is copied."""

    def __deepcopy__(self, memo: object) -> nn.Module:
        return self


class Forgetful(nn.Linear):
    """What it has computed once does not travel."""

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "cache"}


def nest(depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(3, 3)
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


COPIED = {
    "mlp": partial(models.TwoNN, 8),
    "cnn": partial(models.CNN, size=8),
    "resnet": models.ResNet,
    "lstm": partial(models.CharLSTM, 20),
    "transformer": partial(models.Transformer, 20),
    "batch norm": partial(nn.BatchNorm1d, 3),
    "encoder": partial(nn.TransformerEncoderLayer, 8, 2),
    "function": partial(plain, act=F.relu, half=partial(torch.mul, 0.5)),
    "method": partial(knowing, lambda model: model.forward),
    "settings": partial(plain, config={"width": [1, 2], "dtype": torch.float32}),
}
REFUSED = {
    "closure": partial(knowing, lambda model: lambda inputs: model(inputs)),
    "default": partial(knowing, lambda model: lambda inputs, layer=model: layer(inputs)),
    "hidden closure": partial(knowing, hidden),
    "hook of a tensor": hooked,
    "overlapping": overlapping,
    "generator": partial(plain, draws=torch.Generator()),
    "lazy": partial(nn.LazyLinear, 3),
    "one of its kind": partial(Single, 3, 3),
    "left out": partial(Forgetful, 3, 3),
    "built-in method": partial(knowing, lambda model: model.weight.mul),
    "too deep": partial(nest, 400),
}


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_computes_the_same_and_shares_nothing(name: str) -> None:
    model = COPIED[name]()
    twin = copy_of(model)
    assert twin is not None
    assert twin.state_dict().keys() == model.state_dict().keys()
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    for mine, theirs in zip(twin.modules(), model.modules(), strict=True):
        assert mine is not theirs


def test_a_method_that_a_model_holds_is_the_copys_own() -> None:
    model = COPIED["method"]()
    twin = copy_of(model)
    assert twin is not None
    assert twin.known.__self__ is twin


def test_what_parameters_know_of_each_other_is_the_copys_own() -> None:
    model = nn.Linear(3, 3)
    model.weight.partner = model.bias
    model.weight.seen = [1]
    twin = copy_of(model)
    assert twin is not None
    assert twin.weight.partner is twin.bias
    twin.weight.seen.append(2)
    assert model.weight.seen == [1]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_something_in_it_knows_has_no_copy(name: str) -> None:
    assert copy_of(REFUSED[name]()) is None


def test_a_copy_may_lie_in_the_memory_of_the_parameters_with_gradients_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad = False
    twin = copy_of(model, same_parameters=True)
    assert twin is not None
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert mine is not theirs
        assert mine.data_ptr() == theirs.data_ptr()
        assert mine.requires_grad == theirs.requires_grad
    twin(torch.randn(4, 3)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model[1].num_batches_tracked == 0, "buffers are the copy's own"


def test_parameters_that_are_tied_are_one_in_such_a_copy_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    twin = copy_of(model, same_parameters=True)
    assert isinstance(twin, nn.Sequential)
    assert twin[1].weight is twin[0].weight

"""What is gathered together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dure.parallel.zero.units import UnitSpec, plan_units


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)
    )


class Vision(nn.Module):
    """Attention uses its output layer's weight itself, and so stays whole; the token is the model's
    own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(8))
        self.words = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 32) for _ in range(2))
        self.head = nn.Linear(8, 10)


def modules(model: nn.Module, units: UnitSpec) -> list[list[str]]:
    return [plan.modules for plan in plan_units(model, units)]


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (None, [[""]]),
        (300, [["0"], ["2"], ["4"]]),
        (500, [["0"], ["2", "4"]]),
        (1, [["0"], ["2"], ["4"]]),
        ([nn.Linear], [["0"], ["2"], ["4"]]),
    ],
)
def test_small_neighbours_are_one_unit_and_large_modules_are_opened(
    units: UnitSpec, expected: list[list[str]]
) -> None:
    assert modules(mlp(), units) == expected


def test_what_a_module_that_was_opened_holds_itself_is_a_unit_around_the_others() -> None:
    plans = plan_units(Vision(), 400)
    assert (plans[0].modules, plans[0].parameters, plans[0].around) == ([""], ["token"], True)
    assert [plan.modules for plan in plans[1:]] == [
        ["words", "blocks.0.self_attn"],
        ["blocks.0.linear1"],
        ["blocks.0.linear2", "blocks.0.norm1", "blocks.0.norm2"],
        ["blocks.1.self_attn"],
        ["blocks.1.linear1"],
        ["blocks.1.linear2", "blocks.1.norm1", "blocks.1.norm2", "head"],
    ]


def test_kinds_of_modules_are_units_and_the_rest_is_one_around_them() -> None:
    plans = plan_units(Vision(), [nn.TransformerEncoderLayer])
    assert [plan.modules for plan in plans] == [[""], ["blocks.0"], ["blocks.1"]]
    assert plans[0].parameters == ["token", "words.weight", "head.weight", "head.bias"]


def test_a_shared_parameter_belongs_to_the_nearest_module_around_its_users() -> None:
    model = Vision()
    model.head.weight = model.words.weight
    plans = plan_units(model, 100)
    assert (plans[0].modules, plans[0].parameters, plans[0].around) == (
        [""],
        ["token", "words.weight"],
        True,
    )


@pytest.mark.parametrize(
    "units", [None, 1, 100, 400, 10**6, [nn.Linear], [nn.TransformerEncoderLayer]]
)
@pytest.mark.parametrize("make", [mlp, Vision])
def test_every_parameter_is_in_one_unit(make: type[nn.Module], units: UnitSpec) -> None:
    model = make()
    found = [name for plan in plan_units(model, units) for name in plan.parameters]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


def test_a_unit_holds_something() -> None:
    with pytest.raises(ValueError, match="a unit has 0 elements"):
        plan_units(mlp(), 0)

"""Parameters that are not trained: which they are, and that they stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dure.tensors.frozen import FrozenSnapshot, frozen_of, load_frozen


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([-torch.inf, torch.nan]), requires_grad=False)


def test_they_have_their_first_names_and_lie_in_the_memory_of_the_model() -> None:
    model = Tied()
    found = frozen_of(model)
    assert list(found) == ["scale", "mask", "first.weight"]
    found["first.weight"].fill_(7)
    assert bool((model.last.weight == 7).all())
    assert not any(one.requires_grad for one in found.values())


def test_those_of_another_model_are_taken_and_nothing_else() -> None:
    model, other = Tied(), Tied()
    bias = model.first.bias.detach().clone()
    load_frozen(model, frozen_of(other))
    assert torch.equal(model.first.weight, other.first.weight)
    assert torch.equal(model.first.bias, bias)
    other.last.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"last\.bias is frozen in one of two models"):
        load_frozen(model, frozen_of(other))


def test_nan_is_as_it_was_and_every_bit_counts() -> None:
    model = Tied()
    frozen = FrozenSnapshot(model)
    frozen.check()
    with torch.no_grad():
        model.first.bias.add_(1)  # trained: anybody may
    frozen.check()
    model.mask.data[0] = torch.inf
    with pytest.raises(ValueError, match="the parameter mask is frozen, but was changed"):
        frozen.check()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_numbers_of_every_width_are_compared(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)])
    frozen = FrozenSnapshot(model)
    assert frozen.changed() is None
    model[0].data.fill_(1)
    assert (frozen.changed() is None) == (model[0].numel() == 0)

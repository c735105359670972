"""Models whose tensors cannot be written: they train as in a loop that only reads them, or are
refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.tensors.writable import make_writable
from small import FEATURES, largest_difference, network, small_task


class Masked(nn.Module):
    """A network that multiplies its inputs with the first row of a mask."""

    mask: Tensor

    def __init__(self, mask: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.network = network()
        self.register_buffer("mask", mask, persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.network(inputs * self.mask[0])
        return scores


def row() -> Tensor:
    return torch.tensor([1.0, 0, 2, 1, 0, 1], dtype=torch.float64)


def expanded() -> Tensor:
    return row().expand(3, FEATURES)


def of_inference() -> Tensor:
    with torch.inference_mode():
        return row()[None] + 0


@pytest.mark.parametrize("mask", [expanded, of_inference])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    ("strategy", "stop"),
    [
        (dure.SingleWorker(None), dure.Stop(steps=2)),
        (dure.FedAvg(clients=2), dure.Stop(rounds=1)),
        (dure.SplitFed(clients=2), dure.Stop(rounds=1)),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_buffer_that_cannot_be_written_trains(
    mask: Callable[[], Tensor], persistent: bool, strategy: dure.Strategy, stop: dure.Stop
) -> None:
    runs = [
        dure.train(
            small_task(model=lambda make=make: Masked(make(), persistent)), strategy, stop=stop
        )
        for make in (mask, lambda: mask().clone())
    ]
    assert largest_difference(*runs) == 0


def test_a_buffer_in_a_file_that_is_only_read_gets_memory_of_its_own(tmp_path: Path) -> None:
    # Written into, it would end the process.
    np.save(tmp_path / "mask.npy", expanded().numpy())
    mapped = np.load(tmp_path / "mask.npy", mmap_mode="r")
    model = Masked(torch.from_numpy(mapped))
    make_writable(model)
    model.mask.zero_()
    assert mapped.sum() == 3 * row().sum()


def test_what_can_be_written_stays_where_it_is() -> None:
    model = Masked(torch.from_numpy(row().numpy()[None]))
    before = {name: one.data_ptr() for name, one in model.state_dict().items()}
    make_writable(model)
    assert {name: one.data_ptr() for name, one in model.state_dict().items()} == before


def test_one_tensor_under_two_names_stays_one() -> None:
    model = Masked(expanded())
    model.register_buffer("again", model.mask)
    make_writable(model)
    assert model.again is model.mask
    assert model.mask.is_contiguous()


def test_a_frozen_parameter_gets_memory_of_its_own() -> None:
    model = network()
    model.register_parameter("scale", nn.Parameter(expanded(), requires_grad=False))
    make_writable(model)
    model.load_state_dict(model.state_dict())
    assert not model.scale.requires_grad
    assert torch.equal(model.scale, expanded())


def test_a_trained_parameter_that_cannot_be_written_is_refused() -> None:
    def model() -> nn.Module:
        made = network()
        made.register_parameter("scale", nn.Parameter(expanded()))
        return made

    with pytest.raises(ValueError, match="the parameter scale cannot be trained"):
        dure.train(small_task(model=model), dure.SingleWorker(), stop=dure.Stop(steps=1))


def test_a_buffer_that_would_no_longer_follow_another_is_refused() -> None:
    def model() -> nn.Module:
        made = Masked(row()[None])
        made.register_buffer("heads", made.mask[0].expand(3, FEATURES))
        return made

    with pytest.raises(ValueError, match=r"heads cannot be loaded, .* shares memory with mask"):
        seeded_model(small_task(model=model), 0)

"""Activations, parameters and gradients in files: the same bits, whatever a model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from dure.memory.mapped import is_on_disk, pages_of
from dure.memory.offload.activations import OffloadedActivations
from dure.memory.offload.gradients import OffloadedGradients
from dure.memory.offload.offload_setting import Offload, parse_offload
from dure.memory.offload.parameters import OffloadedParameters, move_to_files
from dure.memory.offload.store import MappedFileStore


@pytest.fixture
def files() -> Iterator[MappedFileStore]:
    made = MappedFileStore(least=64)
    yield made
    made.close()


class Unusual(nn.Module):
    """Keeps views, parts of a tensor, and what is written in place; uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12, bias=False)
        self.tied.weight = self.second.weight
        self.norm = nn.BatchNorm1d(12)
        self.draws = nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        query, key, value = self.second(hidden).repeat(1, 3).chunk(3, dim=1)
        attended = torch.softmax(query @ key.t(), dim=1) @ value
        written = attended.clone().mul_(2).relu_()
        parts = [self.draws(written)[:, ::2].contiguous(), torch.tanh(written[:, 1::2])]
        return self.tied(torch.cat(parts, dim=1)).exp().pow(2)


def recurrent() -> nn.Module:
    return nn.LSTM(6, 12, num_layers=2, batch_first=False)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool1d(2)
    )


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    outputs = model(inputs)
    first: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return first


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("make", [Unusual, recurrent, convolution])
def test_gradients_have_the_same_bits(
    make: Callable[[], nn.Module], files: MappedFileStore
) -> None:
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    move_to_files(model, files)
    assert all(is_on_disk(one) == (one.nbytes >= 64) for one in model.parameters())
    OffloadedParameters(model, files)
    OffloadedGradients(model.parameters(), files)
    keeper = OffloadedActivations(files, torch.device("cpu"), model.parameters)
    for step in range(2):
        # Twice in a step: the second pass adds to gradients that lie in files.
        for part in range(2):
            inputs = torch.randn(20, 6)
            torch.manual_seed(10 * step + part)
            outputs_of(plain, inputs).sum().backward()
            torch.manual_seed(10 * step + part)
            with keeper.saving(inputs):
                outputs = outputs_of(model, inputs)
            outputs.sum().backward()
        for mine, other in zip(gradients_of(model), gradients_of(plain), strict=True):
            assert torch.equal(mine, other)
        large = [one.grad for one in model.parameters() if one.nbytes >= 64]
        assert all(one is not None and is_on_disk(one) for one in large)
        for one in (plain, model):
            one.zero_grad()
    assert not keeper._kept, "what autograd has used is free"


def test_activations_lie_in_files_that_are_used_again(files: MappedFileStore) -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    keeper = OffloadedActivations(files, torch.device("cpu"), model.parameters)
    inputs = torch.randn(20, 6)
    places = []
    for _ in range(2):
        with keeper.saving(inputs):
            outputs = model(inputs)
        kept = [reference() for reference in keeper._kept.values()]
        # Two results of tanh; a layer keeps the first of them too. The inputs stay.
        places.append({one.place.data_ptr() for one in kept if one is not None})
        assert all(one is not None and is_on_disk(one.place) for one in kept)
        del kept
        outputs.sum().backward()
    assert len(places[0]) == 2
    assert places[0] == places[1]


def test_gradients_of_gradients_have_the_same_bits(files: MappedFileStore) -> None:
    weight = torch.randn(12, 12, requires_grad=True)
    found = []
    for offloads in (False, True):
        keeper = OffloadedActivations(files, torch.device("cpu"), lambda: [weight])
        inputs = torch.ones(12, 12, requires_grad=True)
        with keeper.saving() if offloads else torch.enable_grad():
            outputs = torch.tanh(inputs @ weight).sum()
        (first,) = torch.autograd.grad(outputs, inputs, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), weight)[0])
    assert torch.equal(found[0], found[1])


def test_what_shares_memory_shares_it_in_a_file_too(files: MappedFileStore) -> None:
    model = nn.Module()
    flat = torch.arange(64, dtype=torch.float32)
    model.one = nn.Parameter(flat[:32])
    model.other = nn.Parameter(flat[32:].view(8, 4))
    model.register_buffer("whole", flat)
    move_to_files(model, files)
    with torch.no_grad():
        model.one.add_(1)
    assert torch.equal(model.whole[:32], model.one)
    assert model.other.untyped_storage().data_ptr() == model.one.untyped_storage().data_ptr()
    assert pages_of(model.other) is not None


def test_a_setting_is_written_as_it_is_read() -> None:
    assert parse_offload("activations, optimizer") == Offload(("optimizer", "activations"))
    assert str(parse_offload("activations,optimizer")) == "optimizer+activations"
    assert parse_offload(str(Offload())) == Offload()
    with pytest.raises(ValueError, match="'weights' cannot be offloaded"):
        parse_offload("weights")

"""Modules that are computed again for backward have the bits of those that are not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

from dure.machine.compiler import deferred_compiler
from dure.memory.live_storages import LiveStorages
from dure.memory.recomputation import recompute_modules
from dure.memory.recompute_choice import RecomputeChooser
from dure.memory.recompute_setting import as_recompute

WIDTH = 8


class Block(nn.Module):
    """A layer that draws, norms by its batch, and writes other buffers too."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 4 * width)
        self.norm = nn.BatchNorm1d(4 * width)
        self.back = nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("last", None)

    def forward(self, inputs: Tensor, *, factor: float = 1.0) -> Tensor:
        # What it reads is what an earlier pass has written.
        hidden = torch.tanh(self.norm(self.layer(inputs))) * self.scale.clone() * factor
        self.scale.mul_(0.9)
        # Another tensor in the buffer's place.
        self.last = inputs.detach().mean(dim=0)
        return inputs + torch.dropout(self.back(hidden), 0.3, self.training)


class Shared(nn.Module):
    """One block is called twice, and a weight is used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.block(self.one(inputs), factor=0.5)
        outputs: Tensor = self.two(self.block(hidden))
        return outputs


def chain() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(4)])


def passed(model: nn.Module) -> list[Tensor]:
    """The gradients and buffers after two steps."""
    torch.manual_seed(1)
    # Elsewhere torch would load its compiler.
    with deferred_compiler():
        for number in range(2):
            inputs = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(number))
            model(inputs).square().mean().backward()
    drawn = torch.rand(3)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [drawn, *model.buffers(), *(each for each in gradients if each is not None)]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (chain, ["0", "2"]),
        (chain, ["0.norm", "1", "2.layer", "3.back"]),
        (Shared, ["block"]),
        (Shared, ["one", "block.norm", "two"]),
    ],
)
def test_the_bits_are_those_of_a_step_without(
    make: Callable[[], nn.Module], names: list[str]
) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    recompute_modules(twin, names)
    right, tried = passed(model), passed(twin)
    assert len(right) == len(tried)
    assert all(map(torch.equal, right, tried))
    # Names, copies and evaluations are the same as ever.
    assert list(model.state_dict()) == list(twin.state_dict())
    other = copy.deepcopy(twin.eval())
    assert torch.equal(other(torch.ones(2, WIDTH)), twin(torch.ones(2, WIDTH)))


def test_what_is_computed_again_is_not_kept() -> None:
    model = nn.Sequential(*[Block(64) for _ in range(4)])
    inputs = torch.randn(100, 64)
    kept = []
    for names in ([], ["0", "1", "2", "3"]):
        twin = copy.deepcopy(model)
        recompute_modules(twin, names)
        with deferred_compiler(), LiveStorages([*twin.parameters(), inputs]) as live:
            outputs = twin(inputs)
            kept.append(live.bytes)
            del outputs
    # Four outputs and four buffers, where each block had kept its own.
    assert kept[1] < kept[0] / 4


def test_inputs_that_were_changed_since_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    recompute_modules(model, ["1"])
    hidden = model[0](torch.randn(3, 4))
    outputs = model[1](hidden)
    hidden.data.add_(0)
    outputs = model[2](outputs)
    with torch.no_grad():
        hidden.add_(1)
    with deferred_compiler(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_a_buffer_that_is_written_later_than_in_the_first_pass_is_an_error() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.writes = False

        def forward(self, inputs: Tensor) -> Tensor:
            if self.writes:
                self.seen.add_(1)
            return inputs.tanh()

    model = nn.Sequential(nn.Linear(2, 2), Later())
    recompute_modules(model, ["1"])
    with deferred_compiler():
        model(torch.ones(1, 2)).sum().backward()
    model[1].writes = True
    with pytest.raises(RuntimeError, match="module 1 writes a buffer"):
        model(torch.ones(1, 2))


def test_a_compiled_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0]._compiled_call_impl = lambda inputs: inputs
    with pytest.raises(ValueError, match="module 0 is compiled"):
        recompute_modules(model, ["0"])


@settings(max_examples=12, deadline=None)
@given(
    widths=some.lists(some.sampled_from([8, 16, 64]), min_size=2, max_size=6),
    part=some.floats(0.3, 1.0),
)
def test_a_choice_fits_its_budget_and_costs_no_more_than_all(
    widths: list[int], part: float
) -> None:
    layers: list[nn.Module] = []
    for width in widths:
        layers.append(nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)))
    model = nn.Sequential(*layers)
    chooser = RecomputeChooser(model, (torch.randn(64, 16), None), lambda outputs, _: outputs.sum())
    everything, least = chooser.of(()), chooser.least()
    assert least.peak <= everything.peak
    budget = int(part * everything.peak)
    found = chooser.within(budget)
    # What the least fits, something does.
    assert found is not None or budget < least.peak
    if found is not None:
        assert found.peak <= budget
        # Each module twice is a third more.
        assert found.extra <= 1 / 3 + 1e-9
    if budget >= everything.peak:
        assert found == everything


def test_text_and_truths_say_what_is_computed_again() -> None:
    model = chain()
    assert str(as_recompute("1, 2.*")) == "1+2.*"
    assert as_recompute("none") == as_recompute(False) == as_recompute(())
    assert as_recompute(True).all
    assert as_recompute(["1", "1.norm", "3*"]).names(model) == ("1", "3")
    with pytest.raises(ValueError, match="no module 'blocks'"):
        as_recompute("blocks").names(model)
    with pytest.raises(ValueError, match="cannot be combined with other names"):
        as_recompute("all,1")

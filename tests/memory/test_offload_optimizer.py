"""An optimizer whose state lies in files has the bits of the one whose state lies in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.optim import Optimizer

from dure.machine.compiler import deferred_compiler
from dure.memory.mapped import is_on_disk
from dure.memory.offload.optimizer import OffloadedSteps
from dure.memory.offload.store import MappedFileStore
from dure.parallel.optimizer_sharding import check_steps_apart, is_element_wise

Make = Callable[[list[nn.Parameter]], Optimizer]

MAKERS: dict[str, Make] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=0.1, amsgrad=True),
    "adamw": partial(optim.AdamW, lr=0.1, foreach=True),
    "fused": partial(optim.AdamW, lr=0.1, fused=True),
    "adagrad": partial(optim.Adagrad, lr=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.1, centered=True),
    "nadam": partial(optim.NAdam, lr=0.1),
    "asgd": partial(optim.ASGD, lr=0.1),
    "rprop": partial(optim.Rprop, lr=0.1),
}

PIECE = 64


@pytest.fixture(autouse=True, scope="module")
def without_compiler() -> Iterator[None]:
    """As in a run: a first step would load it."""
    with deferred_compiler():
        yield


@pytest.fixture
def files() -> Iterator[MappedFileStore]:
    made = MappedFileStore(least=64)
    yield made
    made.close()


def pair(sizes: list[int]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(len(sizes))
    first = [nn.Parameter(torch.randn(size, 3, generator=generator)) for size in sizes]
    return first, copy.deepcopy(first)


def give_gradients(step: int, *sets: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameters in zip(*sets, strict=True):
        gradient = torch.randn(parameters[0].shape, generator=generator)
        for one in parameters:
            one.grad = gradient.clone()


def same(first: Any, second: Any) -> bool:
    """Whether two trees of states have the same bits."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@settings(max_examples=25, deadline=None)
@given(
    maker=st.sampled_from(sorted(MAKERS)),
    sizes=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    unused=st.integers(0, 3),
    two_groups=st.booleans(),
)
def test_every_optimizer_has_the_same_bits_and_state(
    maker: str, sizes: list[int], unused: int, two_groups: bool
) -> None:
    files = MappedFileStore(least=64)
    plain, offloaded = pair(sizes)
    optimizers = []
    for parameters in (plain, offloaded):
        one = MAKERS[maker](parameters[:1] if two_groups else parameters)
        if two_groups and parameters[1:]:
            one.add_param_group({"params": parameters[1:], "lr": 0.01})
        optimizers.append(one)
    OffloadedSteps(optimizers[1], files, is_element_wise(optimizers[1]), piece=PIECE)
    for step in range(3):
        give_gradients(step, plain, offloaded)
        if unused < len(sizes) and step == 1:
            plain[unused].grad = offloaded[unused].grad = None
        for one in optimizers:
            one.step()
    files.close()
    assert same(plain, offloaded)
    assert same(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_large_state_lies_in_files_and_small_state_does_not(files: MappedFileStore) -> None:
    parameters, _ = pair([100, 2])
    optimizer = optim.Adam(parameters)
    OffloadedSteps(optimizer, files, element_wise=True, piece=PIECE)
    give_gradients(0, parameters)
    optimizer.step()
    large, small = (optimizer.state[one] for one in parameters)
    assert is_on_disk(large["exp_avg"])
    assert is_on_disk(large["exp_avg_sq"])
    assert not is_on_disk(small["exp_avg"])
    # A file is as long as what lies in it, so that nobody copies it into memory.
    assert large["exp_avg"].untyped_storage().nbytes() == large["exp_avg"].nbytes


def test_a_state_that_is_loaded_goes_on_in_files(files: MappedFileStore) -> None:
    plain, offloaded = pair([100, 40])
    first, second = optim.Adam(plain), optim.Adam(offloaded)
    give_gradients(0, plain, offloaded)
    first.step()
    second.step()
    state = copy.deepcopy(second.state_dict())
    resumed = optim.Adam(offloaded)
    steps = OffloadedSteps(resumed, files, element_wise=True, piece=PIECE)
    resumed.load_state_dict(state)
    steps.keep_all()
    assert is_on_disk(resumed.state[offloaded[0]]["exp_avg"])
    give_gradients(1, plain, offloaded)
    first.step()
    resumed.step()
    assert same(plain, offloaded)


def test_hooks_are_called_once_a_step_and_see_the_whole_groups(files: MappedFileStore) -> None:
    parameters, _ = pair([100, 40])
    optimizer = optim.Adam(parameters)
    OffloadedSteps(optimizer, files, element_wise=True, piece=PIECE)
    seen = []

    def look(given: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append((given is args[0], len(given.param_groups[0]["params"])))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    give_gradients(0, parameters)
    optimizer.step()
    assert seen == [(True, 2), (True, 2)]


def test_weights_that_lie_in_other_strides_are_updated_whole(files: MappedFileStore) -> None:
    plain = [nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last))]
    offloaded = copy.deepcopy(plain)
    optimizers = [optim.AdamW(plain), optim.AdamW(offloaded)]
    OffloadedSteps(optimizers[1], files, element_wise=True, piece=PIECE)
    for step in range(2):
        give_gradients(step, plain, offloaded)
        for one in optimizers:
            one.step()
    assert same(plain, offloaded)
    assert optimizers[1].state[offloaded[0]]["exp_avg"].stride() == plain[0].stride()


class ByTheNorm(optim.SGD):
    """Scales all updates by a norm over all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [one for group in self.param_groups for one in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        super().step()


def test_optimizers_that_look_at_all_parameters_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="state of ByTheNorm cannot be offloaded"):
        check_steps_apart(ByTheNorm([nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(ValueError, match=r"it is not a torch\.optim\.Optimizer"):
        check_steps_apart(object())
    check_steps_apart(optim.AdamW([nn.Parameter(torch.zeros(3))]))

"""The task's optimizer as a job begins: made without the compiler, and plain SGD in one call."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dure.federated.engines.optimizers import PlainSGD, is_plain, optimizer_of
from small import network, small_task

SGD = torch.optim.SGD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_sgd_has_the_bits_of_torch_s_and_passes_over_what_has_no_gradient(dtype):
    torch.manual_seed(0)
    first = network(dtype)
    second = network(dtype)
    second.load_state_dict(first.state_dict())
    theirs, ours = SGD(first.parameters(), lr=0.3), PlainSGD(SGD(second.parameters(), lr=0.3))
    for model in (first, second):
        generator = torch.Generator().manual_seed(1)
        for parameter in list(model.parameters())[1:]:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    for _ in range(3):
        theirs.step()
        ours.step()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    PlainSGD(SGD(network().parameters(), lr=0.3)).step()


@pytest.mark.parametrize(
    "setting", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"maximize": True}, {"fused": True}]
)
def test_what_is_more_than_a_learning_rate_is_not_plain(setting):
    parameters = list(network().parameters())
    assert is_plain(SGD(parameters, lr=0.1))
    assert not is_plain(SGD(parameters, lr=0.1, **setting))
    assert not is_plain(torch.optim.Adam(parameters))


def test_an_optimizer_that_somebody_listens_to_is_not_plain():
    optimizer = SGD(network().parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *given: None)
    assert not is_plain(optimizer)


def test_who_listens_to_all_optimizers_listens_to_a_client_s_too():
    optimizer = SGD(network().parameters(), lr=0.1)
    handle = register_optimizer_step_pre_hook(lambda *given: None)
    try:
        assert not is_plain(optimizer)
    finally:
        handle.remove()
    assert is_plain(optimizer)


def test_the_optimizer_is_the_one_that_the_task_makes():
    parameters: list[nn.Parameter] = list(network().parameters())
    made = optimizer_of(small_task(optimizer=partial(torch.optim.Adam, lr=0.5)), parameters)
    assert type(made) is torch.optim.Adam
    assert made.param_groups[0]["params"] == parameters
    assert made.param_groups[0]["lr"] == 0.5

"""A step's operations are counted without running the step."""

from __future__ import annotations

import torch
from torch import nn

from dure.data.examples import Examples
from dure.machine.threads import SMALL_STEP
from dure.tasks.flops import flops_per_step
from dure.tasks.models import CNN, CharLSTM
from small import small_task


def images(n: int) -> Examples:
    return Examples(torch.zeros(n, 1, 28, 28), torch.zeros(n, dtype=torch.int64))


def test_operations_are_those_of_the_products_forward_and_backward():
    linear = nn.Linear(7, 5)
    assert (
        flops_per_step(linear, Examples(torch.zeros(3, 7), torch.zeros(3)), 11)
        == 3 * 11 * 2 * 7 * 5
    )


def test_the_papers_cnn_is_large_and_a_small_network_is_small():
    task = small_task()
    assert (
        flops_per_step(task.model(), task.train, 10)
        < SMALL_STEP
        < flops_per_step(CNN(), images(2), 10)
    )


def test_recurrent_layers_count_for_each_position():
    text = Examples(torch.zeros(1, 80, dtype=torch.int64), torch.zeros(1, 80, dtype=torch.int64))
    model = CharLSTM(90)
    weights = sum(
        p.numel()
        for layer in model.modules()
        if isinstance(layer, nn.RNNBase)
        for p in layer.parameters()
    )
    assert flops_per_step(model, text, 1) > 3 * 2 * 80 * weights > SMALL_STEP
    assert not any(layer._forward_hooks for layer in model.modules())


def test_counting_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout()).double().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flops_per_step(model, small_task().train, 10)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_fails_is_left_to_fail_in_its_first_step():
    assert flops_per_step(nn.Linear(3, 2), small_task().train, 10) == float("inf")

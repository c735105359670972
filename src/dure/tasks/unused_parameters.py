"""Trained parameters that the loss does not reach: they get no gradient.

A backbone under `torch.no_grad()`, a spare layer, a branch for evaluation only. An optimizer skips
such a parameter, whatever its momentum and weight decay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.machine.devices import device_of_model, to_device
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.tasks.loss_shares import tensor_of

PIECE = 32
"""Examples that are tried at once."""


def parameters_without_gradient(task: Task, model: nn.Module, examples: int) -> list[str]:
    """Return the names of trained parameters without a gradient in a step of so many examples.

    The examples are drawn at random, and the trial ends as soon as each parameter has a gradient.
    model: not changed. After an error of the model or the loss the list is empty; training raises
    the error.
    """
    before = generators_state()
    try:
        seed_generators(0, "unreached", everything=True)
        twin = unused_copy(model, task, 0).train()
        train = examples_for(task)[0]
        order = torch.randint(len(train), (examples,)) + train.first
        return _without_gradient(task, twin, train, order)
    except Exception:
        return []
    finally:
        restore_generators(before)


def _without_gradient(task: Task, model: nn.Module, examples: Examples, order: Tensor) -> list[str]:
    device = device_of_model(model)
    loss = task.on(device).loss
    names: list[str] = []
    for piece in torch.split(order, PIECE):
        inputs, targets = to_device(examples.batch(piece), device)
        torch.autograd.backward(tensor_of(loss(model(inputs), targets)))
        names = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        if not names:
            break
    return names

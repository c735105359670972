"""Number of floating-point operations of a step of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from dure.data.examples import Examples
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import to_device
from dure.memory.file_backed_init import releasing_pass
from dure.tasks.modes import in_mode
from dure.tensors.compiled import without_compilation


@torch.no_grad()
def flops_per_step(model: nn.Module, examples: Examples, batch: float) -> float:
    """Return the floating-point operations of forward and backward over `batch` examples.

    Infinite if they cannot be counted: the model's first step then reports the error. Counted are
    the matrix products and convolutions of an example, in evaluation mode; the backward pass has
    twice as many as the forward pass.
    """
    inputs, _ = to_device(
        examples.batch(torch.tensor([examples.first])), next(model.parameters()).device
    )
    try:
        with in_mode(model, training=False), releasing_pass(model):
            # 1 forward; 2 backward: the gradients of the inputs, and those of the weights.
            return 3 * batch * forward_flops(model, inputs)
    except Exception:
        return float("inf")


def forward_flops(model: nn.Module, inputs: Any) -> float:
    """Return the floating-point operations of a forward pass over the inputs."""
    # torch's counter ignores recurrent layers: two operations for each weight and position.
    recurrent = 0.0

    def count(layer: nn.Module, given: Any, returned: Any) -> None:
        nonlocal recurrent
        data = given[0]
        packed = isinstance(data, PackedSequence)
        # A packed sequence has no padding: a row for each position. Else (B, T, features) or
        # similar.
        positions = data.data.shape[0] if packed else data.numel() / data.shape[-1]
        recurrent += 2 * positions * sum(parameter.numel() for parameter in layer.parameters())

    hooks = [
        layer.register_forward_hook(count)
        for layer in model.modules()
        if isinstance(layer, nn.RNNBase)
    ]
    try:
        # deferred_compiler: nothing is compiled here, so the compiler need not be loaded.
        with (
            deferred_compiler(),
            without_compilation(model),
            FlopCounterMode(display=False) as counter,
        ):
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return float(counter.get_total_flops()) + recurrent

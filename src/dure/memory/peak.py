"""Prediction of a step's peak memory, before training.

With tensors without data a step of a model takes no memory, and its peak equals that of the real
step: the memory of forward and backward in addition to parameters and buffers, which consists of
activations, gradients, and temporaries between two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dure.machine.compiler import deferred_compiler
from dure.memory.activations import fake_copy, fake_or_real, spare_copy
from dure.memory.live_storages import LiveStorages
from dure.memory.recomputation import recompute_modules


def step_peak(
    model: nn.Module,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    again: Sequence[str] = (),
    spare: bool = False,
) -> int:
    """Return the peak bytes of forward and backward, in addition to parameters and buffers.

    Args:
        model: The model.
        batch: Inputs and targets; they are not counted either.
        loss: Loss of outputs and targets.
        again: Names of the modules that are recomputed.
        spare: As for `dure.memory.activations.observe_call`.
    """

    def on_fakes() -> int:
        with fake_copy(model, batch) as (twin, given):
            return _peak(twin, given, loss, again)

    def on_data() -> int:
        with spare_copy(model, spare) as twin:
            return _peak(twin, batch, loss, again)

    return fake_or_real(model, on_fakes, on_data)


def _peak(
    model: nn.Module,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor],
    again: Sequence[str],
) -> int:
    recompute_modules(model, again)
    given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    live = LiveStorages([*model.parameters(), *model.buffers(), *given])
    inputs, targets = batch
    with deferred_compiler(), torch.enable_grad(), live:
        loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    return live.peak

"""How many threads a step deserves.

Threads share a step only through barriers, each of which costs microseconds on idle cores and
milliseconds on busy ones. Below `SMALL_STEP` floating-point operations that costs more than it
gains, so a small step gets one thread; evaluations, with their large batches, get all. The choice
depends on the model and the batch alone, not on a measurement: same seed, same bits.

Measured on two cores (a step of the digits MLP, 21 million operations; of the digits CNN, 390
million): one thread 0.8 and 13 ms, two threads 0.9 and 10 ms on idle cores, but 2.5 ms and more for
the MLP where others compute as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from dure.data.examples import Examples
from dure.machine.compiler import left_out
from dure.machine.devices import to_device

SMALL_STEP = 100e6


@torch.no_grad()
def flops_per_step(model: nn.Module, examples: Examples, batch: float) -> float:
    """Floating-point operations of forward and backward over `batch` examples; infinite if they
    cannot be counted.

    Counted are the matrix products and convolutions of one example, in evaluation mode; the
    backward pass has twice as many as the forward pass.
    """
    inputs, _ = to_device(examples.batch(torch.tensor([0])), next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        return 3 * batch * _forward_flops(model, inputs)
    except (
        Exception
    ):  # a model that cannot do this is told so by its first step, with a better message
        return float("inf")
    finally:
        model.train(was_training)


def _forward_flops(model: nn.Module, inputs: Any) -> float:
    """torch's counter does not look into recurrent layers: theirs are two for each weight and
    position."""
    recurrent = 0.0

    def count(layer: nn.Module, given: Any, returned: Any) -> None:
        nonlocal recurrent
        data = given[0]
        positions = (
            data.data.shape[0]
            if isinstance(data, PackedSequence)
            else data.numel() / data.shape[-1]
        )
        recurrent += 2 * positions * sum(parameter.numel() for parameter in layer.parameters())

    hooks = [
        layer.register_forward_hook(count)
        for layer in model.modules()
        if isinstance(layer, nn.RNNBase)
    ]
    try:
        with left_out(), FlopCounterMode(display=False) as counter:
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return float(counter.get_total_flops()) + recurrent


def threads_for(flops: float) -> int:
    """One thread if a step has so few operations, otherwise as many as torch has."""
    return 1 if flops < SMALL_STEP else torch.get_num_threads()


def set_own_threads(count: int) -> None:
    """How many threads the operators of the calling thread use.

    OpenMP and MKL keep that number for every thread. torch also remembers it for threads that have
    not computed yet, which take it over at their first operation; so this one has its first
    operation before, and whoever starts threads says its own number once more after they have
    called this.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads inside the block; None leaves them as they are."""
    if count is None or count == (before := torch.get_num_threads()):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

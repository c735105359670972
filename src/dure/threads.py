"""How many threads a step deserves.

Threads share a step only through barriers, each of which costs microseconds on idle cores and milliseconds on busy
ones. Below `SMALL_STEP` floating-point operations that costs more than it gains, so a small step gets one thread. The
choice depends on the model and the batch alone, not on a measurement: same seed, same bits.

Measured on two cores (a step of the digits MLP, 21 million operations; of the digits CNN, 390 million): one thread 0.8
and 13 ms, two threads 0.9 and 10 ms on idle cores, but 2.5 ms and more for the MLP where others compute as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dure.data.examples import Examples

SMALL_STEP = 100e6


@torch.no_grad()
def flops_per_step(model: nn.Module, examples: Examples, batch: int) -> float:
    """Floating-point operations of forward and backward over `batch` examples; infinite if they cannot be counted.

    Counted are the matrix products and convolutions of one example, in evaluation mode; the backward pass has twice
    as many as the forward pass.
    """
    inputs, _ = examples.batch(torch.tensor([0]))
    was_training = model.training
    model.eval()
    try:
        with FlopCounterMode(display=False) as counter:
            model(inputs)
    except Exception:  # a model that cannot do this is told so by its first step, with a better message
        return float("inf")
    finally:
        model.train(was_training)
    return float(3 * batch * counter.get_total_flops())


@contextmanager
def enough_threads(flops: float) -> Iterator[None]:
    """One thread inside the block if a step has so few operations, otherwise as many as there were."""
    before = torch.get_num_threads()
    if flops < SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

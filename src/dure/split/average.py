"""Weighted mean of the states of several sides.

w = sum of n_k/n · w_k, summed in float64 in the order of clients
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.split.messages import SideState


def mean(owns: Sequence[SideState], weights: Sequence[float]) -> SideState:
    """Return the weighted mean of weights and buffers, with an empty optimizer state.

    Integer buffers, such as the number of batches seen, are those of the first side.
    """
    return SideState(
        weights=_means([one.weights for one in owns], weights),
        buffers=_means([one.buffers for one in owns], weights),
        optimizer=tuple({} for _ in owns[0].optimizer),
        groups=(),
    )


def _means(tensors: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> tuple[Tensor, ...]:
    total = sum(weights)
    found = []
    for each in zip(*tensors, strict=True):
        if not each[0].is_floating_point():
            found.append(each[0].clone())
            continue
        sums = torch.zeros_like(each[0], dtype=torch.float64)
        for tensor, weight in zip(each, weights, strict=True):
            sums.add_(tensor, alpha=weight / total)
        found.append(sums.to(each[0].dtype))
    return tuple(found)

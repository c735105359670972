"""Many tensors as one: a flat buffer and views into it.

One message is faster than many, and one vector operation faster than a loop over parameters. A
model's tensors of different dtypes are kept in one buffer a dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def views_of(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of the one-dimensional `buffer`, shaped like the tensors `like`."""
    pieces: list[Tensor] = []
    start = 0
    for tensor in like:
        pieces.append(buffer[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return pieces


def by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """The tensors grouped by dtype, in order of first appearance."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class FlatParameters:
    """A model's trained parameters in one buffer a dtype; the model goes on using them as views.

    Setting the weights, taking them, or taking a difference is then one operation on `buffers`. A
    parameter that the model uses twice is there once. Frozen parameters stay where they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.buffers: list[Tensor] = []
        self.names: list[list[tuple[str, tuple[int, ...]]]] = []
        """What lies in each buffer, one after another: the parameters' names and shapes."""
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in by_dtype(trained_of(model)).values():
            self.names.append([(known[id(one)], tuple(one.shape)) for one in group])
            buffer = torch.cat([parameter.detach().reshape(-1) for parameter in group])
            for parameter, view in zip(group, views_of(buffer, group), strict=True):
                # The parameter stays the same object: optimizers, hooks and modules still hold it.
                parameter.data = view
            self.buffers.append(buffer)

    def copy(self) -> list[Tensor]:
        """The weights as they are now, a tensor for each buffer."""
        return [buffer.clone() for buffer in self.buffers]

    def load(self, values: Sequence[Tensor]) -> None:
        """Sets the weights to `values`, which are what `copy` returned, or like it."""
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)

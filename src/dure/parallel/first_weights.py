"""The first weights: all ranks of a group begin with those of rank 0.

They mostly have them already, since they draw under the same seed. Models that are read from a
file, or that draw otherwise, may differ, and nothing would show it.

What is sent travels in pieces, so that no second copy is needed, of the whole model or of a tensor.
Bookkeeping, which the meter does not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor, nn

from dure.collectives.group import Group
from dure.memory.mapped import LEAST, release

_PIECE = LEAST // 2
"""Bytes of a piece: too few for a file of their own, where what is made lies in files."""


def share_weights(model: nn.Module, group: Group) -> None:
    """Rank 0's parameters and buffers become everybody's. All ranks call it."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        for piece in _pieces(tensor.detach()):
            group.broadcast_values([piece], counted=False)
        # Of a model in files, what was looked at need not stay in memory.
        release([tensor])


def _pieces(tensor: Tensor) -> Iterable[Tensor]:
    """A tensor in views; one with gaps is one piece."""
    if not tensor.is_contiguous():
        return [tensor]
    flat = tensor.view(-1)
    most = _PIECE // tensor.element_size()
    return [flat[start : start + most] for start in range(0, len(flat), most)]

"""Initial weights: all ranks of a group begin with the weights of rank 0.

The ranks usually have the same weights already, because they draw under the same seed. Models that
are read from a file, or that draw in another way, may differ without a visible symptom.

Rank 0 broadcasts each tensor in pieces, so that neither the model nor a tensor needs a second
copy. The meter does not count these messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor, nn

from dure.collectives.group import Group
from dure.memory.mapped import LEAST, release_pages

_PIECE = LEAST // 2
"""Bytes of a piece: below the size at which `dure.memory.mapped` allocates a file."""


def share_weights(model: nn.Module, group: Group) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks. All ranks call this function."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        for piece in _pieces(tensor.detach()):
            group.broadcast_values([piece], counted=False)
        # Pages of a memory-mapped model that were read need not stay in memory.
        release_pages([tensor])


def _pieces(tensor: Tensor) -> Iterable[Tensor]:
    """Return flat views that cover a tensor; a tensor with gaps is returned as a single piece."""
    if not tensor.is_contiguous():
        return [tensor]
    flat = tensor.view(-1)
    most = _PIECE // tensor.element_size()
    return [flat[start : start + most] for start in range(0, len(flat), most)]

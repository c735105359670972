"""Buffers such as batch-norm statistics: one rank speaks for all, and what its forward pass has changed is broadcast.

That rank is rank 0, as in torch's DistributedDataParallel; if it has run out of data, the first that has not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dure.collectives.group import Group


class Buffers:
    """The buffers of a model, and how they were when they were last the same on all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen = [buffer.clone() for buffer in model.buffers()]

    def __len__(self) -> int:
        return len(self._seen)

    def changed(self) -> list[bool]:
        """Which have changed since. Batch norm writes without telling autograd's version, so values are compared."""
        return [not torch.equal(now, seen) for now, seen in zip(self.model.buffers(), self._seen, strict=True)]

    @torch.no_grad()
    def take(self, group: Group, changed: Sequence[bool], root: int = 0) -> None:
        """Broadcasts those that `changed` names, the same on every rank, from `root`."""
        chosen = [buffer for buffer, one in zip(self.model.buffers(), changed, strict=True) if one]
        group.broadcast_values(chosen, root=root)
        for position, buffer in enumerate(self.model.buffers()):
            if changed[position]:
                self._seen[position] = buffer.clone()

"""Buffers such as batch-norm statistics: one rank speaks for all, and what its forward pass has
changed is broadcast.

That rank is rank 0, as in torch's DistributedDataParallel; if it has run out of data, the first
that has not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dure.collectives.group import Group
from dure.tensors.buffers import Buffers


def check_weights_stay(model: nn.Module, workers: int | None) -> None:
    """Raises ValueError for a model whose forward passes change parameters: each replica would
    change its own."""
    for name, module in model.named_modules() if workers != 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name or 'the model'} has max_norm, so that forward passes change its weight, "
                f"and replicas that see "
                "other examples would go apart: normalise in the model's forward, or take "
                "single-worker"
            )


class Speaker:
    """The buffers of a model, and how they were when they were last the same on all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.buffers = model, Buffers(model)
        self._seen = [buffer.clone() for buffer in self.buffers.of(model)]

    def __len__(self) -> int:
        return len(self.buffers)

    def changed(self) -> list[bool]:
        """Which have changed since. Batch norm writes without telling autograd's version, so values
        are compared."""
        return [
            not torch.equal(now, seen)
            for now, seen in zip(self.buffers.of(self.model), self._seen, strict=True)
        ]

    @torch.no_grad()
    def take(self, group: Group, changed: Sequence[bool], root: int = 0) -> None:
        """Broadcasts those that `changed` names, the same on every rank, from `root`."""
        now = self.buffers.of(self.model)
        group.broadcast_values(
            [buffer for buffer, one in zip(now, changed, strict=True) if one], root=root
        )
        for position, buffer in enumerate(now):
            if changed[position]:
                self._seen[position] = buffer.clone()

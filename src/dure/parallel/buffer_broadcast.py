"""Broadcast of buffers, such as batch-norm statistics, from one rank to all.

The buffers that a forward pass of the root rank changed are broadcast. The root is rank 0, as in
torch's DistributedDataParallel; if rank 0 has run out of data, the first rank that has data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dure.collectives.group import Group
from dure.tensors.buffers import BufferNames


def check_forward_keeps_weights(model: nn.Module, workers: int | None) -> None:
    """Check that forward passes of a model do not change parameters. Raises ValueError otherwise.

    Each replica would change its own parameters. workers: None if their number is unknown.
    """
    # A single worker has no other replica to differ from.
    if workers == 1:
        return
    for name, parameter in model.named_parameters():
        # The first forward pass would create the parameter; until then nothing can be sent.
        if is_lazy(parameter):
            raise ValueError(
                f"{name} is lazy, so each replica would initialise it differently in the first "
                "forward pass: give the layer its sizes, or compute an example in the model "
                "function"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name or 'the model'} has max_norm, so forward passes change its weight, and "
                "replicas with different examples would diverge: normalise in the model's "
                "forward, or use single-worker"
            )


class BufferSync:
    """Buffers of a model, and copies of their values when all ranks last agreed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.buffers = BufferNames(model)
        # copies: forward passes write into the buffers themselves
        self._seen = [buffer.clone() for buffer in self.buffers.of(model)]

    def __len__(self) -> int:
        return len(self.buffers)

    def changed(self) -> list[bool]:
        """Return for each buffer whether it has changed since all ranks last agreed.

        Values are compared, because batch norm writes without changing a tensor's version.
        """
        return [
            not torch.equal(now, seen)
            for now, seen in zip(self.buffers.of(self.model), self._seen, strict=True)
        ]

    @torch.no_grad()
    def take(self, group: Group, changed: Sequence[bool], root: int = 0) -> None:
        """Broadcast the buffers that `changed` selects from `root`.

        `changed` is equal on every rank.
        """
        now = self.buffers.of(self.model)
        group.broadcast_values(
            [buffer for buffer, one in zip(now, changed, strict=True) if one], root=root
        )
        for position, buffer in enumerate(now):
            if changed[position]:  # the next change is relative to the values of all ranks now
                self._seen[position] = buffer.clone()


def buffer_sync_of(model: nn.Module) -> BufferSync | None:
    """Return the broadcaster of a model's buffers; None for a model without buffers."""
    speaker = BufferSync(model)
    return speaker if len(speaker) else None

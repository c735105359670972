"""Buffers such as batch-norm statistics: one rank speaks for all.

What its forward pass has changed is broadcast. That rank is rank 0, as in torch's
DistributedDataParallel; if it has run out of data, the first rank that has not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dure.collectives.group import Group
from dure.tensors.buffers import Buffers


def check_weights_stay(model: nn.Module, workers: int | None) -> None:
    """Raises ValueError for a model whose forward passes change parameters.

    Each replica would change its own. workers: None where their number is not known.
    """
    # One worker alone changes its weights as it likes.
    if workers == 1:
        return
    for name, parameter in model.named_parameters():
        # The first forward pass would make it; until then there is nothing that could be sent.
        if is_lazy(parameter):
            raise ValueError(
                f"{name} is lazy, and each replica would initialise its own in the first forward "
                f"pass: give the layer its sizes, or compute an example in the model function"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name or 'the model'} has max_norm, so that forward passes change its weight, "
                f"and replicas that see other examples would go apart: normalise in the model's "
                f"forward, or take single-worker"
            )


class Speaker:
    """The buffers of a model, and how they were when they were last the same on all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.buffers = Buffers(model)
        # copies: forward passes write into the buffers themselves
        self._seen = [buffer.clone() for buffer in self.buffers.of(model)]

    def __len__(self) -> int:
        return len(self.buffers)

    def changed(self) -> list[bool]:
        """Which have changed since.

        Values are compared, because batch norm writes without changing a tensor's version.
        """
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
            if changed[position]:  # the next change is told from what all ranks have now
                self._seen[position] = buffer.clone()


def speaker_of(model: nn.Module) -> Speaker | None:
    """The speaker for a model's buffers; None for a model that has none."""
    speaker = Speaker(model)
    return speaker if len(speaker) else None

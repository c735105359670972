"""The names under which a model's flat tensors travel.

Servers and clients keep weights flat, one tensor a dtype. On the wire each parameter has the name
that it has in the model, so that whoever gets the bytes can read them with any library, and a
training loop of another framework finds its arrays by name. Names cost no copy: a flat tensor is
cut into views, and what arrives lies in one piece again (`dure.wire.tensors.room_for`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dure.wire.requests import Trains
from dure.wire.tensors import Form, forms_of

EXTRA = "extra:"
"""What the name of a tensor begins with that an algorithm sends besides the model."""


def is_extra(name: str) -> bool:
    """Whether a tensor of this name is no part of the model."""
    return name.startswith(EXTRA)


class Layout(NamedTuple):
    """weights: for each flat tensor the names and shapes of what lies in it. buffers: names."""

    weights: Sequence[Sequence[tuple[str, tuple[int, ...]]]]
    buffers: Sequence[str]

    def named(
        self, weights: Sequence[Tensor], buffers: Sequence[Tensor], extra: Sequence[Tensor] = ()
    ) -> dict[str, Tensor]:
        """Everything by its name, as views; extras are called by their number.

        Raises ValueError for other tensors than the layout has.
        """
        named: dict[str, Tensor] = {}
        for flat, parts in zip(weights, self.weights, strict=True):
            pieces = torch.split(flat, [math.prod(shape) for _, shape in parts])
            for (name, shape), piece in zip(parts, pieces, strict=True):
                named[name] = piece.view(shape)
        named |= zip(self.buffers, buffers, strict=True)
        named |= {f"{EXTRA}{index}": one for index, one in enumerate(extra)}
        return named

    def apart(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The inverse of `named`: (weights, buffers, extra). Raises KeyError if one is missing."""
        weights = [in_a_row([tensors[name] for name, _ in parts]) for parts in self.weights]
        buffers = [tensors[name] for name in self.buffers]
        extra = [one for name, one in tensors.items() if is_extra(name)]
        return weights, buffers, extra

    def forms(
        self, weights: Sequence[Tensor], buffers: Sequence[Tensor], extra: Sequence[Tensor] = ()
    ) -> dict[str, Form]:
        """What such tensors are like, by name."""
        return forms_of(self.named(weights, buffers, extra))


def _without_end(examples: int) -> int:
    return 1 << 53


def _one(examples: int) -> int:
    return 1


def _any(cohort: int) -> str | None:
    return None


class Federation(NamedTuple):
    """What a network has to know of a federation to speak with its clients.

    clients: how many numbers there are. trains: what a site has to train. frozen: the weights that
    are not trained. threads: with how many a client is to compute. samples: how many a client with
    so many examples processes in a round, at the most. holds: updates stay with their clients.
    steps: how many steps such a client makes in a round. why_not: why the run cannot combine the
    updates of so many clients at least, in words; None where it can.
    """

    clients: int
    seed: int
    layout: Layout
    trains: Trains
    frozen: Mapping[str, Tensor] = {}
    threads: int = 1
    samples: Callable[[int], int] = _without_end
    holds: bool = False
    steps: Callable[[int], int] = _one
    why_not: Callable[[int], str | None] = _any


def in_a_row(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all, as one flat tensor: a view where they lie one after another."""
    if not tensors:
        return torch.empty(0)
    first = tensors[0]
    at = first.storage_offset()
    home = first.untyped_storage().data_ptr()
    for tensor in tensors:
        together = tensor.untyped_storage().data_ptr() == home and tensor.storage_offset() == at
        if not (together and tensor.is_contiguous()):
            return torch.cat([one.reshape(-1) for one in tensors])
        at += tensor.numel()
    return first.as_strided((at - first.storage_offset(),), (1,), first.storage_offset())

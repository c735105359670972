"""Names under which a model's flat tensors travel.

Servers and clients hold weights as flat tensors, split by dtype. On the wire each parameter has its
name in the model, so that any receiver can read the bytes with any library, and a training loop of
another framework finds its arrays by name. Names cost no copy: the sender splits a flat tensor into
views, and the receiver allocates the parts contiguously (`dure.wire.tensors.empty_tensors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dure.wire.requests import TaskDescription
from dure.wire.tensors import TensorSpec, forms_of

EXTRA = "extra:"
"""Prefix of the name of a tensor that an algorithm sends besides the model."""


def is_extra(name: str) -> bool:
    """Return whether a tensor of this name is not part of the model."""
    return name.startswith(EXTRA)


class ModelLayout(NamedTuple):
    """Names and shapes of the parameters in each flat tensor, and names of the buffers."""

    weights: Sequence[Sequence[tuple[str, tuple[int, ...]]]]
    buffers: Sequence[str]

    def named(
        self, weights: Sequence[Tensor], buffers: Sequence[Tensor], extra: Sequence[Tensor] = ()
    ) -> dict[str, Tensor]:
        """Return all tensors by name, as views; extras are named by their index.

        Raises ValueError for tensors that do not match the layout.
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
        """Split named tensors into (weights, buffers, extra), the inverse of `named`.

        Raises KeyError if a tensor is missing.
        """
        weights = [flattened([tensors[name] for name, _ in parts]) for parts in self.weights]
        buffers = [tensors[name] for name in self.buffers]
        extra = [one for name, one in tensors.items() if is_extra(name)]
        return weights, buffers, extra

    def forms(
        self, weights: Sequence[Tensor], buffers: Sequence[Tensor], extra: Sequence[Tensor] = ()
    ) -> dict[str, TensorSpec]:
        """Return the dtype and shape of each tensor, by name."""
        return forms_of(self.named(weights, buffers, extra))


def _without_end(examples: int) -> int:
    return 1 << 53


def _one(examples: int) -> int:
    return 1


def _any(cohort: int) -> str | None:
    return None


class FederationSpec(NamedTuple):
    """Description of a federation that a network needs to serve its clients.

    Args:
        clients: Number of client numbers.
        seed: Seed of the run.
        layout: Names and shapes of the tensors.
        trains: The model and task that a site must train.
        frozen: Weights that are not trained, by name.
        threads: Number of threads of a client.
        samples: Function of a client's number of examples; returns the most examples that the
            client processes in a round.
        holds: Whether updates stay at their clients.
        steps: Function of a client's number of examples; returns its optimizer steps in a round.
        cohort_objection: Function of a number of clients; returns the reason why the run cannot
            combine the updates of at least so many clients, or None.
    """

    clients: int
    seed: int
    layout: ModelLayout
    trains: TaskDescription
    frozen: Mapping[str, Tensor] = {}
    threads: int = 1
    samples: Callable[[int], int] = _without_end
    holds: bool = False
    steps: Callable[[int], int] = _one
    cohort_objection: Callable[[int], str | None] = _any


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors as a flat tensor: a view if they are contiguous."""
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

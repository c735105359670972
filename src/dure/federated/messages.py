"""What travels between server and client: an assignment down, an update up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Payload bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Assignment:
    """The server asks a client to train from these weights.

    weights: the model's parameters, one flat tensor a dtype. buffers: the model's buffers, in its own order.
    Payload: d parameters and the buffers.
    """

    round: int
    client: int
    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return nbytes(self.weights) + nbytes(self.buffers)


@dataclass(frozen=True)
class Update:
    """A client's answer: how its weights moved. The model itself never leaves the client.

    delta: weights after training less the weights received. examples: n_k, the client's weight in the mean.
    samples: examples processed, local epochs counted. loss: mean over them. Payload: as the assignment's.
    """

    round: int
    client: int
    examples: int
    samples: int
    loss: float
    delta: Sequence[Tensor]
    buffers: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return nbytes(self.delta) + nbytes(self.buffers)

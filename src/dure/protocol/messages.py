"""What travels between server and client: an assignment down, an update up.

Weights and updates are lists of flat tensors, one a dtype of the model (`dure.tensors.flat`);
buffers are in the model's own order. A client that trains without a server's knowledge does not
exist: each assignment has a ticket, which its update gives back.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import force_setattr
from torch import Tensor


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Payload bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """The server asks a client to train from these weights.

    round: the number of the global model that these are. deadline: when the update has to be there,
    in the coordinator's time; None where nobody waits for it. extra: what an algorithm sends
    besides, as SCAFFOLD's control. nbytes: of it all, counted where it is not given. turn: where
    the client's batches and draws go on, the round by default; without rounds, where a client may
    be handed the same weights again, how often it has answered.
    """

    ticket: int
    client: int
    round: int
    weights: Sequence[Tensor]
    buffers: Sequence[Tensor]
    extra: Sequence[Tensor] = ()
    deadline: float | None = None
    nbytes: int = 0
    turn: int = -1

    def __post_init__(self) -> None:
        if not self.nbytes:
            force_setattr(
                self, "nbytes", nbytes(self.weights) + nbytes(self.buffers) + nbytes(self.extra)
            )
        if self.turn < 0:
            force_setattr(self, "turn", self.round)


class Update(msgspec.Struct, frozen=True, gc=False):
    """A client's answer: how its weights moved. The model itself never leaves the client.

    delta: weights after training less the weights received. buffers: after training. examples: n_k,
    how many the client has. samples: examples processed, local epochs counted. loss: mean over
    them.
    """

    ticket: int
    client: int
    round: int
    examples: int
    samples: int
    loss: float
    delta: Sequence[Tensor]
    buffers: Sequence[Tensor]
    extra: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        return nbytes(self.delta) + nbytes(self.buffers) + nbytes(self.extra)

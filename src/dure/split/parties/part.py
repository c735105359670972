"""A part of the model with its optimizer and its learning-rate schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.contracts.lr_schedule import LRSchedule, ScheduledRates
from dure.split.parties.model import ParameterPiece, VerticalPart
from dure.tensors.buffers import non_persistent_buffers_of, write
from dure.tensors.optimizer_state import load_optimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class TrainedPart:
    """A part with its own optimizer, over the part's parameters alone.

    model: the model that the part belongs to; the part's own module if this process has no more of
    it. optimizer, schedule: as in a task.
    """

    def __init__(
        self,
        part: VerticalPart,
        model: nn.Module,
        optimizer: MakeOptimizer,
        schedule: LRSchedule | None = None,
    ) -> None:
        self.module = part.module
        self.pieces = part.pieces
        self.optimizer = _optimizer(part.pieces, model, optimizer)
        self.rates = ScheduledRates(self.optimizer, schedule)

    def update(self, step: int) -> None:
        """Step the optimizer with the accumulated gradients, then clear them."""
        self.rates.at(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self.optimizer.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        load_optimizer(self.optimizer, state)

    def kept(self) -> dict[str, Any]:
        """Return copies of parameters, buffers and optimizer state, to roll back with `back`."""
        return {
            "values": {name: one.clone() for name, one in self._values().items()},
            "optimizer": copy.deepcopy(self.state()),
        }

    @torch.no_grad()
    def back(self, kept: Mapping[str, Any]) -> None:
        """Restore the copies that `kept` returned."""
        for name, one in self._values().items():
            write(one, kept["values"][name])
        self.optimizer.zero_grad(set_to_none=True)
        self.restore(copy.deepcopy(kept["optimizer"]))

    def _values(self) -> dict[str, Tensor]:
        return {**self.module.state_dict(), **non_persistent_buffers_of(self.module)}


def _optimizer(pieces: list[ParameterPiece], model: nn.Module, make: MakeOptimizer) -> Optimizer:
    # Made of all parameters, as a user's function may group parameters by their positions.
    optimizer = make(list(model.parameters()))
    mine = {id(piece.there): piece.here for piece in pieces}
    for group in optimizer.param_groups:
        group["params"] = [mine[id(one)] for one in group["params"] if id(one) in mine]
    # Some optimizers, such as Adagrad, create their state in the constructor.
    made = dict(optimizer.state)
    optimizer.state.clear()
    for piece in pieces:
        if piece.there in made:
            optimizer.state[piece.here] = _cut(made[piece.there], piece)
    return optimizer


def _cut(state: Mapping[str, Any], piece: ParameterPiece) -> dict[str, Any]:
    return {
        key: piece.cut(value)
        if isinstance(value, Tensor) and value.shape == piece.there.shape
        else value
        for key, value in state.items()
    }

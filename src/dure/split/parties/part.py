"""A part of the model at work: its optimizer, its schedule, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.contracts.lr_schedule import LRSchedule, Rates
from dure.split.parties.model import Part, Piece

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class TrainedPart:
    """A part with an optimizer of its own, of the part's parameters alone.

    model: of which it is a part; the part's own module, where nobody here has more of it.
    optimizer, schedule: as a task has them.
    """

    def __init__(
        self,
        part: Part,
        model: nn.Module,
        optimizer: MakeOptimizer,
        schedule: LRSchedule | None = None,
    ) -> None:
        self.module = part.module
        self.pieces = part.pieces
        self.optimizer = _optimizer(part.pieces, model, optimizer)
        self.rates = Rates(self.optimizer, schedule)

    def update(self, step: int) -> None:
        """One step of the optimizer by the gradients that are there."""
        self.rates.at(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """What its optimizer remembers."""
        return self.optimizer.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state))


def _optimizer(pieces: list[Piece], model: nn.Module, make: MakeOptimizer) -> Optimizer:
    # It is made of all parameters, for a user's function may group them by their places.
    optimizer = make(list(model.parameters()))
    mine = {id(piece.there): piece.here for piece in pieces}
    for group in optimizer.param_groups:
        group["params"] = [mine[id(one)] for one in group["params"] if id(one) in mine]
    # Some optimizers make their state when they are made.
    made = dict(optimizer.state)
    optimizer.state.clear()
    for piece in pieces:
        if piece.there in made:
            optimizer.state[piece.here] = _cut(made[piece.there], piece)
    return optimizer


def _cut(state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    return {
        key: piece.cut(value)
        if isinstance(value, Tensor) and value.shape == piece.there.shape
        else value
        for key, value in state.items()
    }

"""Parameters that are not trained (`requires_grad` is False), such as the base below adapters.

They keep the values with which the model was made, the same for everybody, so nobody sends them.
Who trains for others therefore has to know that they stay as they are: a model whose forward pass
moves them, or begins to train them, would carry that from one client over to the next.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dure.tensors.buffers import write


def frozen_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not trained, by name and in the model's order, in its own memory.

    One that has several names has the first of them.
    """
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


@torch.no_grad()
def load_frozen(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Gives a model the frozen parameters of another like it.

    A model that is read from a file, or drawn without the seed, is another one each time.

    Raises ValueError where the model has not the same ones frozen.
    """
    own = frozen_of(model)
    differ = next(iter(own.keys() ^ values.keys()), None)
    if differ is not None:
        raise ValueError(
            f"the parameter {differ} is frozen in one of two models that the task made, and is "
            f"trained in the other: let the task's model function freeze the same ones each time"
        )
    for name, parameter in own.items():
        write(parameter, values[name])


class Frozen:
    """A model's frozen parameters as they are now, by which a later change is found.

    It keeps a copy of them. What is compared are bits: a change through `.data`, of which torch
    keeps no count, is one as well.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._places: list[tuple[str, nn.Module, str, nn.Parameter, Tensor]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                place, _, own = name.rpartition(".")
                value = parameter.detach().clone()
                self._places.append((name, modules[place], own, parameter, value))

    def changed(self) -> str | None:
        """What is no longer as it was, in words; None where all is."""
        for name, module, own, parameter, value in self._places:
            now = module._parameters.get(own)
            if now is not None and now.requires_grad:
                return f"the parameter {name} was frozen at the start, and is trained now: {_TO_DO}"
            if now is not parameter or not _same_bits(now, value):
                return f"the parameter {name} is frozen, and was changed all the same: {_TO_DO}"
        return None

    def check(self) -> None:
        """Raises ValueError where something has changed."""
        changed = self.changed()
        if changed is not None:
            raise ValueError(changed)


_TO_DO = (
    "in a federation what is frozen does not travel, so it stays as it is; let it be trained from "
    "the start, or make it a buffer, which travels"
)


@torch.no_grad()
def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Not by value: NaN would differ from itself."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(*(_bits(tensor.detach()) for tensor in (one, other)))


def _bits(tensor: Tensor) -> Tensor:
    # Integers as wide as the elements, since wider ones are fewer comparisons than bytes.
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
    return tensor.contiguous().reshape(-1).view(kind)

"""Frozen parameters (`requires_grad` is False), such as the base model below adapters.

Frozen parameters keep the values of the model's construction, equal on all participants, so nothing
is sent. A process that trains for several clients therefore checks that they stay unchanged: a
forward pass that changes or unfreezes them would carry the change from one client to the next.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dure.tensors.buffers import write


def frozen_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by name, in the model's order and memory.

    A parameter with several names appears under its first name.
    """
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


@torch.no_grad()
def load_frozen(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy the frozen parameters of an equal model into `model`.

    A model that is read from a file, or drawn without the seed, differs each time. Raises
    ValueError if the two models freeze different parameters.
    """
    own = frozen_of(model)
    differ = next(iter(own.keys() ^ values.keys()), None)
    if differ is not None:
        raise ValueError(
            f"the parameter {differ} is frozen in one of two models that the task's model "
            "function returned, and is trained in the other: freeze the same parameters in each "
            "call"
        )
    for name, parameter in own.items():
        write(parameter, values[name])


class FrozenSnapshot:
    """Snapshot of a model's frozen parameters, to detect a later change.

    The snapshot is a copy. The comparison is by bits, so that a change through `.data`, which torch
    does not count, is found too.
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
        """Return a description of the first change, or None if nothing changed."""
        for name, module, own, parameter, value in self._places:
            now = module._parameters.get(own)
            if now is not None and now.requires_grad:
                return f"the parameter {name} was frozen at the start, but is trained now: {_TO_DO}"
            if now is not parameter or not _same_bits(now, value):
                return f"the parameter {name} is frozen, but was changed: {_TO_DO}"
        return None

    def check(self) -> None:
        """Raise ValueError if a frozen parameter changed."""
        changed = self.changed()
        if changed is not None:
            raise ValueError(changed)


_TO_DO = (
    "a federation does not send frozen parameters, so they must not change; train it from the "
    "start, or make it a buffer, which is sent"
)


@torch.no_grad()
def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal bits; by value, NaN would differ from itself."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(*(_bits(tensor.detach()) for tensor in (one, other)))


def _bits(tensor: Tensor) -> Tensor:
    # Integers as wide as the elements, since wider ones are fewer comparisons than bytes.
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
    return tensor.contiguous().reshape(-1).view(kind)

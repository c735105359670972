"""Detection of changes to parameters outside the optimizer's update.

In stage 3 a pass computes with gathered parameters. In memory that all ranks read, every rank would
apply a change again; in a gathered buffer the change would be lost when the buffer is freed. With
masters in higher precision (`precision="bf16"`) the next update would overwrite the change, in
every stage. Changes are therefore refused, at the end of the pass or before the next update.

Torch counts most changes (`Tensor._version`), and a comparison of the counters costs next to
nothing. Torch does not count writes through `parameter.data`. Code that reads `data` gets it, and a
copy is stored; when the pass ends, or the unit is freed, the two are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dure.parallel.zero.partitioned_parameters import elements_of, versions_of, watch_data
from dure.tensors.elements import element_bytes


class ParameterChanges:
    """Parameters by name, with the changes since the last accepted state.

    rests: returns whether the model is whole now, so that changes are allowed; set by the owner.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        for name, parameter in named:
            self._names.append(name)
            self._parameters.append(parameter)
            watch_data(parameter, self)
        self._name_of = dict(zip(map(id, self._parameters), self._names, strict=True))
        # by id: copies of elements that were read through `data`
        self._read: dict[int, Tensor] = {}
        self.rests: Callable[[], bool] = lambda: False
        self._found: str | None = None
        self.accept()

    def accept(self) -> None:
        """Accept the present values."""
        self._versions = versions_of(self._parameters)
        self._read.clear()
        self._found = None

    def read(self, parameter: nn.Parameter) -> None:
        """Store a copy of the elements when code reads `parameter.data` and may write there."""
        if id(parameter) not in self._read and not self.rests():
            with torch.inference_mode(False), torch.no_grad():
                self._read[id(parameter)] = elements_of(parameter).clone()

    def replaced(self, parameter: nn.Parameter) -> None:
        """Record an assignment to `parameter.data`."""
        if not self.rests():
            self._found = self._name_of[id(parameter)]

    def compare(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Compare stored copies with the present elements, before these are freed.

        parameters: None stands for all parameters.
        """
        if not self._read:
            return
        if parameters is None:
            parameters = self._parameters
        for parameter in parameters:
            before = self._read.pop(id(parameter), None)
            if before is not None and _differ(before, elements_of(parameter)):
                self._found = self._found or self._name_of[id(parameter)]

    def check(self) -> None:
        """Check that no parameter has changed since the last `accept`.

        Raises ValueError otherwise.
        """
        now = versions_of(self._parameters)
        if now != self._versions:
            moved = [one != other for one, other in zip(now, self._versions, strict=True)]
            self._found = self._names[moved.index(True)]
        if self._found is None:
            return
        name = self._found
        self.accept()  # so that the error is raised only once
        raise ValueError(
            f"the parameter {name} was changed, in a forward or backward pass or between steps, "
            "where ZeRO provides only a temporary copy (stage 3, and bf16 in any stage): change "
            "it after step(), inside gathered(); or make it a buffer, or use stage 1 or 2 in "
            "full precision. Initialise from data before ZeRO. The weights may be wrong now: "
            "resume from a checkpoint"
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return whether any bit differs; by value NaN would differ from itself."""
    return not torch.equal(element_bytes(one), element_bytes(other))

"""Check that the structure of the model and the optimizer has not changed since the division.

The parameters, and whether they are trained, are fixed when the model is divided. A parameter that
is unfrozen, added or replaced afterwards takes no part in messages and updates. It would keep its
value on every rank, or diverge between the ranks. Such changes are refused with the parameter's
name.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer


class ModelStructure:
    """Recorded structure of a model and its optimizer.

    trained: the model's parameters whose gradients are divided. parts: tensors that the optimizer
    updates.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        trained: Iterable[nn.Parameter],
        parts: Iterable[nn.Parameter],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._parts = set(map(id, parts))
        known = set(map(id, trained))
        self._known = {id(parameter): parameter for parameter in model.parameters()}
        self._frozen = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            # a parameter without elements has nothing to train
            if id(parameter) not in known and parameter.numel()
        ]
        self._note()

    def _note(self) -> None:
        """Record the parameters and submodules of each module.

        A comparison with the record is faster than a walk over all modules.
        """
        held = [
            within
            for module in self.model.modules()
            for within in (module._parameters, module._modules)
        ]
        self._held = [(within, list(within.values())) for within in held if within]

    def check(self) -> None:
        """Check that the structure has not changed. Raises RuntimeError otherwise."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when ZeroRedundancy divided the model, and would not be "
                    "trained now: keep requires_grad=True until it is divided, and freeze it "
                    "afterwards with requires_grad_(False)"
                )
        if not all(_holds(within, values) for within, values in self._held):
            self._check_parameters()
            self._note()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._parts:
                    raise RuntimeError(
                        f"the optimizer was given {self._name_of(parameter)} after ZeroRedundancy "
                        f"had divided it: give it all parameters before"
                    )

    def _check_parameters(self) -> None:
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in self._known:
                raise RuntimeError(
                    f"{name} was added to the model after ZeroRedundancy had divided it, and "
                    "would not be trained: add it before; to change a parameter's value, write "
                    "into it inside gathered(), or call load_state_dict"
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        names = {id(one): name for name, one in self.model.named_parameters()}
        return names.get(id(parameter), "a parameter that is not the model's")


def _holds(within: Mapping[str, object], values: Sequence[object]) -> bool:
    """Return whether a module has the identical objects.

    Equality would compare tensors by value.
    """
    return len(within) == len(values) and all(map(operator.is_, within.values(), values))

"""Base class of divided layers, and checks whether a layer can be divided.

A layer that replaces another layer must compute everything that the other layer computes: a layer
with hooks, a parametrization or an overridden forward is rejected.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dure.collectives.group import Group
from dure.parallel.tensor.division import Division
from dure.parallel.tensor.rng import RngTracker
from dure.tensors.backward import has_hooks

if TYPE_CHECKING:
    from typing_extensions import Self

HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class DividedLayer(nn.Module):
    """Layer with divided parameters.

    divisions: divisions by parameter name; all other parameters are whole on every rank. draws: the
    model's random draws, which the layer switches between common and per-rank numbers.
    """

    def __init__(self, process_group: Group | dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = Group.of(process_group)
        self.divisions: dict[str, Division] = {}
        self.draws: RngTracker | None = None

    def divide(self, name: str, whole: Tensor | None, division: Division | None) -> None:
        """Register this rank's part of a parameter; if `whole` is None, register None.

        division: None for a parameter that every rank stores whole.
        """
        if whole is None:
            self.register_parameter(name, None)
            return
        if division is not None:
            self.divisions[name] = division
        self.register_parameter(name, rank_parameter(whole, division, self.group))

    @property
    def opens(self) -> int:
        """1 if a divided region begins at this layer, -1 if a region ends, otherwise 0."""
        return 0

    def output_shape(self, given: Sequence[int]) -> list[int]:
        """Return the shape of the layer's output for an input of shape `given`."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy that shares the process group."""
        # A group of processes cannot be copied; original and copy share it.
        memo[id(self.group)] = self.group
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        # The memo maps the group to itself, so deepcopy does not copy it.
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


@dataclass(frozen=True)
class DividedTensors:
    """Divided tensors of a module that is not a divided layer (`Tensors`)."""

    divisions: Mapping[str, Division]
    group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> DividedTensors:
        # The object is immutable, and a group of processes cannot be copied.
        return self


def mark_parts(module: nn.Module, parts: DividedTensors) -> None:
    """Record the divided tensors of a module, in addition to those recorded before."""
    before = module.__dict__.get("_parts")
    known = before.divisions if before is not None else {}
    module.__dict__["_parts"] = DividedTensors({**known, **parts.divisions}, parts.group)


def parts_of(module: nn.Module) -> DividedTensors | None:
    """Return the divided tensors of a module itself; None if there are none."""
    if isinstance(module, DividedLayer):
        return DividedTensors(module.divisions, module.group)
    return module.__dict__.get("_parts")


def rank_parameter(whole: Tensor, division: Division | None, group: Group) -> nn.Parameter:
    """Return a copy of this rank's part of a parameter; if `division` is None, of all of it."""
    if division is None:
        own = whole.detach().clone()
    else:
        own = division.part(whole.detach(), group.rank, group.size)
    made = nn.Parameter(own, whole.requires_grad)
    # Attributes that a user has set on a parameter are preserved.
    made.__dict__.update(vars(whole))
    return made


def draws_of(model: nn.Module) -> set[RngTracker]:
    """Return the random draws of the divided layers of a model."""
    layers = [module for module in model.modules() if isinstance(module, DividedLayer)]
    return {layer.draws for layer in layers if layer.draws is not None}


def autocast_inputs(*tensors: Any) -> Any:
    """Return the tensors in autocast's dtype: autocast does not convert inputs of a `Function`."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [tensor.to(dtype) if tensor is not None else None for tensor in tensors]


def is_transposed(linear: nn.Module) -> bool:
    """Return whether a layer stores A, like Hugging Face's Conv1D, and not W = Aᵀ.

    Raises ValueError if the layer is not linear, or does more than a linear layer.
    """
    # by name, so that transformers need not be installed
    transposed = type(linear).__name__ == "Conv1D" and type(linear).__module__.startswith(
        "transformers."
    )
    if not transposed and not isinstance(linear, nn.Linear):
        raise ValueError(
            f"a {type(linear).__name__} is not a linear layer such as nn.Linear or Hugging Face's "
            "Conv1D"
        )
    check_plain(linear, type(linear) if transposed else nn.Linear)
    return transposed


def check_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise ValueError if a module does more than `kind`, as a divided layer would not do so."""
    more = None
    # A subclass is fine if it does not override forward.
    if type(module).forward is not kind.forward:
        more = "a forward of its own"
    elif is_parametrized(module):
        more = "a parametrization, as of weight_norm"
    elif any(getattr(module, f"_{hooks}") for hooks in HOOKS):
        more = "hooks, as of pruning"
    elif any(map(has_hooks, module.parameters(recurse=False))):
        more = "hooks on its parameters"
    if more is not None:
        raise ValueError(
            f"a {type(module).__name__} with {more} is more than a {kind.__name__} and cannot be "
            "divided"
        )


def embedding_of(name: str, module: nn.Module) -> nn.Embedding:
    """Return the embedding. Raises ValueError, with its name, if the module cannot be divided."""
    if not isinstance(module, nn.Embedding):
        raise ValueError(
            f"{name} is a {type(module).__name__}: only an nn.Embedding is divided by its rows"
        )
    check_plain(module, nn.Embedding)
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError(
            f"{name} has max_norm, scale_grad_by_freq or sparse, which a divided embedding does "
            "not support"
        )
    return module

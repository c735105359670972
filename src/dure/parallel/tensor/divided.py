"""What all that is divided has in common, and which layers can be divided at all.

A layer that is put in the place of another one must compute no less than it did: what has hooks, a
parametrization or a forward of its own is refused.
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
from dure.parallel.tensor.draws import Draws
from dure.tensors.hooks import has_hooks

if TYPE_CHECKING:
    from typing_extensions import Self

HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class Divided(nn.Module):
    """A layer some of whose parameters are divided.

    divisions: how, by their names; the others are on every rank. draws: told where every rank
    begins, or ends, to draw for itself.
    """

    def __init__(self, process_group: Group | dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = Group.of(process_group)
        self.divisions: dict[str, Division] = {}
        self.draws: Draws | None = None

    def divide(self, name: str, whole: Tensor | None, division: Division | None) -> None:
        """Registers this rank's part of a parameter; of None, none.

        division: None is for a parameter of which every rank has the whole.
        """
        if whole is None:
            self.register_parameter(name, None)
            return
        if division is not None:
            self.divisions[name] = division
        self.register_parameter(name, own_parameter(whole, division, self.group))

    @property
    def opens(self) -> int:
        """1: after this layer a divided region has begun; -1: one is over; 0: neither."""
        return 0

    def output_shape(self, given: Sequence[int]) -> list[int]:
        """The shape of what the layer makes of a tensor of shape `given`."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A group of processes cannot be copied, and is the same for both.
        memo[id(self.group)] = self.group
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        # The memo has the group already, which is so copied to itself.
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


@dataclass(frozen=True)
class Parts:
    """Which tensors of a module are parts, where the module is no divided layer (`Tensors`)."""

    divisions: Mapping[str, Division]
    group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        # Nothing in it changes, and a group of processes cannot be copied.
        return self


def mark_parts(module: nn.Module, parts: Parts) -> None:
    """Notes which tensors of a module are parts, besides those that it was told of before."""
    before = module.__dict__.get("_parts")
    known = before.divisions if before is not None else {}
    module.__dict__["_parts"] = Parts({**known, **parts.divisions}, parts.group)


def parts_of(module: nn.Module) -> Parts | None:
    """Which tensors of a module itself are parts; None where none is."""
    if isinstance(module, Divided):
        return Parts(module.divisions, module.group)
    return module.__dict__.get("_parts")


def own_parameter(whole: Tensor, division: Division | None, group: Group) -> nn.Parameter:
    """This rank's part of a parameter, in memory of its own; of None, all of it."""
    if division is None:
        own = whole.detach().clone()
    else:
        own = division.part(whole.detach(), group.rank, group.size)
    made = nn.Parameter(own, whole.requires_grad)
    # What a user has written on a parameter stays with it.
    made.__dict__.update(vars(whole))
    return made


def draws_of(model: nn.Module) -> set[Draws]:
    """What the divided layers of a model draw from."""
    layers = [module for module in model.modules() if isinstance(module, Divided)]
    return {layer.draws for layer in layers if layer.draws is not None}


def cast(*tensors: Any) -> Any:
    """As autocast would have them, which does not look into `Function`s."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [tensor.to(dtype) if tensor is not None else None for tensor in tensors]


def is_transposed(linear: nn.Module) -> bool:
    """Whether a layer stores A, as Hugging Face's Conv1D, and not W = Aᵀ.

    Raises ValueError if it is not linear, or does more than such a layer.
    """
    # by name, so that transformers need not be there
    transposed = type(linear).__name__ == "Conv1D" and type(linear).__module__.startswith(
        "transformers."
    )
    if not transposed and not isinstance(linear, nn.Linear):
        raise ValueError(
            f"a {type(linear).__name__} is no linear layer, as nn.Linear and Hugging Face's Conv1D"
        )
    check_plain(linear, type(linear) if transposed else nn.Linear)
    return transposed


def check_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    """Raises ValueError if a module does more than `kind`, which a divided one would leave out."""
    more = None
    # A class derived from it is fine as long as it computes the same.
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
            f"a {type(module).__name__} with {more} is more than a {kind.__name__}, and is not "
            "divided"
        )


def embedding_of(name: str, module: nn.Module) -> nn.Embedding:
    """The layer. Raises ValueError, with its name, if it is no embedding that can be divided."""
    if not isinstance(module, nn.Embedding):
        raise ValueError(
            f"{name} is a {type(module).__name__}: only an nn.Embedding is divided by its rows"
        )
    check_plain(module, nn.Embedding)
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError(
            f"{name} has max_norm, scale_grad_by_freq or sparse, which a divided embedding has not"
        )
    return module

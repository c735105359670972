"""State of the whole model from a divided model, for any degree, and the norm of its gradient.

The names of parameters are those of the undivided model. `whole_state_dict` returns the undivided
model's state bit for bit, because division only copies. The meter does not count these transfers.

The norm of the whole gradient is sqrt(Σ_r ‖divided on r‖² + ‖replicated‖²): replicated parameters
have the same gradient on all ranks, and count once. Each rank contributes one number to the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.collectives.all_reduce import all_reduce
from dure.collectives.group import Group
from dure.parallel.tensor.divided import parts_of
from dure.parallel.tensor.division import Division
from dure.parallel.tensor.functions import gathered


def divisions(model: nn.Module) -> dict[str, tuple[Division, Group]]:
    """Return the division and group of each divided parameter and buffer, by all of its names."""
    # By tensor, because a tied tensor has names in modules that do not know its division.
    how: dict[int, tuple[Division, Group]] = {}
    for module in model.modules():
        parts = parts_of(module)
        for own, division in parts.divisions.items() if parts is not None else ():
            tensor = module._parameters.get(own, module._buffers.get(own))
            if tensor is not None:
                how[id(tensor)] = (division, parts.group)  # type: ignore[union-attr]
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: how[id(tensor)] for name, tensor in named if id(tensor) in how}


def divided_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of which every rank has a part, each once."""
    divided = divisions(model)
    return {name: parameter for name, parameter in model.named_parameters() if name in divided}


def replicated_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that all ranks have whole, each once."""
    divided = divisions(model)
    return {name: parameter for name, parameter in model.named_parameters() if name not in divided}


@torch.no_grad()
def whole_state_dict(model: nn.Module, everywhere: bool = True) -> dict[str, Any]:
    """Return a copy of the undivided model's state_dict; all ranks call this function together.

    everywhere: whether every rank gets the state; otherwise only rank 0 gets it, and the others an
    empty dict. Tensors that the model shares, such as tied weights, are shared in the state too.
    """
    divided = divisions(model)
    state = {}
    known = {}
    for name, value in model.state_dict(keep_vars=True).items():
        division, group = divided.get(name, (None, None))
        if id(value) not in known:
            # Each tensor is gathered once, in the order of the model, which is equal on all ranks.
            known[id(value)] = _whole(value, division, group)
        state[name] = known[id(value)]
    # A model without divided tensors has no group here: then every rank returns its state.
    ranks = {group.rank for _, group in divided.values()}
    return state if everywhere or ranks <= {0} else {}


def _whole(value: Any, division: Division | None, group: Group | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if division is None or group is None or group.size == 1:
        # a copy, so that further training does not change the returned state
        return value.detach().clone()
    # bookkeeping, which the meter must not count
    return gathered(value.detach(), group.unmetered(), division)


@torch.no_grad()
def load_whole(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the undivided model's state into a divided model of any degree.

    Every rank passes the whole state. Raises ValueError, with the model unchanged, if names or
    shapes are not those of the undivided model.
    """
    divided = divisions(model)
    own = model.state_dict()
    _check_names("misses", own.keys() - state.keys())
    _check_names("has beside the model's", state.keys() - own.keys())
    # Everything is checked and cut first, so that an error leaves the model as it was.
    parts = {}
    for name, value in state.items():
        division, group = divided.get(name, (None, None))
        here = own[name]
        if isinstance(here, Tensor):
            shape = list(here.shape)
            if division is not None:
                shape[division.dim] = division.length
            if list(value.shape) != shape:
                raise ValueError(
                    f"{name} has the shape {list(value.shape)} in the state, but {shape} in the "
                    "model"
                )
        # Replicated parameters, buffers and extra states are loaded as they are.
        whole = division is None or group is None
        parts[name] = value if whole else division.part(value, group.rank, group.size)  # type: ignore[union-attr]
    model.load_state_dict(parts)


def _check_names(what: str, names: Set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names))
        raise ValueError(f"the state {what} {listed}: it belongs to another model")


def gradient_norm(
    model: nn.Module, process_group: Group | dist.ProcessGroup | None = None
) -> Tensor:
    """Return the 2-norm of the undivided model's gradient: float64, equal on all ranks.

    All ranks call this function together.
    """
    group = Group.of(process_group)
    divided = divisions(model)
    mine: list[Tensor] = []
    alike: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            # Replicated gradients are equal on all ranks: they count once, and are not sent.
            (mine if name in divided else alike).append(parameter.grad)
    squares = _squares(mine)
    if group.size > 1:
        # before the squares of replicated gradients are added, which must count once
        all_reduce(squares, group, "native")
    return (squares + _squares(alike).to(squares.device)).sqrt()[0]


def _squares(gradients: list[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(1, dtype=torch.float64)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
    return norms.square().sum().view(1)


@torch.no_grad()
def clip_gradients(
    model: nn.Module, max_norm: float, process_group: Group | dist.ProcessGroup | None = None
) -> Tensor:
    """Scale the gradient so that its norm is at most `max_norm`; return the norm before.

    The counterpart of torch's clip_grad_norm_ for divided models; all ranks call it together.
    """
    norm = gradient_norm(model, process_group)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in _gradients(model):
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)

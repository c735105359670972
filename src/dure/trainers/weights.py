"""Weights and buffers of a trainer's model, by name: whole tensors, also of a divided model.

    plain tensor    copied
    DTensor         this rank's part is cut from the whole, without communication; the whole is
                    gathered from all ranks, one tensor at a time

Source: docs.pytorch.org, "torch.distributed.tensor" and "torch.distributed.fsdp.fully_shard".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from dure.contracts.trainer import GradientTerms
from dure.tensors.buffers import write


def is_divided(model: nn.Module) -> bool:
    """Return whether the ranks hold parts of the model's weights."""
    return any(isinstance(one, DTensor) for one in model.parameters())


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy whole weights and buffers into a model; its tensors stay the same objects.

    Raises ValueError for a name that the model does not have, and for another shape.
    """
    there = _named(model)
    for name, value in tensors.items():
        own = there.get(name)
        if own is None or own.shape != value.shape:
            has = "none of this name" if own is None else f"the shape {list(own.shape)}"
            raise ValueError(
                f"{name} has the shape {list(value.shape)}, but the trainer's model has {has}"
            )
        write(local_part(own), local_part(divided_like(own, value)))


@torch.no_grad()
def copy_tensors(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return whole copies of weights and buffers, in the CPU's memory.

    All ranks of a divided model have to call it with the same names.
    """
    there = _named(model)
    return {name: _whole(there[name]).to("cpu", copy=True) for name in names}


def divided_terms(model: nn.Module, terms: GradientTerms) -> GradientTerms:
    """Return an algorithm's terms with each tensor divided like the parameter of its name."""
    there = dict(model.named_parameters())
    anchor, correction = (
        {name: divided_like(there[name], whole) for name, whole in named.items()}
        for named in (terms.anchor, terms.correction)
    )
    return GradientTerms(terms.mu, anchor, correction)


def divided_like(own: Tensor, whole: Tensor) -> Tensor:
    """Return `whole` on the device and in the dtype of `own`, divided over ranks like it."""
    if isinstance(whole, DTensor):
        return whole
    whole = whole.to(own.device, own.dtype)
    if not isinstance(own, DTensor):
        return whole
    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _named(model: nn.Module) -> dict[str, Tensor]:
    # After a forward without a backward, modules hold gathered weights beside their parts.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

"""Weights and buffers of a trainer's model, by name: whole tensors, also of a divided model.

    plain tensor        copied
    DTensor (FSDP2)     this rank's part is cut from the whole, without communication; the whole is
                        gathered from all ranks, one tensor at a time
    ZeRO 3 (DeepSpeed)  the same, with the parts of the optimizer's copies in float32

Source: docs.pytorch.org, "torch.distributed.tensor" and "torch.distributed.fsdp.fully_shard";
deepspeed.readthedocs.io, "ZeRO" (GatheredParameters, accessing and updating ZeRO states).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from dure.contracts.trainer import GradientTerms
from dure.tensors.buffers import write


def is_divided(model: nn.Module) -> bool:
    """Return whether the ranks hold parts of the model's weights."""
    return any(isinstance(one, DTensor) or _is_zero3(one) for one in model.parameters())


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy whole weights and buffers into a model; its tensors stay the same objects.

    Raises ValueError for a name that the model does not have, and for another shape.
    """
    there = _named(model)
    for name, value in tensors.items():
        own = there.get(name)
        shape = None if own is None else getattr(own, "ds_shape", own.shape)
        if own is None or shape != value.shape:
            has = "none of this name" if shape is None else f"the shape {list(shape)}"
            raise ValueError(
                f"{name} has the shape {list(value.shape)}, but the trainer's model has {has}"
            )
        if _is_zero3(own):
            _write_zero3(own, value.to(own.device))
        else:
            write(local_part(own), local_part(divided_like(own, value)))


@torch.no_grad()
def copy_tensors(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return whole copies of weights and buffers, in the CPU's memory.

    All ranks of a divided model have to call it with the same names.
    """
    there = _named(model)
    return {name: _whole(there[name]).to("cpu", copy=True) for name in names}


class RoundTerms:
    """An algorithm's terms of a round, with each tensor where the parameter of its name is.

    They are placed at the first step: the first training of a round may divide the model.
    """

    def __init__(self, terms: GradientTerms | None) -> None:
        self._terms = terms
        self._are_placed = False

    def add_to(self, model: nn.Module) -> None:
        """Add the terms to the gradients of a model."""
        if self._terms is None:
            return
        if not self._are_placed:
            self._terms, self._are_placed = _placed(self._terms, model), True
        self._terms.add_to(model.named_parameters())


def _placed(terms: GradientTerms, model: nn.Module) -> GradientTerms:
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


def _is_zero3(tensor: Tensor) -> bool:
    """Return whether DeepSpeed has divided a parameter over ranks."""
    return hasattr(tensor, "ds_tensor")


def _write_zero3(parameter: Any, whole: Tensor) -> None:
    """Write this rank's part of a parameter that DeepSpeed has divided."""
    from deepspeed.utils import safe_set_local_fp32_param

    held = parameter.ds_tensor
    if held.numel() != held.ds_numel:
        raise ValueError("DeepSpeed has put weights into files, where a client cannot load them")
    # The parts are equal; the last is padded.
    part = torch.zeros(held.numel(), dtype=whole.dtype, device=whole.device)
    own = whole.flatten()[held.numel() * dist.get_rank() :][: held.numel()]
    part[: own.numel()] = own
    held.copy_(part)
    if parameter.numel() == whole.numel():
        # Small parameters stay whole on each rank besides.
        parameter.copy_(whole.view(parameter.shape))
    # Before the first training there is no optimizer, which copies the parts when it is made.
    if hasattr(parameter, "_z3_optimizer"):
        safe_set_local_fp32_param(parameter, part.float())


def _read_zero3(parameter: Any) -> Tensor:
    """Return a parameter that DeepSpeed has divided, from the optimizer's copies in float32."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad and hasattr(parameter, "_z3_optimizer"):
        found: Tensor = safe_get_full_fp32_param(parameter)
        return found
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]


def _whole(tensor: Tensor) -> Tensor:
    if _is_zero3(tensor):
        return _read_zero3(tensor)
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _named(model: nn.Module) -> dict[str, Tensor]:
    # After a forward without a backward, modules hold gathered weights beside their parts.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

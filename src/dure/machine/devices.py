"""Devices for computation: the CPU, or GPUs.

Names are torch's: "cpu", "cuda", "cuda:1". The device that a user names is checked before any work
begins.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def device_of(name: str) -> torch.device:
    """Return the device called `name`.

    Raises ValueError if the device does not exist here, or if dure does not support its kind.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is not a device: write cpu, cuda, or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"dure computes on cpu and cuda, not on {name}")
    there = torch.cuda.device_count()
    if device.type == "cuda" and not there:
        raise ValueError(f"this machine has no CUDA device, so {name} cannot be used: use cpu")
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ValueError(
            f"this machine has no {name}: its CUDA devices are cuda:0 to cuda:{there - 1}"
        )
    # With its number, so that "cuda" and "cuda:0" are equal.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")


def to_device(tree: Any, device: torch.device) -> Any:
    """Return inputs or targets, tensors in any structure, on `device`.

    A tensor that is already on `device` is returned without a copy.
    """
    # A copy to the CPU must be complete before it is read; a copy to CUDA is ordered by its stream.
    later = device.type == "cuda"
    return tree_map(
        lambda leaf: leaf.to(device, non_blocking=later) if isinstance(leaf, Tensor) else leaf,
        tree,
    )


def to_cpu(tree: Any) -> Any:
    """Return inputs or targets on the CPU: the inverse of `to_device`, for writing to disk."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, tree)


def device_of_model(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or the CPU for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def on_device(function: Any, device: torch.device) -> Any:
    """Return a function whose own tensors, such as the class weights of a loss, are on `device`.

    The tensors of a module and the arguments of a `functools.partial` are moved. The result is a
    copy if a tensor has to move, and otherwise the function itself.
    """
    if isinstance(function, nn.Module):
        own = [*function.parameters(), *function.buffers()]
        return function if _are_there(own, device) else copy.deepcopy(function).to(device)
    if isinstance(function, partial):
        inner = on_device(function.func, device)
        given = (function.args, function.keywords)
        if inner is function.func and _are_there(tree_leaves(given), device):
            return function
        args, keywords = to_device(given, device)
        return partial(inner, *args, **keywords)
    return function


def _are_there(leaves: Any, device: torch.device) -> bool:
    return all(leaf.device == device for leaf in leaves if isinstance(leaf, Tensor))


def default_devices(workers: int | None, cores: int) -> tuple[str, ...]:
    """Return a device name for each worker: the CUDA devices in turn if present, else "cpu".

    workers: number of workers; None means as many as CUDA devices, or as cores and at least two.
    """
    there = torch.cuda.device_count()
    if workers is None:
        # At least two, so that there is something to divide on a small machine too.
        workers = there or max(2, cores)
    # More workers than devices share them in turn.
    return tuple(f"cuda:{worker % there}" if there else "cpu" for worker in range(workers))

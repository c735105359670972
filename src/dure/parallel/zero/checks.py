"""Checks of the settings, models and optimizers that ZeRO supports."""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn
from torch.optim import Optimizer

from dure.collectives.group import Group
from dure.machine.cores import available_cores
from dure.parallel.zero.partition_layout import Stage
from dure.parallel.zero.partitioning import PRECISIONS


def prefetch_of(group: Group, device: torch.device) -> int:
    """Return the number of units to gather ahead: 1, or 0 if ranks share memory and use all cores.

    The choice is rank 0's; all ranks call this function.
    """
    here = device.type == "cpu" and len(group.hosts()) == 1 and group.backend(device) == "dure"
    # A thread that sends would take a core from a rank that computes.
    busy = here and available_cores() <= group.size * torch.get_num_threads()
    # Ranks may count other cores, but the order of messages depends on prefetching.
    return 1 - int(group.all_gather_values([float(busy)], "choice of prefetching")[0][0])


def check_settings(
    stage: int,
    precision: str,
    prefetch: int | None,
    overlap_gather: bool = False,
    *,
    reduce: str = "mean",
) -> None:
    """Check the settings of ZeRO.

    Args:
        stage: Must be 1, 2 or 3.
        precision: Must be in `PRECISIONS`.
        prefetch: Units gathered ahead, at least 0; None for the default.
        overlap_gather: Not with stage 3, and not with `prefetch=0`.
        reduce: Must be "mean" or "sum".

    Raises:
        ValueError: for an unknown value or a combination that is not supported.
    """
    if stage not in get_args(Stage):
        raise ValueError(f"ZeRO has no stage {stage}; choose 1, 2 or 3")
    if precision not in PRECISIONS:
        raise ValueError(
            f"there is no precision {precision!r}; choose one of {', '.join(PRECISIONS)}"
        )
    if reduce not in ("mean", "sum"):
        raise ValueError(f"gradients cannot be reduced to a {reduce!r}; choose mean or sum")
    if prefetch is not None and prefetch < 0:
        raise ValueError(
            f"prefetch is {prefetch}, but it has to be 0 or more units to gather ahead"
        )
    if overlap_gather and (stage == 3 or prefetch == 0):
        why = (
            "stage 3 gathers when layers compute"
            if stage == 3
            else "prefetch=0 sends nothing alongside the computation"
        )
        raise ValueError(
            f"overlap_gather is for stages 1 and 2, during the computation; {why}: leave it out"
        )


def check_model(model: nn.Module, optimizer: Optimizer) -> torch.device:
    """Check that a model can be divided and that the optimizer is for its parameters.

    Returns the model's device. Raises ValueError if the model has no trainable parameter, has
    parameters on several devices, or if the optimizer has other parameters.
    """
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError("the model has no trainable parameter")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1 or "meta" in {device.type for device in devices}:
        raise ValueError(
            f"the model's parameters are on {', '.join(map(str, devices))}; move them to one "
            f"device first"
        )
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in parameters for parameter in given):
        raise ValueError(
            "the optimizer has parameters that are not the model's, or were divided before"
        )
    return devices.pop()

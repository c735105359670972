"""The model of a run on the device on which this process computes its part."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from dure.machine.devices import check_device_dtypes
from dure.split.leakage.defence import Defence


def model_on(model: nn.Module, device: torch.device, doubles: bool = False) -> nn.Module:
    """Return the model on a device, in training mode.

    doubles: whether the run also computes in float64 there (`needs_doubles`). Raises ValueError for
    a device without a dtype that the run needs.
    """
    dtypes = {one.dtype for one in chain(model.parameters(), model.buffers())}
    check_device_dtypes([device.type], dtypes | ({torch.float64} if doubles else set()))
    return model.to(device).train()


def needs_doubles(defence: Defence, averages: bool) -> bool:
    """Return whether a run computes in float64, whatever the dtype of its model.

    averages: whether states are averaged. Marvell solves for its noise in float64.
    """
    return averages or defence.name == "marvell"

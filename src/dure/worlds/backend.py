"""torch.distributed backends that carry the messages of a job's ranks.

gloo sends through sockets, also between machines. The backend dure stays within one machine: its
ranks share memory. Ranks that have an accelerator each also get the accelerator's own backend, such
as NCCL, for tensors on it. NCCL refuses ranks that share a device: their tensors travel through the
CPU's memory, by gloo or dure.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist

from dure.machine.devices import is_cpu, set_current

Backend = Literal["gloo", "dure"]


def check_deadline(seconds: float) -> None:
    """Check a timeout in seconds. Raises ValueError unless a thread can wait that long."""
    if not 0 < seconds <= threading.TIMEOUT_MAX:  # refuses NaN too
        raise ValueError(
            f"deadline is {seconds} s, but it has to be above 0 and at most "
            f"{threading.TIMEOUT_MAX:.0f} s"
        )


def device_backend(device: torch.device) -> str | None:
    """Return torch's name of a device's own backend, such as "nccl"; None if there is none here."""
    try:
        name = dist.get_default_backend_for_device(device)
    except ValueError:
        return None
    known = {"nccl": dist.is_nccl_available, "xccl": dist.is_xccl_available}
    return name if name not in ("gloo", "mpi") and known.get(name, lambda: True)() else None


def join_device_group(
    device: torch.device, shared: bool, seconds: float
) -> dist.ProcessGroup | None:
    """Join the group of all ranks of the job for tensors of their devices; all ranks call it.

    Returns None on the CPU, on a shared device, and where the device has no backend of its own.
    The device becomes this process's current one.

    Args:
        device: device of this rank.
        shared: whether several ranks have the same device.
        seconds: timeout of a transfer.
    """
    if is_cpu(device):
        return None
    set_current(device)
    name = None if shared else device_backend(device)
    if name is None:
        return None
    limit = timedelta(seconds=seconds)
    made: dist.ProcessGroup = dist.new_group(backend=name, timeout=limit, device_id=device)
    return made


def check_backend(name: str) -> None:
    """Check the name of a backend. Raises ValueError for an unknown name."""
    if name not in get_args(Backend):
        raise ValueError(f"there is no backend {name!r}: choose {' or '.join(get_args(Backend))}")

"""Tasks for runs on the stand-in device, whose loss notes where it was computed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import dure
import stand_in_backend  # noqa: F401 - ranks that have this task have the device and its backend
from rank_systems import adam, mixed_network
from small import examples, small_task

NOTES = "NOTED_DEVICES"
"""Variable with the path of the file in which losses note their devices."""


def noting_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, which notes the device of the outputs."""
    path = os.environ.get(NOTES)
    if path:
        with Path(path).open("a") as file:
            file.write(outputs.device.type + "\n")
    return F.cross_entropy(outputs, targets)


def noted(path: Path) -> Counter[str]:
    """How often the loss was computed on each type of device."""
    return Counter(path.read_text().split()) if path.exists() else Counter()


def noting_task(model: Any = mixed_network, **changes: Any) -> dure.Task:
    """The small task with this model and the noting loss."""
    return small_task(
        **{"model": model, "loss": noting_loss, "optimizer": adam, "train": examples(32), **changes}
    )


def ready(program: Any, *args: Any) -> Any:
    """Return program(*args): a rank that runs this function has the device and its backend."""
    return program(*args)


def dying_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy; the process of rank 1 is killed in its third batch."""
    global _batches
    _batches += 1
    if _batches == 3 and dist.is_initialized() and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(outputs, targets)


_batches = 0

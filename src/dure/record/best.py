"""The best model of a run in its folder: best.safetensors, and which step it is of.

It is replaced as soon as a better one is measured, and so may be newer than the newest checkpoint.
A run that goes on from that checkpoint needs the best one of then: until the next checkpoint it is
kept as best.before.safetensors.

    a better model      best -> before, if there is no before yet; then the new best
    a checkpoint        before goes
    a run goes on       whichever of the two the checkpoint knows of is best; the other goes
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dure.errors import RunFolderError
from dure.record.disk import told, write_atomically
from dure.record.inside import pinned
from dure.record.on_disk import Leaf, TensorsOnDisk
from dure.record.weights import TensorFile, tensors_in

BEST = "best.safetensors"
BEFORE = "best.before.safetensors"
_STEP = "dure.step"


def keep_best(folder: Path, weights: Mapping[str, Leaf], step: int) -> None:
    """Writes the best model. Raises RunFolderWriteError."""
    best = folder / BEST
    # The first one since the checkpoint is the one that it knows of.
    if best.exists() and not (folder / BEFORE).exists():
        with told(best):
            os.replace(best, folder / BEFORE)
    write_atomically(best, TensorFile(weights, {_STEP: str(step)}))


def settle_best(folder: Path) -> None:
    """A checkpoint was written: it knows of the best model that there is."""
    with told(folder / BEFORE):
        (folder / BEFORE).unlink(missing_ok=True)


def go_back(folder: Path, step: int | None) -> None:
    """The best model is again that of `step`, or there is none.

    Raises RunFolderError where that one is gone.
    """
    best = folder / BEST
    before = folder / BEFORE
    if step is None:
        settle_best(folder)
        with told(best):
            best.unlink(missing_ok=True)
    elif _step_of(best) == step:
        settle_best(folder)
    elif _step_of(before) == step:
        with told(best):
            os.replace(before, best)
    else:
        raise RunFolderError(
            f"{best} is not the model of step {step}, the best one when the checkpoint was "
            f"written: put back a copy of it, or remove the checkpoint to train from the start"
        )


def best_weights(folder: Path) -> Mapping[str, Leaf] | None:
    """The weights of the best model, each read when asked for; None if there is none.

    Raises RunFolderError if they cannot be read.
    """
    path = folder / BEST
    try:
        return TensorsOnDisk(tensors_in(path)) if path.exists() else None
    except (OSError, ValueError, SafetensorError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error


def _step_of(path: Path) -> int | None:
    try:
        with pinned(path) as name, safe_open(name, framework="pt") as file:
            return int((file.metadata() or {})[_STEP])
    except (OSError, LookupError, ValueError, SafetensorError):
        return None

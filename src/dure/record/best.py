"""The best model of a run in its folder: best.safetensors, with its step.

The file is replaced as soon as a better model is measured, and so may be newer than the newest
checkpoint. A run resumed from that checkpoint needs the best model at the checkpoint: until the
next checkpoint that model stays as best.before.safetensors. The file's metadata have the CRC-32 of
all its bytes, computed with zeros in the place of the checksum.

    a better model      best -> before, if there is no before yet; then the new best
    a checkpoint        before is deleted
    a resumed run       the model that the checkpoint refers to becomes best; the other is deleted
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dure.errors import RunFolderError
from dure.record.disk import disk_errors, write_atomically
from dure.record.disk_tensors import DiskTensors, Leaf
from dure.record.seal import checksum
from dure.record.untrusted_files import opened, pinned
from dure.record.weights import TensorFile, tensors_in

BEST = "best.safetensors"
BEFORE = "best.before.safetensors"
_STEP = "dure.step"
_SUM = "dure.checksum"
_NONE = "00000000"
_PLACE = b'"' + _SUM.encode() + b'":"'
_HEAD = 4096
"""Bytes at the beginning of a file that contain its metadata."""

_PIECE = 4 << 20


def keep_best(folder: Path, weights: Mapping[str, Leaf], step: int) -> None:
    """Write the best model. Raises RunFolderWriteError."""
    best = folder / BEST
    # The first best model after a checkpoint replaces the model that the checkpoint refers to.
    if best.exists() and not (folder / BEFORE).exists():
        with disk_errors(best):
            os.replace(best, folder / BEFORE)
    write_atomically(best, _sealed(TensorFile(weights, {_STEP: str(step), _SUM: _NONE})))


def drop_previous_best(folder: Path) -> None:
    """Delete the older best model after a checkpoint, which refers to the current one."""
    with disk_errors(folder / BEFORE):
        (folder / BEFORE).unlink(missing_ok=True)


def restore_best(folder: Path, step: int | None) -> None:
    """Restore the best model of `step`; None deletes the best model.

    Raises RunFolderError if the best model of that step is gone.
    """
    best = folder / BEST
    before = folder / BEFORE
    if step is None:
        drop_previous_best(folder)
        with disk_errors(best):
            best.unlink(missing_ok=True)
    elif _step_of(best) == step:
        _check(best)
        drop_previous_best(folder)
    elif _step_of(before) == step:
        _check(before)
        with disk_errors(best):
            os.replace(before, best)
    else:
        raise RunFolderError(
            f"{best} is not the model of step {step}, the best one when the checkpoint was "
            "written: restore it from a copy, or remove the checkpoint to train from the start"
        )


def best_weights(folder: Path) -> Mapping[str, Leaf] | None:
    """Return the weights of the best model, each read on access; None if there is none.

    Raises RunFolderError if they cannot be read.
    """
    path = folder / BEST
    try:
        if not path.exists():
            return None
        _check(path)
        return DiskTensors(tensors_in(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise RunFolderError(f"cannot read {path}: {error}") from error


def _sealed(file: TensorFile) -> Iterator[bytes | memoryview]:
    """Yield the pieces of the file, with its checksum in the header."""
    found = checksum(b"")
    for piece in file:
        found = checksum(piece, found)
    pieces = iter(file)
    header = bytes(next(pieces))
    yield header.replace(_PLACE + _NONE.encode(), _PLACE + found.encode(), 1)
    yield from pieces


def _check(path: Path) -> None:
    """Raise RunFolderError if the file has changed since it was written.

    A file of dure up to 0.1 has no checksum, and passes.
    """
    with opened(path) as file:
        # The metadata are the first entry of the header.
        head = file.read(_HEAD)
        at = head.find(_PLACE) + len(_PLACE)
        if at < len(_PLACE):
            return
        said = head[at : at + len(_NONE)]
        found = checksum(head[:at] + _NONE.encode() + head[at + len(_NONE) :])
        while piece := file.read(_PIECE):
            found = checksum(piece, found)
    if found.encode() != said:
        raise RunFolderError(
            f"{path} is damaged: its checksum does not match its content: restore it from a copy"
        )


def _step_of(path: Path) -> int | None:
    try:
        with pinned(path) as name, safe_open(name, framework="pt") as file:
            return int((file.metadata() or {})[_STEP])
    except (OSError, LookupError, ValueError, SafetensorError):
        return None

"""Checkpoints as files: their names, and their checksums, without reading a tensor.

What only copies or checks a run needs no more of a checkpoint, and does without torch.
`dure.record.checkpoint` says what the files hold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dure.errors import RunFolderError
from dure.record.inside import LARGE, contents
from dure.record.seal import Seal, checksum_of, unsealed

PARTS = ("model.safetensors", "state.safetensors", "state.json")
"""The files of a checkpoint; the last one names the others."""


class CheckpointFiles(NamedTuple):
    """The folder of a checkpoint whose checksums were compared.

    state: the content of state.json, without the seal. seal: None where the checkpoint is older
    than seals: then nothing was compared.
    """

    path: Path
    state: bytes
    seal: Seal | None


def name_of(step: int, past: int = 0) -> str:
    """The name of a step's checkpoint.

    past: in the middle of the next step, a number that grows with what is done of it; 0: nothing.
    """
    return f"{step:08d}.{past:08d}" if past else f"{step:08d}"


def place_of(name: str) -> tuple[int, int] | None:
    """The step of the checkpoint of this name, and how far it is past that; in their order.

    None for whatever else lies in the folder.
    """
    if not NAME.fullmatch(name):
        return None
    step, _, past = name.partition(".")
    place = int(step), int(past or 0)
    return place if name_of(*place) == name else None


NAME = re.compile(r"[0-9]{8,18}(\.[0-9]{8,18})?")


def newest(folder: Path) -> CheckpointFiles | None:
    """The newest checkpoint in `folder`, its checksums compared; None if there is none.

    Raises RunFolderError if it cannot be read, or is damaged.
    """
    # As numbers: as texts, the names of nine digits would come before those of eight.
    places = [place_of(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    last = max((place for place in places if place is not None), default=None)
    if last is None:
        return None
    path = folder / name_of(*last)
    try:
        content = contents(path / PARTS[2], most=LARGE)
        sums = {name: checksum_of(path / name) for name in PARTS[:2]}
    except OSError as error:
        raise RunFolderError(
            f"{path} is not a whole checkpoint: {error.strerror} ({error.filename})"
        ) from error
    try:
        state, seal = unsealed(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{PARTS[2]}: {error}") from error
    for name, found in sums.items():
        if seal is not None and seal.files.get(name) != found:
            raise damaged(path, f"the checksum of {name} is not that of its content")
    return CheckpointFiles(path, state, seal)


def damaged(checkpoint: Path, reason: str) -> RunFolderError:
    """The error about a checkpoint that is not what was written."""
    return RunFolderError(
        f"the checkpoint {checkpoint} is damaged ({reason}): put back a copy of it, or remove it "
        f"to train from the start"
    )

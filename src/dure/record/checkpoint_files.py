"""Checkpoints as files: their names, and their checksums, without reading a tensor.

Code that only copies or checks a run needs no more of a checkpoint, and does not load torch.
`dure.record.checkpoint` describes the content of the files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dure.errors import RunFolderError
from dure.record.seal import Seal, checksum_of, unsealed
from dure.record.untrusted_files import LARGE, contents

PARTS = ("model.safetensors", "state.safetensors", "state.json")
"""Files of a checkpoint; the last file has the checksums of the others."""


class CheckpointFiles(NamedTuple):
    """A checkpoint with verified checksums.

    state: the content of state.json, without the seal. seal: None for a checkpoint older than
    seals, which has no checksums to verify.
    """

    path: Path
    state: bytes
    seal: Seal | None


def name_of(step: int, past: int = 0) -> str:
    """Return the name of a step's checkpoint.

    past: progress within the next step, a number that grows; 0 without progress.
    """
    return f"{step:08d}.{past:08d}" if past else f"{step:08d}"


def place_of(name: str) -> tuple[int, int] | None:
    """Return the step and the progress within the next step, in a checkpoint's name.

    None for any other name. The pairs sort in order of progress.
    """
    if not NAME.fullmatch(name):
        return None
    step, _, past = name.partition(".")
    place = int(step), int(past or 0)
    return place if name_of(*place) == name else None


NAME = re.compile(r"[0-9]{8,18}(\.[0-9]{8,18})?")


def newest(folder: Path) -> CheckpointFiles | None:
    """Return the newest checkpoint in `folder`, with verified checksums; None if there is none.

    Raises RunFolderError if the checkpoint cannot be read, or is damaged.
    """
    # As numbers: as texts, names of nine digits would precede names of eight.
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
            f"{path} is not a complete checkpoint: {error.strerror} ({error.filename})"
        ) from error
    try:
        state, seal = unsealed(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{PARTS[2]}: {error}") from error
    for name, found in sums.items():
        if seal is not None and seal.files.get(name) != found:
            raise damaged(path, f"the checksum of {name} does not match its content")
    return CheckpointFiles(path, state, seal)


def damaged(checkpoint: Path, reason: str) -> RunFolderError:
    """Return the error for a damaged checkpoint."""
    return RunFolderError(
        f"the checkpoint {checkpoint} is damaged ({reason}): restore it from a copy, or remove it "
        "to train from the start"
    )

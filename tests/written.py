"""What lies in the files of a checkpoint, for tests that look at it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from dure.record.checkpoint import stored, unpack_tree
from dure.record.weights import weights_from_bytes

Files = tuple[bytes, bytes, bytes]


def files_in(folder: Path) -> Files | None:
    """The content of the newest checkpoint's three files, the last one without its seal."""
    newest = stored(folder)
    if newest is None:
        return None
    weights, tensors = (
        (newest.path / name).read_bytes() for name in ("model.safetensors", "state.safetensors")
    )
    return weights, tensors, newest.state


def unpacked(files: Files) -> tuple[dict[str, Tensor], Any]:
    """The weights and the state in such files, in memory."""
    weights, tensors, state = files
    return weights_from_bytes(weights), unpack_tree(json.loads(state), weights_from_bytes(tensors))

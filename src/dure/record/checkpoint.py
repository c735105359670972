"""Checkpoints: weights in safetensors, everything else as a tree without pickle.

A checkpoint is a folder named by its step, zero-padded so that names sort:

    checkpoint/00000230/model.safetensors    the weights, a plain state_dict
    checkpoint/00000230/state.safetensors    the tensors of the rest: optimizer, generators
    checkpoint/00000230/state.json           the rest, with {"$tensor": name} where a tensor stands

It is written next to its place and renamed into it, so a kill at any moment leaves the old
checkpoint or the new one, never half of one. Trees are made of dict, list, tuple, Tensor, str, int,
float, bool and None.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy
from torch import Tensor

from dure.errors import RunFolderError
from dure.record.weights import weights_from_bytes, weights_to_bytes

VERSION = 2
"""Of the state in a checkpoint. The first had no number, and counters without names."""

_PARTS = ("model.safetensors", "state.safetensors", "state.json")


def pack_tree(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """A tree as JSON-able data and its tensors by name. Raises TypeError at what is neither."""
    tensors: dict[str, Tensor] = {}

    def pack(node: Any) -> Any:
        if isinstance(node, Tensor):
            tensors[str(len(tensors))] = node
            return {"$tensor": str(len(tensors) - 1)}
        if isinstance(node, Mapping):
            # As pairs: keys of JSON are texts, and those of an optimizer's state are numbers.
            return {"$dict": [[pack(key), pack(value)] for key, value in node.items()]}
        if isinstance(node, tuple):
            return {"$tuple": [pack(item) for item in node]}
        if isinstance(node, list):
            return [pack(item) for item in node]
        if isinstance(node, numpy.generic):
            return node.item()
        if node is None or isinstance(node, (str, int, float, bool)):
            return node
        raise TypeError(f"a {type(node).__name__} cannot be put into a checkpoint without pickle")

    return pack(tree), tensors


def unpack_tree(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `pack_tree`."""
    if isinstance(packed, list):
        return [unpack_tree(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    # Every object has one entry, since pack_tree writes mappings as pairs.
    ((kind, content),) = packed.items()
    if kind == "$tensor":
        return tensors[content]
    if kind == "$tuple":
        return tuple(unpack_tree(item, tensors) for item in content)
    return {unpack_tree(key, tensors): unpack_tree(value, tensors) for key, value in content}


def tree_to_bytes(tree: Any) -> bytes:
    """A tree as one message to another rank."""
    # Two parts, as in a checkpoint: tensors as raw bytes, the tree around them as JSON.
    packed, tensors = pack_tree(tree)
    return msgspec.msgpack.encode((json.dumps(packed).encode(), weights_to_bytes(tensors)))


def tree_from_bytes(content: bytes) -> Any:
    """The inverse of `tree_to_bytes`."""
    packed, tensors = msgspec.msgpack.decode(content, type=tuple[bytes, bytes])
    return unpack_tree(json.loads(packed), weights_from_bytes(tensors))


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new one, even across a kill."""
    # The number of the process: two that write the same file do not write into each other's.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        # Else the name could be on the disk before the content, when the power fails.
        os.fsync(file.fileno())
    os.replace(beside, path)


def pack_checkpoint(weights: Mapping[str, Tensor], state: Any) -> tuple[bytes, bytes, bytes]:
    """The three files of a checkpoint."""
    packed, tensors = pack_tree(state)
    return weights_to_bytes(weights), weights_to_bytes(tensors), json.dumps(packed).encode()


def unpack_checkpoint(parts: tuple[bytes, bytes, bytes]) -> tuple[dict[str, Tensor], Any]:
    """(weights, state): the inverse of `pack_checkpoint`."""
    return weights_from_bytes(parts[0]), unpack_tree(
        json.loads(parts[2]), weights_from_bytes(parts[1])
    )


def check_version(state: Mapping[str, Any], what: str, oldest: int = 1) -> None:
    """Raises RunFolderError if the dure that wrote this state meant something else by its names.

    oldest: the first version that can be read; a newer one than `VERSION` never can.
    """
    version = state.get("version", 1)
    if version not in range(oldest, VERSION + 1):
        writer = state.get("dure", "0.1.0 or older")
        known = f"version {VERSION}" if oldest == VERSION else f"versions {oldest} to {VERSION}"
        raise RunFolderError(
            f"{what} was written by dure {writer}, as version {version}; this dure reads {known}: "
            f"go on with the one that wrote it"
        )


def save_checkpoint(folder: Path, step: int, parts: tuple[bytes, bytes, bytes]) -> Path:
    """Writes the checkpoint of `step` into `folder` and removes the older ones."""
    folder.mkdir(exist_ok=True)
    final = folder / f"{step:08d}"
    if final.exists():  # a run resumed here wrote it before, with the same bits
        return final
    beside = folder / f".{final.name}.partial"
    # What a kill left half written.
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for name, content in zip(_PARTS, parts, strict=True):
        with open(beside / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    os.rename(beside, final)
    # Only after the new one is in place: at every moment there is a whole one.
    for other in folder.iterdir():
        if other != final:
            shutil.rmtree(other, ignore_errors=True)
    return final


def read_checkpoint(folder: Path) -> tuple[bytes, bytes, bytes] | None:
    """The files of the newest checkpoint in `folder`, or None.

    Raises RunFolderError if they cannot be read.
    """
    # Without the half-written ones, whose names begin with a dot.
    names = sorted(p.name for p in folder.glob("[0-9]*")) if folder.is_dir() else []
    if not names:
        return None
    newest = folder / names[-1]
    try:
        first, second, third = ((newest / name).read_bytes() for name in _PARTS)
    except OSError as error:
        raise RunFolderError(
            f"{newest} is not a whole checkpoint: {error.strerror} ({error.filename})"
        ) from error
    return first, second, third

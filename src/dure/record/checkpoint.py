"""Checkpoints: weights in safetensors, everything else as a tree without pickle.

A checkpoint is a folder named by its step, zero-padded so that names sort:

    checkpoint/00000230/model.safetensors    the weights, a plain state_dict
    checkpoint/00000230/state.safetensors    the tensors of the rest: optimizer, generators
    checkpoint/00000230/state.json           the rest, with {"$tensor": name} in place of a tensor,
                                             and the seal around it (`dure.record.seal`)

A checkpoint within a long step has a second number, such as 00000230.00014720: the progress after
the step.

It is written under a temporary name and renamed, so a kill at any moment leaves the old checkpoint
or the new one, never an incomplete one. A folder with another name is not dure's: it is neither
read nor removed, and neither is a checkpoint of another run. Trees are made of dict, list, tuple,
Tensor, str, int, float, bool and None. A tensor in a file (`dure.record.disk_tensors`) counts as a
tensor; the tensors of a checkpoint are read in this form.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy
from safetensors import SafetensorError
from torch import Tensor

from dure.errors import RunFolderError, described
from dure.record.checkpoint_files import NAME, PARTS, damaged, name_of, newest, place_of
from dure.record.disk import (
    ChecksummedPieces,
    disk_errors,
    make_folder,
    sync_folder,
    write_atomically,
    write_synced,
)
from dure.record.disk_tensors import DiskTensor, Leaf
from dure.record.seal import Seal, begins_as_of, checksum, sealed
from dure.record.untrusted_files import LARGE, contents, opened
from dure.record.weights import TensorFile, tensors_in, weights_from_bytes, weights_to_bytes

UNREADABLE = (SafetensorError, ValueError, LookupError, TypeError, RecursionError)
"""Errors raised by reading a tree from arbitrary JSON."""

VERSION = 2
"""Version of the state. The first version had no number, and counters without names."""


def pack_tree(tree: Any) -> tuple[Any, dict[str, Leaf]]:
    """Return a tree as JSON-able data, and its tensors by name.

    Raises TypeError for other types.
    """
    tensors: dict[str, Leaf] = {}
    return _packed(tree, tensors), tensors


def _packed(node: Any, tensors: dict[str, Leaf]) -> Any:
    """Return a part of a tree, and add its tensors to `tensors`."""
    # No closure inside pack_tree: a recursive closure is a reference cycle, which would keep the
    # tensors of every checkpoint alive until the next garbage collection.
    if isinstance(node, (Tensor, DiskTensor)):
        tensors[str(len(tensors))] = node
        return {"$tensor": str(len(tensors) - 1)}
    if isinstance(node, Mapping):
        # As pairs: keys of JSON are texts, and keys of an optimizer's state are numbers.
        pairs = node.items()
        return {"$dict": [[_packed(key, tensors), _packed(value, tensors)] for key, value in pairs]}
    if isinstance(node, tuple):
        return {"$tuple": [_packed(item, tensors) for item in node]}
    if isinstance(node, list):
        return [_packed(item, tensors) for item in node]
    if isinstance(node, numpy.generic):
        return node.item()
    if node is None or isinstance(node, (str, int, float, bool)):
        return node
    raise TypeError(f"a {type(node).__name__} cannot be put into a checkpoint without pickle")


def unpack_tree(packed: Any, tensors: Mapping[str, Leaf]) -> Any:
    """Return the tree that `pack_tree` has packed."""
    if isinstance(packed, list):
        return [unpack_tree(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    # Every object has a single entry, since pack_tree writes mappings as pairs.
    ((kind, content),) = packed.items()
    if kind == "$tensor":
        return tensors[content]
    if kind == "$tuple":
        return tuple(unpack_tree(item, tensors) for item in content)
    return {unpack_tree(key, tensors): unpack_tree(value, tensors) for key, value in content}


def tree_to_bytes(tree: Any) -> bytes:
    """Return a tree as a message to another rank."""
    # Two parts, as in a checkpoint: tensors as raw bytes, the tree around them as JSON.
    packed, tensors = pack_tree(tree)
    return msgspec.msgpack.encode((json.dumps(packed).encode(), weights_to_bytes(tensors)))


def tree_from_bytes(content: bytes) -> Any:
    """Return the tree of a message of `tree_to_bytes`."""
    packed, tensors = msgspec.msgpack.decode(content, type=tuple[bytes, bytes])
    return unpack_tree(json.loads(packed), weights_from_bytes(tensors))


_TREE = b"dure tree "
"""Beginning of a file with a tree; its CRC-32 and a line break follow."""


def write_tree(path: Path, tree: Mapping[str, Any]) -> None:
    """Write a tree as a file with a checksum, atomically. Raises RunFolderWriteError."""
    content = tree_to_bytes(tree)
    write_atomically(path, [_TREE + checksum(content).encode() + b"\n", content])


def read_tree(path: Path) -> dict[str, Any]:
    """Return the mapping in a file of `write_tree`; older files have no checksum.

    Raises RunFolderError if the file is missing or damaged.
    """
    try:
        content = contents(path, most=LARGE)
        if content.startswith(_TREE):
            head, content = content[: len(_TREE) + 9], content[len(_TREE) + 9 :]
            if head != _TREE + checksum(content).encode() + b"\n":
                raise ValueError("its checksum does not match its content")
        tree = tree_from_bytes(content)
    except (OSError, *UNREADABLE) as error:
        raise RunFolderError(f"{path} is damaged: {error}: restore it from a copy") from error
    if not isinstance(tree, dict):
        raise RunFolderError(f"{path} is damaged: it does not contain a mapping")
    return tree


class CheckpointContents(NamedTuple):
    """The three files of a checkpoint, whose tensors are still the learner's, or are in files.

    They become bytes while they are written, piece by piece, so that the model is not copied. Until
    then the tensors must not change.
    """

    weights: TensorFile
    tensors: TensorFile
    state: bytes


def pack_checkpoint(weights: Mapping[str, Leaf], state: Any) -> CheckpointContents:
    """Return the content of a checkpoint. Raises TypeError for unsupported values."""
    packed, tensors = pack_tree(state)
    return CheckpointContents(TensorFile(weights), TensorFile(tensors), json.dumps(packed).encode())


def check_version(state: Mapping[str, Any], what: str, oldest: int = 1) -> None:
    """Raise RunFolderError if this dure cannot read the version of a state.

    oldest: first readable version; versions newer than `VERSION` are never readable.
    """
    version = state.get("version", 1)
    if version not in range(oldest, VERSION + 1):
        writer = state.get("dure", "0.1.0 or older")
        known = f"version {VERSION}" if oldest == VERSION else f"versions {oldest} to {VERSION}"
        raise RunFolderError(
            f"{what} was written by dure {writer}, in version {version} of the format; this dure "
            f"reads {known}: use the dure that wrote it"
        )


def save_checkpoint(
    folder: Path,
    step: int,
    contents: CheckpointContents,
    seal: Seal | None = None,
    known: Collection[str] = (),
    past: int = 0,
) -> Path:
    """Write the checkpoint of `step` into `folder`, and remove the older checkpoints of the run.

    Args:
        folder: folder of the checkpoints.
        step: number of the step.
        contents: content of the files.
        seal: identifies the run; its checksums are filled in here.
        known: names of older checkpoints that belong to this run without saying so.
        past: progress within the next step, as in `name_of`.

    Returns:
        The path of the checkpoint.

    Raises:
        RunFolderWriteError: if it cannot be written; the older checkpoints then still exist.
    """
    final = folder / name_of(step, past)
    with disk_errors(final):
        if not folder.is_dir():
            make_folder(folder)
            sync_folder(folder.parent)
        if final.exists():  # a run resumed here wrote it before, with the same bits
            return final
        seal = seal if seal is not None else Seal()
        beside = folder / f".{final.name}.partial"
        # Left incomplete by a kill.
        shutil.rmtree(beside, ignore_errors=True)
        make_folder(beside)
        try:
            _write(beside, contents, seal)
            os.rename(beside, final)
        except OSError:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        sync_folder(folder)
    # Only after the new checkpoint is in place: at every moment there is a complete one.
    for other in folder.iterdir():
        if _PARTIAL.fullmatch(other.name) or _is_older(other, (step, past), seal.run, known):
            shutil.rmtree(other, ignore_errors=True)
    return final


def _write(folder: Path, contents: CheckpointContents, seal: Seal) -> None:
    """Write and sync the three files; state.json last, since it has the checksums of the others."""
    files: dict[str, str] = {}
    for name, file in zip(PARTS[:2], contents[:2], strict=True):
        pieces = ChecksummedPieces(file)
        write_synced(folder / name, pieces)
        files[name] = pieces.checksum
    whole = msgspec.structs.replace(seal, files=files)
    write_synced(folder / PARTS[2], sealed(contents.state, whole))
    sync_folder(folder)


_PARTIAL = re.compile(rf"\.{NAME.pattern}\.partial")


def _is_older(other: Path, place: tuple[int, int], run: str, known: Collection[str]) -> bool:
    """Return whether this is an older checkpoint of the same run; no other may be removed."""
    its_place = place_of(other.name)
    if its_place is None or its_place >= place:
        return False
    if other.name in known:
        return True
    try:
        with opened(other / PARTS[2]) as file:
            return begins_as_of(file.read(200), run)
    except OSError:
        return False


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in its folder.

    weights, tensors: content of its two tensor files, still on disk. state: state.json, without the
    seal. seal: None for a checkpoint older than seals.
    """

    path: Path
    weights: Mapping[str, DiskTensor]
    tensors: Mapping[str, DiskTensor]
    state: bytes
    seal: Seal | None

    @property
    def step(self) -> int:
        """Step in the name of the checkpoint."""
        return int(self.path.name.partition(".")[0])

    @property
    def tree(self) -> Any:
        """The state, with tensors still in the file. Raises the errors in `UNREADABLE`."""
        return unpack_tree(json.loads(self.state), self.tensors)


def stored(folder: Path) -> StoredCheckpoint | None:
    """Return the newest checkpoint in `folder`, with verified checksums; None if there is none.

    Raises RunFolderError if the checkpoint cannot be read, or is damaged.
    """
    found = newest(folder)
    if found is None:
        return None
    try:
        weights, tensors = (tensors_in(found.path / name) for name in PARTS[:2])
    except (OSError, *UNREADABLE) as error:
        raise damaged(found.path, described(error)) from error
    return StoredCheckpoint(found.path, weights, tensors, found.state, found.seal)


def reseal(checkpoint: StoredCheckpoint, config: Mapping[str, Any]) -> None:
    """Write the run's new settings into the checkpoint's seal."""
    assert checkpoint.seal is not None
    seal = msgspec.structs.replace(checkpoint.seal, config=dict(config))
    write_atomically(checkpoint.path / PARTS[2], sealed(checkpoint.state, seal))

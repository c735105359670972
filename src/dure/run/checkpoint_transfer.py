"""Transfer of checkpoints: from all ranks to rank 0, and from rank 0 to all ranks.

Only rank 0 needs the run folder. A tree of tensors travels as a description of its structure in one
message, followed by the tensors, a few million bytes at a time
(`dure.collectives.tensor_transfer`). Ranks on rank 0's host that see the same files read the
checkpoint from disk, and nothing travels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dure.collectives.group import Group
from dure.collectives.tensor_transfer import broadcast, gathered
from dure.memory.mapped import LEAST
from dure.memory.spill_store import IN_MEMORY, SpillStore
from dure.record.checkpoint import UNREADABLE, StoredCheckpoint, pack_tree, unpack_tree
from dure.record.disk_tensors import DiskTensors, Leaf, TensorMeta, forms_of, in_memory
from dure.record.weights import tensors_in


def gathered_trees(group: Group, mine: Any, store: SpillStore) -> list[Any]:
    """Gather the trees of all ranks on rank 0, in order of rank; other ranks get an empty list.

    Large tensors of other ranks go to the shelf. Collective: all ranks call this function.
    """
    packed, tensors = pack_tree(mine)
    told = group.gather_bytes(json.dumps(packed).encode())
    found = gathered(group, tensors, store.place)
    return [
        unpack_tree(json.loads(around), leaves) for around, leaves in zip(told, found, strict=True)
    ]


class _Told(msgspec.Struct):
    """Rank 0's description of a checkpoint. files: identities of its files, as `_identities`."""

    path: str
    files: list[tuple[int, int]]
    state: bytes
    weights: list[tuple[str, str, list[int]]]
    tensors: list[tuple[str, str, list[int]]]


class ReceivedCheckpoint(msgspec.Struct):
    """A checkpoint as a rank receives it.

    weights: of the model; if the rank takes parts, each weight is read on access. state: its large
    tensors are in files if the rank takes parts of them.
    """

    weights: Mapping[str, Any]
    state: Any


def broadcast_checkpoint(
    group: Group, stored: StoredCheckpoint | None, store: SpillStore, by_parts: bool
) -> ReceivedCheckpoint | None:
    """Broadcast rank 0's checkpoint to every rank; return None if rank 0 has none.

    by_parts: whether ranks read their parts from files; else all tensors are in memory. Collective:
    all ranks call this function.
    """
    content = None
    if group.rank == 0:
        # None is sent too: only rank 0 can know that there is no checkpoint.
        content = msgspec.msgpack.encode(None if stored is None else _told_of(stored))
    told = msgspec.msgpack.decode(group.broadcast_bytes(content), type=_Told | None)
    if told is None:
        return None
    store = store if by_parts else IN_MEMORY
    parts = None if stored is None else (stored.weights, stored.tensors)
    weights, tensors = _taken(group, told, parts, store)
    if by_parts:
        return ReceivedCheckpoint(DiskTensors(weights), _state(told, _light(tensors)))
    memory = [{name: in_memory(leaf) for name, leaf in one.items()} for one in (weights, tensors)]
    return ReceivedCheckpoint(memory[0], _state(told, memory[1]))


def _state(told: _Told, tensors: Mapping[str, Leaf]) -> Any:
    return unpack_tree(json.loads(told.state), tensors)


def _light(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return the leaves with small ones in memory, as `SpillStore` does."""
    return {name: in_memory(leaf) if leaf.nbytes < LEAST else leaf for name, leaf in leaves.items()}


_FILES = ("model.safetensors", "state.safetensors")


def _told_of(stored: StoredCheckpoint) -> _Told:
    return _Told(
        path=str(stored.path.absolute()),
        files=_identities(stored.path),
        state=stored.state,
        weights=[(*form[:2], list(form.shape)) for form in forms_of(stored.weights)],
        tensors=[(*form[:2], list(form.shape)) for form in forms_of(stored.tensors)],
    )


def _identities(path: Path) -> list[tuple[int, int]]:
    """Return the (device, inode) pairs that identify the checkpoint's files on a host."""
    return [(one.st_dev, one.st_ino) for one in (os.stat(path / name) for name in _FILES)]


_Parts = tuple[Mapping[str, Leaf], Mapping[str, Leaf]]


def _taken(group: Group, told: _Told, parts: _Parts | None, store: SpillStore) -> _Parts:
    """Return (weights, tensors) on this rank. parts: rank 0's tensors, None on other ranks."""
    if group.size == 1:
        assert parts is not None
        return parts
    near = next(ranks for ranks in group.hosts() if group.rank in ranks)
    if parts is None and 0 in near:
        parts = _where_they_lie(told)
    everybody = group.all_gather_values([float(parts is not None)], "looking for a checkpoint")
    if all(sees for (sees,) in everybody):
        assert parts is not None
        return parts
    weights, tensors = parts if parts is not None else ({}, {})
    return (
        broadcast(group, weights, [TensorMeta(*form) for form in told.weights], store.place),
        broadcast(group, tensors, [TensorMeta(*form) for form in told.tensors], store.place),
    )


def _where_they_lie(told: _Told) -> _Parts | None:
    """Return the checkpoint's tensors if this rank sees the same files as rank 0, else None."""
    path = Path(told.path)
    try:
        if _identities(path) != told.files:
            return None
        weights, tensors = (tensors_in(path / name) for name in _FILES)
        return weights, tensors
    except (OSError, *UNREADABLE):
        return None

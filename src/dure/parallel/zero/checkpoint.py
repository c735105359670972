"""Checkpoints of which every rank writes a part, and which any number of ranks can read.

    folder/00002-of-00004.safetensors    rank 2's pieces: "weights/<name>" and "state/<key>/<name>",
                                         runs of elements; the metadata has their positions
    folder/rest.safetensors              tensors that are not divided, such as buffers
    folder/index.json                    version, names, shapes, the optimizer's settings, number of
                                         ranks, checksums (CRC-32) of the files and of the index;
                                         written last

A reader takes from each file only the elements that it needs, so that a rank needs memory for its
share only. Checksums are compared first: each of N ranks reads every N-th file for that purpose.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.errors import RunFolderError, described
from dure.parallel.zero.agreement import raise_on_all_ranks
from dure.parallel.zero.optimizer import PartitionedOptimizer
from dure.parallel.zero.shares import ParameterShare
from dure.record.checkpoint import pack_tree, unpack_tree
from dure.record.disk import ChecksummedPieces, write_atomically
from dure.record.disk_tensors import Leaf
from dure.record.seal import checksum, checksum_of
from dure.record.untrusted_files import LARGE, contents, pinned
from dure.record.weights import TensorFile, pairs_in, weights_from_bytes

VERSION = 2
"""Version of the index. In version 1, whose index has no number, runs were pairs [start, stop]."""

_SETTINGS = "settings/"
_REST = "rest.safetensors"


def file_of(rank: int, ranks: int) -> str:
    """Return the file name of a rank's part in a checkpoint of `ranks` ranks."""
    return f"{rank:05d}-of-{ranks:05d}.safetensors"


def save(
    folder: Path,
    model: nn.Module,
    shares: Sequence[ParameterShare],
    division: PartitionedOptimizer,
    group: Group,
) -> None:
    """Write this rank's part of a checkpoint to a folder that all ranks share. All ranks call it.

    An existing checkpoint stays valid until all parts of the new checkpoint are written. Only
    during the renames that follow is there no valid checkpoint. If a rank cannot write, all ranks
    raise.
    """
    # Rank 0 may name the parts in an index only when all of them are there.
    with raise_on_all_ranks(group, "waiting for all parts of a checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        pieces = ChecksummedPieces(_part(shares, division))
        write_atomically(_new(folder, file_of(group.rank, group.size)), pieces)
    # Checksums travel as float64 numbers, which represent 32 bits exactly.
    told = group.all_gather_values([float(int(pieces.checksum, 16))], "checksums of a checkpoint")
    sums = [f"{int(one):08x}" for (one,) in told]
    # No rank ends, or begins the next checkpoint, before this checkpoint is complete.
    with raise_on_all_ranks(group, "waiting for the index of a checkpoint"):
        if group.rank == 0:
            _write_index(folder, model, shares, division, sums)


def _new(folder: Path, name: str) -> Path:
    """Return the temporary path of a part, until all parts are written."""
    return folder / f"{name}.new"


def _part(shares: Sequence[ParameterShare], division: PartitionedOptimizer) -> TensorFile:
    """Return the content of this rank's file."""
    tensors: dict[str, Tensor] = {}
    runs: dict[str, dict[str, int]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for share in shares:
        # frozen parameters of stage 3 have weights here, and no state
        parts = {held.place: held.part for held in share.held}
        for index, name in enumerate(share.block.names):
            piece = share.block.piece(index, share.rank)
            if piece is None:
                continue
            runs[name] = {"start": piece.start, "stop": piece.stop}
            # the master weights: no precision is lost if parameters are gathered in bfloat16
            tensors[f"weights/{name}"] = share.of(share.master, piece)
            for key, value in division.state_of(parts.get(index)).items():
                if isinstance(value, Tensor):
                    tensors[f"state/{key}/{name}"] = value
                else:
                    numbers.setdefault(name, {})[key] = value
    return TensorFile(tensors, {"runs": json.dumps(runs), "numbers": json.dumps(numbers)})


def _write_index(
    folder: Path,
    model: nn.Module,
    shares: Sequence[ParameterShare],
    division: PartitionedOptimizer,
    sums: Sequence[str],
) -> None:
    """Write the tensors that are not divided, and the index.

    Args:
        folder: Folder of the checkpoint.
        model: The divided model.
        shares: This rank's shares of the model.
        division: The divided optimizer.
        sums: Checksums of the files of all ranks, in order of rank.

    Raises:
        RunFolderError: if the part of another rank is not in the folder.
    """
    ranks = len(sums)
    divided = {
        id(p): name
        for share in shares
        for name, p in zip(share.block.names, share.parameters, strict=True)
    }
    # with keep_vars, so that parameters can be matched by identity, tied parameters by every name
    state = model.state_dict(keep_vars=True)
    # JSON has no tensors: tensors among the settings go into rest.safetensors.
    settings, tensors = pack_tree(division.groups())
    rest: dict[str, Leaf] = {
        name: value
        for name, value in state.items()
        if id(value) not in divided and isinstance(value, Tensor)
    }
    rest |= {_SETTINGS + name: value for name, value in tensors.items()}
    blocks = [share.block for share in shares]
    index = {
        "version": VERSION,
        "ranks": ranks,
        "names": {
            name: divided[id(value)] for name, value in state.items() if id(value) in divided
        },
        "shapes": {
            name: shape
            for block in blocks
            for name, shape in zip(block.names, block.shapes, strict=True)
        },
        "order": [divided.get(id(parameter)) for parameter in division.parameters],
        "settings": settings,
    }
    pieces = ChecksummedPieces(TensorFile(rest))
    write_atomically(_new(folder, _REST), pieces)
    names = [_REST, *(file_of(rank, ranks) for rank in range(ranks))]
    # A folder that is local to each host would make a checkpoint with missing parts.
    unseen = [name for name in names if not _new(folder, name).exists()]
    if unseen:
        raise RunFolderError(
            f"rank 0 cannot find {_new(folder, unseen[0])}: all ranks have to write to one folder"
        )
    # Parts of two checkpoints are not valid: the old index goes first, the new index comes last.
    (folder / "index.json").unlink(missing_ok=True)
    for name in names:
        # Each rename is atomic. Files of an older checkpoint with more ranks may remain; the index
        # does not list them.
        _new(folder, name).rename(folder / name)
    files = {file_of(rank, ranks): one for rank, one in enumerate(sums)}
    write_atomically(
        folder / "index.json", _sealed({**index, "files": {**files, _REST: pieces.checksum}})
    )


def _sealed(index: Mapping[str, Any]) -> bytes:
    """Return the index as JSON, with its own checksum."""
    return json.dumps({**index, "checksum": checksum(json.dumps(index).encode())}).encode()


def _check_sums(folder: Path, index: Mapping[str, Any], rank: int, ranks: int) -> None:
    """Compare the checksums of this rank's share of the files. Raises ValueError for damage.

    Checkpoints of older versions have no checksums and pass.
    """
    if "checksum" not in index:
        return
    plain = {name: value for name, value in index.items() if name != "checksum"}
    if json.loads(_sealed(plain)) != index:
        raise ValueError("index.json is damaged: its checksum does not match its content")
    for name, said in list(index["files"].items())[rank::ranks]:
        if checksum_of(folder / name) != said:
            raise ValueError(f"{name} is damaged: its checksum does not match its content")


class _Run(NamedTuple):
    """Elements [start, stop) of a parameter that a file has."""

    start: int
    stop: int


_NOTHING = _Run(0, 0)


def _runs_of(written: Mapping[str, Any]) -> dict[str, _Run]:
    """Return the runs of a file by parameter, for both versions of the format."""
    return {
        name: _Run(**run) if isinstance(run, Mapping) else _Run(*run)
        for name, run in written.items()
    }


def _check_version(index: Mapping[str, Any], folder: Path) -> None:
    version = index.get("version", 1)
    if version > VERSION:
        raise RunFolderError(
            f"{folder} has version {version} of the format, but this dure reads only up to "
            f"version {VERSION}: update dure"
        )


_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors that reading raises for missing or damaged files, besides SafetensorError."""


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Context manager that raises errors of incomplete or damaged files as RunFolderError."""
    try:
        yield
    except (*_DAMAGE, SafetensorError) as error:
        said = described(error)
        raise RunFolderError(
            f"{folder} does not contain a complete checkpoint of ZeRO: {said}"
        ) from error


class Checkpoint:
    """Context manager that reads a checkpoint.

    rank, ranks: this reader checks the checksums of every file whose number is `rank` modulo
    `ranks`.

    Raises RunFolderError if there is no checkpoint, or if a part is missing or damaged.
    """

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        self.folder = folder
        # If a file cannot be opened, the files that were opened before are closed again.
        with _whole(folder), ExitStack() as stack:
            index = json.loads(contents(folder / "index.json"))
            _check_version(index, folder)
            _check_sums(folder, index, rank, ranks)
            rest = weights_from_bytes(contents(folder / _REST, most=LARGE))
            self._files: list[Any] = []
            for rank in range(index["ranks"]):
                file = folder / file_of(rank, index["ranks"])
                name = stack.enter_context(pinned(file))
                self._files.append(stack.enter_context(safe_open(name, framework="pt")))
            self._read_index(index, rest)
            self._read_headers()
            # All files are open and their headers read: they stay open until `__exit__`.
            self._open = stack.pop_all()

    def _read_index(self, index: Mapping[str, Any], rest: Mapping[str, Tensor]) -> None:
        self.names: dict[str, str] = dict(index["names"])
        self.order: list[str | None] = list(index["order"])
        self.shapes = {name: tuple(map(int, shape)) for name, shape in index["shapes"].items()}
        for name in self.names.values():
            self.shapes[name]  # raises KeyError
        self.rest = {name: value for name, value in rest.items() if not name.startswith(_SETTINGS)}
        tensors = {
            name.removeprefix(_SETTINGS): value
            for name, value in rest.items()
            if name.startswith(_SETTINGS)
        }
        self.groups: list[dict[str, Any]] = unpack_tree(index["settings"], tensors)

    def _read_headers(self) -> None:
        self._has = [set(file.keys()) for file in self._files]
        self._runs = [_runs_of(json.loads(file.metadata()["runs"])) for file in self._files]
        self._pairs = {key for file in self._files for key in pairs_in(file.metadata())}
        self._numbers: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, set[str]] = {}
        for file, has in zip(self._files, self._has, strict=True):
            # Numbers, such as a count of steps, are written by each rank that has a piece; the
            # number of the lowest rank counts.
            self._numbers = {**json.loads(file.metadata()["numbers"]), **self._numbers}
            for key in has:
                kind, _, name = key.removeprefix("state/").partition("/")
                if key.startswith("state/"):
                    self._keys.setdefault(name, set()).add(kind)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def read(self, key: str, name: str, start: int, stop: int) -> Tensor | None:
        """Return the elements [start, stop) of `key` of a parameter; None if there are none.

        A single number is returned as it is. Raises RunFolderError if some of the elements are
        missing.
        """
        with _whole(self.folder):
            return self._read(key, name, start, stop)

    def _read(self, key: str, name: str, start: int, stop: int) -> Tensor | None:
        parts = []
        for file, runs, has in zip(self._files, self._runs, self._has, strict=True):
            # The overlap of this file's run of the parameter with [start, stop).
            first, last = runs.get(name, _NOTHING)
            low = max(start, first)
            high = min(stop, last)
            if first < last and f"{key}/{name}" in has:
                # A slice reads only the requested elements from the file.
                own = file.get_slice(f"{key}/{name}")
                if not own.get_shape():
                    return file.get_tensor(f"{key}/{name}")  # type: ignore[no-any-return]
                if low < high:
                    parts.append(own[low - first : high - first])
        if not parts:
            return None
        # Files are in order of rank, and so are the pieces of a parameter.
        whole = torch.cat(parts)
        if len(whole) != stop - start:
            raise ValueError(f"{key}/{name} has {len(whole)} of the elements {start} to {stop}")
        # safetensors has no complex numbers: they are stored as pairs of real numbers
        return torch.view_as_complex(whole) if f"{key}/{name}" in self._pairs else whole

    def weights(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) of a parameter's weights."""
        with _whole(self.folder):
            # a frozen parameter, which was not divided when the checkpoint was written
            if name not in self.shapes:
                return self.rest[name].reshape(-1)[start:stop]
            found = self._read("weights", name, start, stop)
            if found is None:
                raise ValueError(f"no part has weights/{name}")
            return found

    def check_covers(self, name: str, start: int, stop: int) -> None:
        """Check that the files have the elements [start, stop) of a parameter.

        Only headers are read. Raises RunFolderError if elements are missing.
        """
        with _whole(self.folder):
            if name not in self.shapes:
                there = self.rest[name].numel()
            else:
                there = 0
                for file, runs, has in zip(self._files, self._runs, self._has, strict=True):
                    first, last = runs.get(name, _NOTHING)
                    if f"weights/{name}" not in has or first >= last:
                        continue
                    if file.get_slice(f"weights/{name}").get_shape()[0] != last - first:
                        raise ValueError(f"weights/{name} does not have the length of its run")
                    there += max(0, min(stop, last) - max(start, first))
            if there < stop - start:
                raise ValueError(f"the parts have {there} of the {stop - start} weights of {name}")

    def state_of(self, name: str, start: int, stop: int) -> dict[str, Any]:
        """Return the optimizer's state of a run of elements; empty if there is none."""
        tensors = {
            key: self.read(f"state/{key}", name, start, stop)
            for key in sorted(self._keys.get(name, ()))
        }
        return {
            **self._numbers.get(name, {}),
            **{key: value for key, value in tensors.items() if value is not None},
        }


@torch.no_grad()
def load(
    folder: Path,
    model: nn.Module,
    shares: Sequence[ParameterShare],
    division: PartitionedOptimizer,
    group: Group,
) -> None:
    """Load this rank's pieces from a checkpoint of the same model. Every rank calls it.

    Raises RunFolderError if there is no complete checkpoint, and ValueError if the checkpoint is of
    another model or optimizer. If any rank finds such an error, all ranks raise, and nothing
    changes.
    """
    with ExitStack() as stack:
        with raise_on_all_ranks(group, "reading a checkpoint"):
            checkpoint = stack.enter_context(Checkpoint(folder, group.rank, group.size))
            _check_model(model, checkpoint, folder)
            division.check_groups(checkpoint.groups)
            states: dict[int, dict[str, Any]] = {}
            for share in shares:
                for held in share.held:
                    name = share.block.names[held.place]
                    states[id(held.part)] = checkpoint.state_of(
                        name, held.piece.start, held.piece.stop
                    )
            _check_weights(model, shares, checkpoint)
        division.load_parts(states, checkpoint.groups)
        for share in shares:
            share.fill(checkpoint.weights)
        divided = {id(parameter) for share in shares for parameter in share.parameters}
        for name, parameter in model.named_parameters():
            if id(parameter) not in divided:  # frozen parameters are divided in stage 3 only
                parameter.copy_(
                    checkpoint.weights(name, 0, parameter.numel()).view(parameter.shape)
                )
        buffers = {name for name, _ in model.named_buffers()}
        model.load_state_dict(
            {name: v for name, v in checkpoint.rest.items() if name in buffers}, strict=False
        )


def _check_weights(
    model: nn.Module, shares: Sequence[ParameterShare], checkpoint: Checkpoint
) -> None:
    """Check that the files have all weights that this rank loads.

    Raises RunFolderError otherwise.
    """
    divided = {id(parameter) for share in shares for parameter in share.parameters}
    for name, parameter in model.named_parameters():
        if id(parameter) not in divided:
            checkpoint.check_covers(name, 0, parameter.numel())
    for share in shares:
        is_whole_here = share.whole is not None and not share.common
        for index, name in enumerate(share.block.names):
            piece = share.block.piece(index, share.rank)
            if is_whole_here:
                checkpoint.check_covers(name, 0, share.block.lengths[index])
            elif piece is not None:
                checkpoint.check_covers(name, piece.start, piece.stop)


def _check_model(model: nn.Module, checkpoint: Checkpoint, folder: Path) -> None:
    state = model.state_dict(keep_vars=True)
    own = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
    there = {name: checkpoint.shapes[divided] for name, divided in checkpoint.names.items()}
    there |= {name: tuple(value.shape) for name, value in checkpoint.rest.items()}
    if own != there:
        differ = sorted(name for name in own | there if own.get(name) != there.get(name))
        raise ValueError(
            f"{folder} belongs to another model: {', '.join(differ)} differ in shape or are in "
            "one of them"
        )


def read_whole(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the model's and the optimizer's state_dict of a checkpoint, for a single process.

    Raises RunFolderError if there is no complete checkpoint.
    """
    with Checkpoint(Path(folder)) as checkpoint:
        lengths = {name: torch.Size(shape).numel() for name, shape in checkpoint.shapes.items()}
        values = {
            name: checkpoint.weights(name, 0, lengths[name]).view(shape)
            for name, shape in checkpoint.shapes.items()
        }
        weights = {
            **checkpoint.rest,
            **{name: values[divided] for name, divided in checkpoint.names.items()},
        }
        state: dict[int, Any] = {}
        for number, name in enumerate(checkpoint.order):
            own = checkpoint.state_of(name, 0, lengths[name]) if name is not None else {}
            if own and name is not None:
                # runs of elements become tensors of the parameter's shape again
                state[number] = _shaped(own, checkpoint.shapes[name])
        return weights, {"state": state, "param_groups": checkpoint.groups}


def _shaped(state: Mapping[str, Any], shape: Iterable[int]) -> dict[str, Any]:
    return {
        key: value.view(tuple(shape)) if isinstance(value, Tensor) and value.dim() else value
        for key, value in state.items()
    }

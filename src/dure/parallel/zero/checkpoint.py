"""Checkpoints of which every rank writes a part, and that any number of ranks can read.

    folder/00002-of-00004.safetensors    rank 2's pieces: "weights/<name>" and "state/<key>/<name>",
                                         runs of elements; which runs they are is in the metadata
    folder/rest.safetensors              what is not divided, such as buffers
    folder/index.json                    version, names, shapes, the optimizer's settings, how many
                                         ranks, checksums (CRC-32) of the files and of the index;
                                         written last

A reader takes from each file the elements that it needs, so that no rank needs room for more than
its share. Checksums are compared before: of N ranks each reads every N-th file for that.
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
from dure.parallel.zero.agreement import agreed
from dure.parallel.zero.optimizer import Division
from dure.parallel.zero.shares import Share
from dure.record.checkpoint import pack_tree, unpack_tree
from dure.record.disk import Summed, write_atomically
from dure.record.inside import LARGE, contents, pinned
from dure.record.on_disk import Leaf
from dure.record.seal import checksum, checksum_of
from dure.record.weights import TensorFile, pairs_in, weights_from_bytes

VERSION = 2
"""Of the index. Before it had one, in version 1, runs were pairs [start, stop]."""

_SETTINGS = "settings/"
_REST = "rest.safetensors"


def file_of(rank: int, ranks: int) -> str:
    """The name of a rank's file in a checkpoint of so many ranks."""
    return f"{rank:05d}-of-{ranks:05d}.safetensors"


def save(
    folder: Path, model: nn.Module, shares: Sequence[Share], division: Division, group: Group
) -> None:
    """Writes this rank's part; all ranks call it, on a folder that all of them see.

    A checkpoint that is there already stays whole until all parts of the new one are written; only
    while these take the places of the older ones there is none. What one rank cannot write, all
    ranks raise an error about.
    """
    # Rank 0 may name the parts in an index only when all of them are there.
    with agreed(group, "waiting for all parts of a checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        pieces = Summed(_part(shares, division))
        write_atomically(_new(folder, file_of(group.rank, group.size)), pieces)
    # As numbers, of which none is beyond 32 bits.
    told = group.all_gather_values([float(int(pieces.checksum, 16))], "checksums of a checkpoint")
    sums = [f"{int(one):08x}" for (one,) in told]
    # Nobody goes on, to end or to write the next one, before this one is whole.
    with agreed(group, "waiting for the index of a checkpoint"):
        if group.rank == 0:
            _write_index(folder, model, shares, division, sums)


def _new(folder: Path, name: str) -> Path:
    """Where a part waits for the others."""
    return folder / f"{name}.new"


def _part(shares: Sequence[Share], division: Division) -> TensorFile:
    """This rank's file."""
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
            # the master: nothing is lost where parameters are gathered in fewer digits
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
    shares: Sequence[Share],
    division: Division,
    sums: Sequence[str],
) -> None:
    """Write what is not divided, and the index. sums: the checksums of the ranks' files."""
    ranks = len(sums)
    divided = {
        id(p): name
        for share in shares
        for name, p in zip(share.block.names, share.parameters, strict=True)
    }
    # with keep_vars, so that parameters are known by identity, shared ones by all of their names
    state = model.state_dict(keep_vars=True)
    # JSON has no tensors: those among the settings go into the file of the rest.
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
    pieces = Summed(TensorFile(rest))
    write_atomically(_new(folder, _REST), pieces)
    names = [_REST, *(file_of(rank, ranks) for rank in range(ranks))]
    # A folder that is another one on each host would make a checkpoint with parts missing.
    unseen = [name for name in names if not _new(folder, name).exists()]
    if unseen:
        raise RunFolderError(
            f"rank 0 does not see {_new(folder, unseen[0])}: all ranks have to write to one folder"
        )
    # parts of two checkpoints are none: until the new index is written there is no checkpoint
    (folder / "index.json").unlink(missing_ok=True)
    for name in names:
        # Each rename is atomic. Files of an older checkpoint of more ranks may stay; no index names
        # them.
        _new(folder, name).rename(folder / name)
    files = {file_of(rank, ranks): one for rank, one in enumerate(sums)}
    write_atomically(
        folder / "index.json", _sealed({**index, "files": {**files, _REST: pieces.checksum}})
    )


def _sealed(index: Mapping[str, Any]) -> bytes:
    """The index with its own checksum."""
    return json.dumps({**index, "checksum": checksum(json.dumps(index).encode())}).encode()


def _check_sums(folder: Path, index: Mapping[str, Any], rank: int, ranks: int) -> None:
    """Compare this rank's share of the files. Raises ValueError. Older dure wrote no checksums."""
    if "checksum" not in index:
        return
    plain = {name: value for name, value in index.items() if name != "checksum"}
    if json.loads(_sealed(plain)) != index:
        raise ValueError("index.json is damaged: its checksum is not that of its content")
    for name, said in list(index["files"].items())[rank::ranks]:
        if checksum_of(folder / name) != said:
            raise ValueError(f"{name} is damaged: its checksum is not that of its content")


class _Run(NamedTuple):
    """The elements [start, stop) of a parameter that a file has."""

    start: int
    stop: int


_NOTHING = _Run(0, 0)


def _runs_of(written: Mapping[str, Any]) -> dict[str, _Run]:
    """The runs of a file by parameter, as either version writes them."""
    return {
        name: _Run(**run) if isinstance(run, Mapping) else _Run(*run)
        for name, run in written.items()
    }


def _check_version(index: Mapping[str, Any], folder: Path) -> None:
    version = index.get("version", 1)
    if version > VERSION:
        raise RunFolderError(
            f"{folder} was written as version {version}, and this dure reads up to version "
            f"{VERSION}: update dure"
        )


_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading raises of files that are missing, or hold something else; and SafetensorError."""


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Inside, what shows that the files are no whole checkpoint becomes a RunFolderError."""
    try:
        yield
    except (*_DAMAGE, SafetensorError) as error:
        said = described(error)
        raise RunFolderError(f"{folder} holds no whole checkpoint of ZeRO: {said}") from error


class Checkpoint:
    """A checkpoint to read from, as a context.

    rank, ranks: the others compare the other files with their checksums.

    Raises RunFolderError if there is none, or a part of it is missing or damaged.
    """

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1) -> None:
        self.folder = folder
        # If one file cannot be opened, those that were are closed again.
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
            # All are open and read: they stay so until `__exit__`.
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
            # first rank's count.
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
        """The elements [start, stop) of `key` of a parameter; None if there are none.

        A single number comes as it is. Raises RunFolderError if some of them are missing.
        """
        with _whole(self.folder):
            return self._read(key, name, start, stop)

    def _read(self, key: str, name: str, start: int, stop: int) -> Tensor | None:
        parts = []
        for file, runs, has in zip(self._files, self._runs, self._has, strict=True):
            # What this file has of the parameter, and what is wanted of it.
            first, last = runs.get(name, _NOTHING)
            low = max(start, first)
            high = min(stop, last)
            if first < last and f"{key}/{name}" in has:
                # A slice reads from the file only the elements that are asked for.
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
        # safetensors has no complex numbers: they are written as pairs
        return torch.view_as_complex(whole) if f"{key}/{name}" in self._pairs else whole

    def weights(self, name: str, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of a parameter."""
        with _whole(self.folder):
            # a frozen parameter, which was not divided when this was written
            if name not in self.shapes:
                return self.rest[name].reshape(-1)[start:stop]
            found = self._read("weights", name, start, stop)
            if found is None:
                raise ValueError(f"no part has weights/{name}")
            return found

    def check_covers(self, name: str, start: int, stop: int) -> None:
        """Raises RunFolderError unless the files have the elements [start, stop) of a parameter.

        Nothing is read but what the files say of themselves.
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
                        raise ValueError(f"weights/{name} is not of the length of its run")
                    there += max(0, min(stop, last) - max(start, first))
            if there < stop - start:
                raise ValueError(f"the parts have {there} of the {stop - start} weights of {name}")

    def state_of(self, name: str, start: int, stop: int) -> dict[str, Any]:
        """The optimizer's state of a run of elements; empty if there is none."""
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
    folder: Path, model: nn.Module, shares: Sequence[Share], division: Division, group: Group
) -> None:
    """Takes this rank's pieces out of a checkpoint of the same model. Every rank calls it.

    Raises RunFolderError if there is no whole checkpoint, ValueError if it is of another model or
    optimizer: on all ranks, if any of them finds so, and before anything changes.
    """
    with ExitStack() as stack:
        with agreed(group, "reading a checkpoint"):
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
            if id(parameter) not in divided:  # frozen ones are divided in stage 3 only
                parameter.copy_(
                    checkpoint.weights(name, 0, parameter.numel()).view(parameter.shape)
                )
        buffers = {name for name, _ in model.named_buffers()}
        model.load_state_dict(
            {name: v for name, v in checkpoint.rest.items() if name in buffers}, strict=False
        )


def _check_weights(model: nn.Module, shares: Sequence[Share], checkpoint: Checkpoint) -> None:
    """Raises RunFolderError unless all is there that this rank will take."""
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
            f"{folder} is of another model: {', '.join(differ)} differ in shape or are in one of "
            f"them"
        )


def read_whole(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(the model's state_dict, the optimizer's) of a checkpoint, for one process.

    Raises RunFolderError if there is no whole checkpoint.
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

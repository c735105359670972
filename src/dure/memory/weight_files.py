"""Tensors in safetensors files, each read on access.

    stored_in(PATH)     every tensor by its name: file, first byte, dtype and shape
    stored.read()       a view of the file (`dure.memory.mapped.mapped_view`), not a copy

PATH is a file; the index of several files (`*.safetensors.index.json`); or a folder: of Hugging
Face's `save_pretrained`, or of a run, whose trained weights are used, or else its newest
checkpoint.

Only headers are read to find names and shapes. Nothing in a file is unpickled or called. A tensor
whose first byte is no multiple of its element size is copied when it is read.

Source: the format of safetensors, huggingface.co/docs/safetensors; an index has `weight_map`, the
file of each name.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dure.errors import DataError
from dure.memory.mapped import mapped_view
from dure.record import untrusted_files
from dure.record.checkpoint_files import name_of, place_of
from dure.record.untrusted_files import contents
from dure.record.weights import DTYPES, pairs_in

_MODEL = "model.safetensors"
_INDEX = ".safetensors.index.json"
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_CHUNK = 1 << 20
"""Bytes of a file that are in memory during the computation of its digest."""


class StoredTensor(NamedTuple):
    """A tensor in a file. offset: its first byte. is_pair: whether pairs stand for complex numbers.
    written: shape in the file; a pair's has one more dimension.
    """

    file: Path
    offset: int
    dtype: torch.dtype
    written: tuple[int, ...]
    is_pair: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.written[:-1] if self.is_pair else self.written

    @property
    def values(self) -> torch.dtype:
        """Dtype of the tensor."""
        return torch.complex128 if self.is_pair else self.dtype

    def read(self) -> Tensor:
        """Return the tensor, memory-mapped. Raises DataError if the file cannot be read."""
        try:
            descriptor = untrusted_files.descriptor_of(self.file, links=True)
        except OSError as error:
            raise _unreadable(self.file, error) from error
        try:
            tensor = self._mapped(descriptor)
        finally:
            os.close(descriptor)
        return torch.view_as_complex(tensor) if self.is_pair else tensor

    def _mapped(self, descriptor: int) -> Tensor:
        if self.offset % self.dtype.itemsize == 0:
            return mapped_view(descriptor, self.offset, self.written, self.dtype)
        length = torch.Size(self.written).numel() * self.dtype.itemsize
        # Copied, because elements must be aligned to their size.
        content = mapped_view(descriptor, self.offset, (length,), torch.uint8).clone()
        return content.view(self.dtype).view(self.written)


def stored_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of `path` by name.

    Raises DataError if there is no such file, or a file is damaged or of another format.
    """
    found: dict[str, StoredTensor] = {}
    for file, names in _files_of(path).items():
        here = _tensors_of(file)
        missing = [] if names is None else sorted(names - here.keys())
        if missing:
            raise DataError(
                f"the index of {path} names {missing[0]}, which {file} does not contain"
            )
        found |= {name: here[name] for name in (here if names is None else names)}
    return found


def digest_of(path: Path) -> str:
    """Return the SHA-256 of the files of `path`, in the order of their names, as hex digits.

    The location of the files, and other files in the folder, have no effect.
    """
    total = sha256()
    for file in sorted(_files_of(path)):
        try:
            there = file.stat()
            total.update(_digest(file, there.st_mtime_ns, there.st_size))
        except OSError as error:
            raise _unreadable(file, error) from error
    return total.hexdigest()


@functools.lru_cache(64)
def _digest(file: Path, changed: int, size: int) -> bytes:
    """Return the digest of a file at its last change; the runs of a comparison share it."""
    own = sha256()
    with untrusted_files.opened(file, links=True) as opened:
        while content := opened.read(_CHUNK):
            own.update(content)
    return own.digest()


def _files_of(path: Path) -> dict[Path, set[str] | None]:
    """Return the files, and the names to read from each; None for all names."""
    if path.is_dir():
        path = _in_folder(path)
    if path.name.endswith(_INDEX):
        return _indexed(path)
    if path.suffix in _PICKLES:
        raise DataError(
            f"{path} is a pickle, which could run code: save the model's state_dict with "
            f"safetensors.torch.save_file, or the model with save_pretrained"
        )
    return {path: None}


def _in_folder(folder: Path) -> Path:
    """Return the path of a folder's weights: a file, or an index."""
    usual = [folder / _MODEL, folder / f"model{_INDEX}", *_newest(folder / "checkpoint")]
    found = next((one for one in usual if one.is_file()), None)
    if found is not None:
        return found
    others = sorted(folder.glob(f"*{_INDEX}")) or sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others[0]
    if others:
        names = ", ".join(one.name for one in others)
        raise DataError(f"{folder} has several files of weights: name one of {names}")
    pickles = [one.name for one in sorted(folder.iterdir()) if one.suffix in _PICKLES]
    hint = f"; {pickles[0]} is a pickle: save it as safetensors" if pickles else ""
    raise DataError(f"{folder} has no weights in safetensors files{hint}")


def _newest(checkpoints: Path) -> list[Path]:
    """Return the path of the weights of a run's newest checkpoint; empty if there is none."""
    if not checkpoints.is_dir():
        return []
    places = [place for one in checkpoints.iterdir() if (place := place_of(one.name)) is not None]
    return [checkpoints / name_of(*max(places)) / _MODEL] if places else []


def _indexed(path: Path) -> dict[Path, set[str] | None]:
    files: dict[Path, set[str] | None] = {}
    for name, file in _weight_map(path).items():
        # For security an index may only name files in its own folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise DataError(f"{path} is damaged: {name} is in {file!r}, which is not a file name")
        names = files.setdefault(path.parent / file, set())
        assert names is not None
        names.add(name)
    return files


def _weight_map(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(contents(path, links=True))["weight_map"]
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is not an index of safetensors files: it has no weight_map"
        ) from error
    if not isinstance(content, dict) or not content:
        raise DataError(f"{path} is not an index of safetensors files: its weight_map is empty")
    return content


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, from its header."""
    try:
        # The library validates the header and the length of the file.
        with untrusted_files.pinned(file, links=True) as name, safe_open(name, "pt") as opened:
            pairs = set(pairs_in(opened.metadata()))
        with untrusted_files.opened(file, links=True) as content:
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
    except OSError as error:
        raise _unreadable(file, error) from error
    except (SafetensorError, ValueError, TypeError) as error:
        raise DataError(f"{file} is not a safetensors file, or is damaged: {error}") from error
    return dict(_entries(file, header, 8 + length, pairs))


def _entries(
    file: Path, header: Mapping[str, Any], begin: int, pairs: set[str]
) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise DataError(f"{name} in {file} is of {entry['dtype']}, a dtype that is not known")
        shape = tuple(entry["shape"])
        if name in pairs and (dtype != torch.float64 or shape[-1:] != (2,)):
            raise DataError(
                f"{file} is damaged: {name} is not complex128 stored as pairs of numbers"
            )
        yield (
            name,
            StoredTensor(file, begin + entry["data_offsets"][0], dtype, shape, name in pairs),
        )


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"cannot read the weights {file}: {error.strerror or error}")

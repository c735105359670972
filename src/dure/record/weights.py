"""Tensors by name as the bytes of a safetensors file, and back.

The format has no complex numbers of double precision. They are written as pairs of real numbers, in
an additional last dimension, and the file's metadata list their names.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load as load_tensors
from torch import Tensor

from dure.errors import described
from dure.record.disk_tensors import DiskTensor, Leaf, OpenFile, leaves_of
from dure.record.untrusted_files import pinned
from dure.tensors.elements import element_bytes

_PAIRS = "complex128"
"""Metadata key for the names of tensors written as pairs."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of torch's dtypes in the format."""

_TORCH_S = {name: dtype for dtype, name in DTYPES.items()}

_Form = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class TensorFile:
    """A safetensors file of a mapping of tensors, whose bytes are produced as they are read.

    Iteration yields the file in pieces: the header, then each tensor as a view of its own memory. A
    tensor on a GPU or with gaps is copied when its turn comes, and the copy is freed before the
    next; a tensor in a file is read a few million bytes at a time. Tied tensors are written once
    for each of their names. Every iteration yields the same bytes, as long as the tensors do not
    change.

    Raises TypeError for a dtype that the format lacks.
    """

    def __init__(
        self, weights: Mapping[str, Leaf], metadata: Mapping[str, str] | None = None
    ) -> None:
        said = dict(metadata or {})
        leaves: dict[str, Leaf] = leaves_of(weights)
        # In sorted order, so that the same tensors give the same bytes.
        pairs = sorted(name for name, leaf in leaves.items() if leaf.dtype == torch.complex128)
        if pairs:
            said[_PAIRS] = json.dumps(pairs)
        # Widest dtype first, so that all elements are aligned to their size.
        self._tensors = dict(
            sorted(leaves.items(), key=lambda item: (-_form(item[1])[0].itemsize, item[0]))
        )
        self._header = header_of({name: _form(one) for name, one in self._tensors.items()}, said)

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for leaf in self._tensors.values():
            if isinstance(leaf, DiskTensor):
                yield from leaf.pieces()
            elif leaf.numel():
                yield elements_of(leaf)

    def __bytes__(self) -> bytes:
        """Return the whole file, in a single copy."""
        return b"".join(self)


def _form(tensor: Leaf) -> _Form:
    """Return dtype and shape of the written tensor."""
    if tensor.dtype == torch.complex128:
        return torch.float64, (*tensor.shape, 2)
    return tensor.dtype, tuple(tensor.shape)


def header_of(forms: Mapping[str, _Form], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes before the first element, of tensors that follow in this order.

    Raises TypeError for a dtype that the format lacks.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape) in forms.items():
        if dtype not in DTYPES:
            raise TypeError(f"safetensors do not support {dtype}, the dtype of {name}")
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Elements of every dtype begin at a multiple of eight.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def elements_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements: a view of its memory, or of a gapless copy."""
    content: Any = element_bytes(tensor.cpu()).numpy()
    return memoryview(content)


def weights_to_bytes(
    weights: Mapping[str, Leaf], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of such a file for a message; a file on disk is written piece by piece."""
    return bytes(TensorFile(weights, metadata))


def weights_from_bytes(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of `weights_to_bytes`.

    Raises SafetensorError or ValueError if the bytes are something else.
    """
    try:
        tensors = load_tensors(content)
        # The length of the header comes first, then the header as JSON. `load` does not return the
        # metadata in it.
        length = int.from_bytes(content[:8], "little")
        for name in pairs_in(json.loads(content[8 : 8 + length]).get("__metadata__")):
            tensors[name] = torch.view_as_complex(tensors[name])
    except (LookupError, TypeError, RuntimeError) as error:
        # A dtype that torch lacks, invalid names of pairs, or too deep nesting.
        raise ValueError(f"the tensors cannot be read: {described(error)}") from error
    return tensors


def pairs_in(metadata: Mapping[str, str] | None) -> Sequence[str]:
    """Return the names of complex tensors that a file with this metadata stores as pairs."""
    return tuple(json.loads((metadata or {}).get(_PAIRS, "[]")))


def tensors_in(path: Path) -> dict[str, DiskTensor]:
    """Return the tensors of such a file on disk; only its header is read.

    Raises OSError, SafetensorError or ValueError if the file is missing or malformed.
    """
    # safetensors validates the header and the length of the file.
    with pinned(path) as name, safe_open(name, framework="pt"):
        pass
    file = OpenFile.of(path)
    try:
        length = int.from_bytes(os.pread(file.descriptor, 8, 0), "little")
        header = json.loads(os.pread(file.descriptor, length, 8))
        pairs = pairs_in(header.pop("__metadata__", None))
        found = {name: _lying(file, 8 + length, said) for name, said in header.items()}
        return {name: _of_pairs(one) if name in pairs else one for name, one in found.items()}
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the tensors cannot be read: {described(error)}") from error


def _lying(file: OpenFile, begins: int, said: Mapping[str, Any]) -> DiskTensor:
    """Return a tensor from its entry in the header. begins: first byte after the header."""
    return DiskTensor(
        file, begins + said["data_offsets"][0], _TORCH_S[said["dtype"]], tuple(said["shape"])
    )


def _of_pairs(pairs: DiskTensor) -> DiskTensor:
    """Return the complex tensor that is stored as these pairs of real numbers."""
    if pairs.dtype != torch.float64 or tuple(pairs.shape[-1:]) != (2,):
        raise ValueError(f"{pairs} does not contain pairs")
    return DiskTensor(pairs.file, pairs.at, torch.complex128, tuple(pairs.shape[:-1]))

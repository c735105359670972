"""Tensors by name as the bytes of a safetensors file, and back.

The format knows no complex numbers of double precision. They are written as pairs of real ones, in
one more dimension at the end, and the file's metadata says which names these are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

_PAIRS = "complex128"
"""The metadata's key for the names of what is written as pairs."""

_NAMES = {
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
"""What the format calls the dtypes of torch."""


def weights_to_bytes(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A state_dict, say, in safetensors. Tied tensors are written once for each of their names."""
    plain: dict[str, Tensor] = {}
    pairs: list[str] = []
    for name, value in weights.items():
        # torch keeps conjugation and sign of complex tensors as flags, which raw bytes would lose.
        plain[name] = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if value.dtype == torch.complex128:
            plain[name] = torch.view_as_real(plain[name])
            pairs.append(name)
    said = dict(metadata or {})
    if pairs:
        said[_PAIRS] = json.dumps(pairs)
    return _written(plain, said)


def _written(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The file's bytes, which are the only copy: the library's writer makes two, and refuses views
    into one buffer."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    parts: list[Any] = []
    at = 0
    # The widest first, so that the elements of each lie at multiples of their size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        if tensor.dtype not in _NAMES:
            raise TypeError(f"safetensors have no {tensor.dtype}, which {name} is")
        end = at + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        if tensor.numel():
            content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            parts.append(memoryview(content))
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def weights_from_bytes(content: bytes) -> dict[str, Tensor]:
    """The inverse of `weights_to_bytes`.

    Raises SafetensorError or ValueError if the bytes are something else.
    """
    tensors = load_tensors(content)
    # A file begins with the length of its header, then comes the header as JSON. `load` does not
    # give the metadata in it.
    length = int.from_bytes(content[:8], "little")
    for name in pairs_in(json.loads(content[8 : 8 + length]).get("__metadata__")):
        tensors[name] = torch.view_as_complex(tensors[name])
    return tensors


def pairs_in(metadata: Mapping[str, str] | None) -> Sequence[str]:
    """The names of complex numbers that a file with this metadata holds as pairs of real ones."""
    return tuple(json.loads((metadata or {}).get(_PAIRS, "[]")))

"""Tensors by name as the bytes of a safetensors file, and back.

The format knows no complex numbers of double precision. They are written as pairs of real ones, in
one more dimension at the end, and the file's metadata says which names these are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

_PAIRS = "complex128"
"""The metadata's key for the names of what is written as pairs."""


def weights_to_bytes(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A state_dict, say, in safetensors. Tied tensors are written once for each of their names."""
    seen: set[int] = set()
    plain: dict[str, Tensor] = {}
    pairs: list[str] = []
    for name, value in weights.items():
        # torch keeps conjugation and sign of complex tensors as flags, which raw bytes would lose.
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, such as views into one buffer.
        shares = pointer in seen or tensor.untyped_storage().nbytes() != tensor.nbytes
        plain[name] = tensor.clone() if shares else tensor
        seen.add(pointer)
        if tensor.dtype == torch.complex128:
            plain[name] = torch.view_as_real(plain[name])
            pairs.append(name)
    said = dict(metadata or {})
    if pairs:
        said[_PAIRS] = json.dumps(pairs)
    return save_tensors(plain, said or None)


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

"""Updates as private memory mappings of their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dure.wire.tensors import TensorsError, TensorSpec, receive_header


def mapped_update(path: Path, expected: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Map a complete update into memory; return its tensors by name, in the order of its file.

    `expected` has the required dtypes and shapes. Raises TensorsError for other tensors, and
    OSError for an unreadable file.
    """
    size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        forms = receive_header(file.readinto, size, expected)
        at = file.tell()
    total = at + sum(form.nbytes for form in forms.values())
    if total != size:
        raise TensorsError(f"there are {size} bytes, but there have to be {total}")
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name, form in forms.items():
        tensors[name] = _shaped(content[at : at + form.nbytes], form)
        at += form.nbytes
        # torch does not expect bool bytes other than 0 and 1.
        if form.dtype == torch.bool and bool((tensors[name].view(torch.uint8) > 1).any()):
            raise TensorsError(f"{name} contains bytes that are not booleans")
    return tensors


def _shaped(content: Tensor, form: TensorSpec) -> Tensor:
    # A tensor after one with an odd number of bytes is not aligned, and has to be copied.
    if content.storage_offset() % form.dtype.itemsize:
        content = content.clone()
    return content.view(form.dtype).reshape(form.shape)

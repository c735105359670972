"""The tensors of an update, as private mappings of its file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dure.wire.tensors import Form, TensorsError, receive_header


def mapped(path: Path, expected: Mapping[str, Form]) -> dict[str, Tensor]:
    """Map a complete update into memory, by name, in the order of its file.

    expected: what the tensors have to be. Raises TensorsError for others, and OSError.
    """
    size = path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        forms = receive_header(file.readinto, size, expected)
        at = file.tell()
    total = at + sum(form.nbytes for form in forms.values())
    if total != size:
        raise TensorsError(f"these are {size} bytes, and have to be {total}")
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name, form in forms.items():
        tensors[name] = _shaped(content[at : at + form.nbytes], form)
        at += form.nbytes
        # Any other byte than 0 and 1 is a boolean that torch does not expect.
        if form.dtype == torch.bool and bool((tensors[name].view(torch.uint8) > 1).any()):
            raise TensorsError(f"{name} holds bytes that are no booleans")
    return tensors


def _shaped(content: Tensor, form: Form) -> Tensor:
    # After a tensor of odd length the next one is not aligned, and has to be copied.
    if content.storage_offset() % form.dtype.itemsize:
        content = content.clone()
    return content.view(form.dtype).reshape(form.shape)

"""Tensors of an answer to a protocol step: their names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dure.protocol.encoding import DTYPES
from dure.protocol.messages import WantedTensor as Wanted
from dure.wire.tensors import TensorSpec


def forms_of(wants: Sequence[Wanted]) -> dict[str, TensorSpec]:
    """Return the dtypes and shapes by name. Raises ValueError for an impossible tensor."""
    found = {}
    for place, want in enumerate(wants):
        if want.dtype not in DTYPES or any(size < 0 for size in want.shape):
            raise ValueError(f"the answer has no tensor {want.dtype} of shape {list(want.shape)}")
        found[str(place)] = TensorSpec(DTYPES[want.dtype], tuple(want.shape))
    return found


def named(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an answer by name; the name is the index."""
    return {str(place): tensor for place, tensor in enumerate(tensors)}

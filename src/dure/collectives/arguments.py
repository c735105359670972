"""Checks of the arguments of collectives before any data is sent, and flattened tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dure.errors import CallError
from dure.tensors.overlap import overlaps_itself


def check_algorithm(collective: str, algorithm: str, choices: Iterable[str]) -> None:
    """Raise ValueError unless `algorithm` is one of `choices`."""
    if algorithm not in choices:
        raise ValueError(
            f"there is no {collective} {algorithm!r}; choose one of {', '.join(choices)}"
        )


def check_root(root: int, size: int) -> None:
    """Raise ValueError unless `root` is a rank of the group."""
    if not 0 <= root < size:
        raise CallError(f"root is {root}, but the ranks of the group are 0 to {size - 1}")


def check_rank(rank: int, size: int) -> None:
    """Raise ValueError unless a group of this size has such a rank."""
    if not 0 <= rank < size:
        raise CallError(f"there is no rank {rank}: the ranks of the group are 0 to {size - 1}")


def check_tensor(tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not dense (strided and not quantized)."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"only dense tensors can be sent, and this one is {tensor.layout}; call to_dense() "
            "first"
        )


def check_writable(tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose elements share memory, such as an expanded tensor."""
    check_tensor(tensor)
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        raise ValueError(
            "an expanded tensor cannot hold the result, because its elements share memory; "
            "clone() it first"
        )


def flat_of(tensor: Tensor) -> Tensor:
    """Return the elements as a contiguous tensor of one dimension, a view if possible."""
    # The memory of conjugated and negated views has other values than the views.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def give_back(flat: Tensor, tensor: Tensor) -> Tensor:
    """Copy the elements of `flat`, made by `flat_of`, back to `tensor`; return `tensor`.

    Nothing is copied if `flat` is a view of `tensor`.
    """
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def lengths_of(n: int, size: int) -> list[int]:
    """Return the lengths of N chunks of n elements; the first n mod N are longer by an element."""
    return [n // size + (index < n % size) for index in range(size)]

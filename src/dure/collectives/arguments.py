"""What the collectives ask of their arguments, before anything travels; and tensors made flat."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dure.errors import CallError
from dure.tensors.overlap import overlaps_itself


def check_algorithm(collective: str, algorithm: str, choices: Iterable[str]) -> None:
    """Raises ValueError unless `algorithm` is one of `choices`."""
    if algorithm not in choices:
        raise ValueError(
            f"there is no {collective} {algorithm!r}; choose one of {', '.join(choices)}"
        )


def check_root(root: int, size: int) -> None:
    """Raises ValueError unless `root` is a rank of the group."""
    if not 0 <= root < size:
        raise CallError(f"root is {root}, but the ranks of the group are 0 to {size - 1}")


def check_rank(rank: int, size: int) -> None:
    """Raises ValueError unless there is such a rank in a group of this size."""
    if not 0 <= rank < size:
        raise CallError(f"there is no rank {rank}: the ranks of the group are 0 to {size - 1}")


def check_tensor(tensor: Tensor) -> None:
    """Raises ValueError for a tensor that has no elements in memory one after another."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"only dense tensors travel, and this one is {tensor.layout}; call to_dense() before"
        )


def check_writable(tensor: Tensor) -> None:
    """Raises ValueError for a tensor whose elements share memory, such as an expanded one."""
    check_tensor(tensor)
    if overlaps_itself(tensor):
        raise ValueError(
            "an expanded tensor cannot take the result, its elements lie in one place; clone() it "
            "before"
        )


def flat_of(tensor: Tensor) -> Tensor:
    """The elements in one dimension, contiguous: the tensor's own memory where it is so already."""
    # Conjugated and negated views mean other values than their memory has.
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def give_back(flat: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, with the elements of what `flat_of` made of it."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def lengths_of(n: int, size: int) -> list[int]:
    """Lengths of N chunks of n elements; the first n mod N hold one element more."""
    return [n // size + (index < n % size) for index in range(size)]

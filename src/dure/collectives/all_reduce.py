"""All-reduce: every rank ends with the sum over all ranks. Which algorithm carries it is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

from dure.collectives import master, ring
from dure.collectives.group import Group

Algorithm = Literal["ring", "master", "native"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

_RULES: dict[str, Callable[[Tensor, Group], None]] = {
    "ring": ring.all_reduce,
    "master": master.all_reduce,
    "native": lambda flat, group: group.native_all_reduce(flat),
}


def all_reduce(tensor: Tensor, group: Group | None = None, algorithm: Algorithm = "ring") -> Tensor:
    """The sum over all ranks of `group`, in place; returns `tensor`.

    tensor: any shape, the same shape and dtype on every rank. group: None is all ranks of torch.distributed.
    algorithm: `ring` (2(N-1) steps of 1/N of the tensor), `master` (through rank 0), or `native` (the backend's).

    Raises ValueError for an unknown algorithm, PeerLostError if a rank is lost while others wait.
    """
    if algorithm not in _RULES:
        raise ValueError(f"there is no all-reduce {algorithm!r}; choose one of {', '.join(ALGORITHMS)}")
    group = group if group is not None else Group.default()
    if group.size == 1 or tensor.numel() == 0:
        return tensor
    flat = tensor.contiguous().view(-1)
    with group.during(f"{algorithm} all-reduce"):
        _RULES[algorithm](flat, group)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
    return tensor

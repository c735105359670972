"""All-reduce: every rank ends with the reduction over all ranks. Which algorithm carries it is an
argument.

Every algorithm is a module of its own (`MODULES`), with `all_reduce(flat, group, reduction)`, the
exact counts `elements_sent(n, size, rank)` and `messages_sent(n, size, rank)` of what a rank sends,
and `rounds(size)`, the number of transfers behind each other. The bytes are the elements' in the
tensor's own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, get_args, overload

import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import (
    auto,
    halving_doubling,
    hierarchical,
    master,
    native,
    one_shot,
    ring,
    tree,
)
from dure.collectives.arguments import check_algorithm, check_writable, flat_of, give_back
from dure.collectives.group import Group, settle
from dure.collectives.handle import Handle
from dure.collectives.hosts import checked
from dure.collectives.operation import reduction as reduction_of
from dure.collectives.shared_memory.backend import SharedMemoryGroup

Algorithm = Literal[
    "ring", "master", "one_shot", "tree", "halving_doubling", "hierarchical", "native", "auto"
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

MODULES: dict[str, ModuleType] = {
    "ring": ring,
    "master": master,
    "one_shot": one_shot,
    "tree": tree,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "native": native,
}
"""The algorithms; `auto` is one of these."""


@overload
def all_reduce(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    algorithm: Algorithm = "ring",
    op: Any = "sum",
    async_op: Literal[False] = False,
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    predict: auto.Predict | None = None,
) -> Tensor: ...
@overload
def all_reduce(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    algorithm: Algorithm = "ring",
    op: Any = "sum",
    *,
    async_op: Literal[True],
    hosts: Sequence[Sequence[int]] | None = None,
    predict: auto.Predict | None = None,
) -> Handle[Tensor]: ...
def all_reduce(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    algorithm: Algorithm = "ring",
    op: Any = "sum",
    async_op: bool = False,
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    predict: auto.Predict | None = None,
) -> Tensor | Handle[Tensor]:
    """The reduction over all ranks of `group`, in place; returns `tensor`, or a handle whose
    `wait()` returns it.

    tensor: any shape, the same shape and dtype on every rank. group: None is all ranks of
        torch.distributed.
    algorithm: `ring` (2(N-1) steps of 1/N of the tensor), `master` (through rank 0), `one_shot`
    (everybody to everybody), `tree` (up to rank 0 and down), `halving_doubling` (a ring's bytes in
    log2 N steps), `hierarchical` (within hosts, then across), `native` (the backend's), `auto` (by
    size, ranks and hosts: `dure.collectives.algorithms.auto`). op: sum, avg, min, max or product,
    or torch's ReduceOp; what it means for each dtype: `dure.collectives.operation`. async_op: work
    beside the program, in the order of issue; until `wait()` the tensor is not to be touched.
    hosts: a partition of the ranks, for `hierarchical` and `auto`; found out where not given.
    predict: for `auto`.

    Raises ValueError, before anything travels, for an unknown algorithm or operation, and for an
    operation that the dtype does not have; PeerLostError if a rank is lost while others wait.
    """
    if (
        isinstance(group, SharedMemoryGroup)
        and op == "sum"
        and algorithm in ("native", "auto")
        and not async_op
    ):
        settle(group)
        group.all_reduce(tensor)  # without the microseconds of all that follows
        return tensor
    check_algorithm("all-reduce", algorithm, ALGORITHMS)
    check_writable(tensor)
    group = Group.of(group)
    reduction = reduction_of(op, tensor.dtype, group.size)
    partition = checked(hosts, group.size) if hosts is not None else None
    if group.size == 1 or tensor.numel() == 0:
        return Handle.of(tensor) if async_op else tensor
    name = _chosen(tensor, group, partition, predict) if algorithm == "auto" else algorithm
    if name == "hierarchical" and partition is None:
        partition = group.hosts()

    def work() -> Tensor:
        flat = flat_of(tensor)
        rest = reduction.begin(flat)
        if name == "hierarchical":
            hierarchical.all_reduce(flat, group, rest, partition)
        else:
            MODULES[name].all_reduce(flat, group, rest)
        return give_back(flat, tensor)

    return group.perform(f"{name} all-reduce", work, tensor, async_op)


def _chosen(
    tensor: Tensor,
    group: Group,
    hosts: Sequence[Sequence[int]] | None,
    predict: auto.Predict | None,
) -> str:
    """The choice of `auto`. All ranks choose the same, from what all of them know."""
    kind, backend = tensor.device.type, group.backend(tensor.device)
    if (
        hosts is None
        and auto.choose(tensor.nbytes, group.size, backend=backend, device=kind) != "native"
    ):
        hosts = group.hosts()
    return auto.choose(
        tensor.nbytes, group.size, hosts, backend=backend, device=kind, predict=predict
    )

"""All-reduce: every rank ends with the reduction over all ranks.

The algorithm is an argument. Every algorithm is a file with its declaration
(`dure.collectives.algorithms.algorithm`); all are listed in `dure.collectives.algorithms.table`.
Elements travel in the tensor's own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor

from dure.collectives.algorithms import auto
from dure.collectives.algorithms.algorithm import AllReduce
from dure.collectives.algorithms.native import is_staged
from dure.collectives.algorithms.table import ALL_REDUCES
from dure.collectives.arguments import check_algorithm, check_writable, flat_of, give_back
from dure.collectives.group import Group, settle
from dure.collectives.handle import Handle, collective
from dure.collectives.hosts import checked
from dure.collectives.operation import reduction as reduction_of
from dure.collectives.transport import own_transport
from dure.machine.devices import CPU

ALGORITHMS: tuple[str, ...] = (*ALL_REDUCES, "auto")

if TYPE_CHECKING:
    Algorithm = str
else:
    Algorithm = Literal[ALGORITHMS]  # what a command line offers
"""The name of an all-reduce."""


@collective
def all_reduce(
    tensor: Tensor,
    group: Group | dist.ProcessGroup | None = None,
    algorithm: Algorithm | AllReduce = "ring",
    op: Any = "sum",
    async_op: bool = False,
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    predict: auto.Predict | None = None,
) -> Tensor | Handle[Tensor]:
    """Reduce over all ranks of `group`, in place; return `tensor`, or a handle for it.

    Args:
        tensor: any shape, the same shape and dtype on every rank.
        group: None is all ranks of torch.distributed.
        algorithm: `ring` (2(N-1) steps of 1/N of the tensor), `master` (through rank 0), `one_shot`
            (every rank to every rank), `tree` (up to rank 0 and down), `halving_doubling` (a ring's
            bytes in log2 N steps), `hierarchical` (within hosts, then across), `native` (the
            backend's), `auto` (by size, ranks and hosts: `dure.collectives.algorithms.auto`), or a
            user-defined `AllReduce`.
        op: sum, avg, min, max or product, or torch's ReduceOp; `dure.collectives.operation` defines
            each for each dtype.
        async_op: run in the background, in the order of issue; the tensor must not be used until
            `wait()`.
        hosts: partition of the ranks by host, for `hierarchical` and `auto`; determined if not
            given.
        predict: cost model, for `auto`.

    Raises:
        ValueError: an unknown algorithm or operation, or an operation that the dtype does not
            support; raised before any data is sent.
        PeerLostError: a rank is lost while others wait.
    """
    if algorithm in ("native", "auto") and op == "sum" and not async_op and tensor.is_cpu:
        # dure's own backend checks the tensor itself, so this fast path needs no checks.
        carrier = own_transport(group)
        if carrier is not None:
            settle(group)  # type: ignore[arg-type]
            carrier.sum(tensor)  # without the microseconds of all that follows
            return tensor
    if not isinstance(algorithm, AllReduce):
        check_algorithm("all-reduce", algorithm, ALGORITHMS)
    check_writable(tensor)
    group = Group.of(group)
    reduction = reduction_of(op, tensor.dtype, group.size)
    partition = checked(hosts, group.size) if hosts is not None else None
    if group.size == 1 or tensor.numel() == 0:
        return Handle.of(tensor) if async_op else tensor
    if isinstance(algorithm, AllReduce):
        rule = algorithm
    else:
        auto_chooses = algorithm == "auto"
        rule = ALL_REDUCES[
            _chosen(tensor, group, partition, predict) if auto_chooses else algorithm
        ]
    # The first call of hosts() is a collective; all ranks reach this line.
    if rule.over_hosts and partition is None:
        partition = group.hosts()

    def work() -> Tensor:
        flat = flat_of(tensor)
        rest = reduction.begin(flat)
        if rule.over_hosts:
            rule.all_reduce(flat, group, rest, partition)
        else:
            rule.all_reduce(flat, group, rest)
        return give_back(flat, tensor)

    return group.perform(f"{rule.name} all-reduce", work, tensor, async_op)


def _chosen(
    tensor: Tensor,
    group: Group,
    hosts: Sequence[Sequence[int]] | None,
    predict: auto.Predict | None,
) -> str:
    """Return the choice of `auto`: the same on all ranks, from information that all ranks have."""
    # A tensor of a device without a backend of its own travels through the CPU's memory.
    home = CPU if is_staged(tensor, group) else tensor.device
    kind = home.type
    backend = group.backend(home)
    own = auto.choose(tensor.nbytes, group.size, backend=backend, device=kind) == "native"
    # The first call of hosts() is an all-gather, so it is skipped if the choice is native anyway.
    if hosts is None and not own:
        hosts = group.hosts()
    return auto.choose(
        tensor.nbytes, group.size, hosts, backend=backend, device=kind, predict=predict
    )

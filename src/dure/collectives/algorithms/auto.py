"""Which all-reduce suits: a pure function of the tensor's size and of who takes part.

The rules, in this order; the first that holds decides:

1. one rank, or a backend that is made for where the tensor is (`dure` for the CPU, `nccl` for a
    GPU): native
2. a cost model was given: the algorithm that it predicts to be fastest
3. some ranks share a host and there are several hosts, and the tensor has more than 2 KiB:
    hierarchical
4. up to 8 ranks and up to 64 KiB: one_shot, because two transfers one after another are fewest
5. up to 2 KiB: tree
6. up to 512 KiB, or N is a power of two: halving_doubling
7. otherwise: ring

The switch at 2 KiB, below which a tree-like algorithm wins and above which Rabenseifner's does, is
MPICH's (Thakur et al. 2005). A ring sends less than a folded halving, so it wins for long tensors
where N is no power of two; 512 KiB is where MPICH goes over to the ring in its all-gather. The
limits of one_shot are our own: it saves transfers one after another, but every one of its 2(N-1)
messages has a price, and N ranks send at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dure.collectives.algorithms.table import PREDICTABLE

SHORT = 2 * 1024
"""Bytes up to which latency alone counts."""
DIRECT = 64 * 1024
"""Bytes up to which a few ranks talk to each other directly."""
DIRECT_RANKS = 8
LONG = 512 * 1024
"""Bytes from which only bandwidth counts."""

Predict = Callable[[str, int, int], float]
"""predict(algorithm, nbytes, ranks): seconds, or anything else that grows with the time."""


def choose(
    nbytes: int,
    ranks: int,
    hosts: Sequence[Sequence[int]] | None = None,
    *,
    backend: str = "gloo",
    device: str = "cpu",
    predict: Predict | None = None,
) -> str:
    """The name of an all-reduce.

    nbytes: of the tensor. hosts: who shares one; None is all on one. backend: torch's name of what
    carries the bytes. device: the type of the tensor's device. predict: a cost model, which is
    asked for each of the `candidates`.
    """
    if ranks == 1 or (backend, device) in (("dure", "cpu"), ("nccl", "cuda")):
        return "native"
    if predict is not None:
        return min(candidates(ranks, hosts), key=lambda name: predict(name, nbytes, ranks))
    if "hierarchical" in candidates(ranks, hosts) and nbytes > SHORT:
        return "hierarchical"
    if ranks <= DIRECT_RANKS and nbytes <= DIRECT:
        return "one_shot"
    if nbytes <= SHORT:
        return "tree"
    # ranks & (ranks - 1) clears the lowest one bit: 0 for a power of two.
    if nbytes <= LONG or ranks & (ranks - 1) == 0:
        return "halving_doubling"
    return "ring"


def candidates(ranks: int, hosts: Sequence[Sequence[int]] | None = None) -> list[str]:
    """The algorithms among which a cost model chooses.

    Those that depend on hosts are among them only where the hosts have a hierarchy.
    """
    hierarchy = hosts is not None and 1 < len(hosts) < ranks
    return [name for name, rule in PREDICTABLE.items() if hierarchy or not rule.over_hosts]

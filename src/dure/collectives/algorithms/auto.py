"""Choice of the all-reduce: a pure function of the tensor's size and of the group.

The rules, in this order; the first that holds decides:

1. a single rank, or a backend that is made for the tensor's device (`dure` for the CPU, `nccl` for
    a GPU): native
2. a cost model is given: the algorithm with the shortest predicted time
3. some ranks share a host and there are several hosts, and the tensor has more than 2 KiB:
    hierarchical
4. up to 8 ranks and up to 64 KiB: one_shot, with the minimum of two sequential transfers
5. up to 2 KiB: tree
6. up to 512 KiB, or N is a power of two: halving_doubling
7. otherwise: ring

The switch at 2 KiB, below which a tree-like algorithm wins and above which Rabenseifner's does, is
MPICH's (Thakur et al. 2005). A ring sends less than a folded halving, so it wins for long tensors
if N is not a power of two; at 512 KiB MPICH switches to the ring in its all-gather. The limits of
one_shot are our own: it saves sequential transfers, but each of its 2(N-1) messages has a cost, and
N ranks send at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dure.collectives.algorithms.table import PREDICTABLE

SHORT = 2 * 1024
"""Bytes up to which only latency counts."""
DIRECT = 64 * 1024
"""Bytes up to which a few ranks exchange messages directly."""
DIRECT_RANKS = 8
LONG = 512 * 1024
"""Bytes from which only bandwidth counts."""

Predict = Callable[[str, int, int], float]
"""predict(algorithm, nbytes, ranks): seconds, or another number that grows with the time."""


def choose(
    nbytes: int,
    ranks: int,
    hosts: Sequence[Sequence[int]] | None = None,
    *,
    backend: str = "gloo",
    device: str = "cpu",
    predict: Predict | None = None,
) -> str:
    """Return the name of an all-reduce.

    Args:
        nbytes: bytes of the tensor.
        ranks: number of ranks.
        hosts: ranks of each host; None for a single host.
        backend: torch's name of the backend that transfers the bytes.
        device: type of the tensor's device.
        predict: cost model, called for each of the `candidates`.
    """
    own = backend == "dure" if device == "cpu" else backend not in ("", "gloo", "dure")
    if ranks == 1 or own:
        return "native"
    if predict is not None:
        return min(candidates(ranks, hosts), key=lambda name: predict(name, nbytes, ranks))
    if "hierarchical" in candidates(ranks, hosts) and nbytes > SHORT:
        return "hierarchical"
    if ranks <= DIRECT_RANKS and nbytes <= DIRECT:
        return "one_shot"
    if nbytes <= SHORT:
        return "tree"
    # ranks & (ranks - 1) clears the lowest set bit: 0 for a power of two.
    if nbytes <= LONG or ranks & (ranks - 1) == 0:
        return "halving_doubling"
    return "ring"


def candidates(ranks: int, hosts: Sequence[Sequence[int]] | None = None) -> list[str]:
    """Return the algorithms that a cost model compares.

    Algorithms that depend on hosts are included only if the hosts have a hierarchy.
    """
    hierarchy = hosts is not None and 1 < len(hosts) < ranks
    return [name for name, rule in PREDICTABLE.items() if hierarchy or not rule.over_hosts]

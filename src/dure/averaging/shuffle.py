"""The shuffle: examples that lie with ranks are dealt anew, until every rank represents the whole.

Rank i holds n_i of n examples, and n_0 + … + n_(i-1) = o_i of them lie with the ranks before it.

    p_i            a permutation of rank i's examples, a function of (seed, i)
    example p_i(k) of rank i goes to rank (o_i + k) mod N,    k = 0 … n_i - 1

So every rank gets the N-th part of each rank's examples, drawn at random, and has n/N in all, each
to within one. Which example goes where follows from the seed and the n_i alone: no rank has to know
another's examples, and a run that is resumed deals them alike.

What travels: all that a rank does not deal to itself, once: n_i - n_ii examples, with n_ij those of
rank i for rank j (`dealt`). That is (N-1)/N of its examples where N divides n_i. It is an
all-to-all of parts of unequal length, in pairs as in `dure.collectives.all_to_all`: in step s rank
r sends to rank r+s while it receives from rank r-s. A part goes in pieces of `PIECE` bytes, one
message for each tensor of an example (`bytes_sent`, `messages_sent`). Memory: the examples that a
rank ends with, and a piece. Where all examples would take more than half of the memory that is
free, what arrives lies in files on a disk (`dure.memory.mapped`).

Sources: Zinkevich et al. 2010, "Parallelized Stochastic Gradient Descent", algorithm 3, whose first
line divides the examples at random; Dean and Ghemawat 2004, "MapReduce", section 3.1 (shuffle).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dure.collectives.group import Group
from dure.data.examples import Examples
from dure.machine.memory import available_memory
from dure.memory.mapped import Disk, DiskError
from dure.randomness.seeds import generator
from dure.tensors.elements import materialised

PIECE = 8 << 20
"""Bytes of examples that are read and sent at once, at least one example."""


def dealt(counts: Sequence[int]) -> list[list[int]]:
    """How many examples of rank i go to rank j, by [i][j]. counts: the n_i."""
    ranks = len(counts)
    rows = []
    before = 0
    for count in counts:
        # Example k goes to rank (before + k) mod N: the first one for rank j has k = first.
        firsts = [(rank - before) % ranks for rank in range(ranks)]
        rows.append([max(0, -(-(count - first) // ranks)) for first in firsts])
        before += count
    return rows


def leaving(counts: Sequence[int], rank: int, seed: int) -> list[Tensor]:
    """Which of its n_i examples `rank` deals to each rank: positions, in the order they lie in."""
    ranks = len(counts)
    before = sum(counts[:rank])
    drawn = torch.randperm(counts[rank], generator=generator(seed, "deal", rank))
    # Sorted, so that what lies on a disk is read forward. Who gets an example was drawn; in which
    # order a rank visits them every pass draws anew.
    return [drawn[(to - before) % ranks :: ranks].sort().values for to in range(ranks)]


def division_after(parts: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Who has which examples after the shuffle: indices by rank, in the order they lie in there.

    parts: who has which before, as a partition divides them.
    """
    counts = list(map(len, parts))
    rows = [leaving(counts, rank, seed) for rank in range(len(counts))]
    return [
        torch.cat([part[row[to]] for part, row in zip(parts, rows, strict=True)])
        for to in range(len(counts))
    ]


def check_movable(examples: Examples) -> None:
    """Raises ValueError for examples that cannot travel as they are."""
    if examples.draws:
        raise ValueError(
            "the shuffle sends examples as they lie in tensors, and a dataset is read example by "
            "example, with its transforms anew each time: give tensors, or train without shuffle"
        )


class _Leaf(NamedTuple):
    """One tensor of an example: what each example has of it."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """What an example consists of."""

    leaves: list[_Leaf]
    tree: TreeSpec

    @classmethod
    def of(cls, examples: Examples, index: int = 0) -> Layout:
        """As one of them tells, which is read for it."""
        leaves, tree = tree_flatten(examples.batch(torch.tensor([index])))
        return cls([_Leaf(leaf.shape[1:], leaf.dtype) for leaf in leaves], tree)

    @property
    def nbytes(self) -> int:
        """Bytes of an example."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def rows(self) -> int:
        """Examples of a piece."""
        return max(1, PIECE // max(1, self.nbytes))

    def digest(self) -> float:
        """The same number where examples are alike; exact in float64."""
        text = f"{self.leaves} {self.tree}".encode()
        return float(int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little"))


def shuffled(
    examples: Examples, indices: Tensor, counts: Sequence[int], seed: int, group: Group
) -> Examples:
    """The examples that this rank has after the shuffle; all ranks call it together.

    indices: which of `examples` this rank holds, int64 of shape (n_i,). counts: the n_i.

    Raises ValueError, on all ranks, if what an example consists of differs between them.
    """
    layout = Layout.of(examples, int(indices[0]))
    _check_alike(layout, group)
    rows = dealt(counts)
    arriving = [row[group.rank] for row in rows]
    # The examples that ranks deal to this one lie in the order of these ranks.
    mine = _room(layout, sum(arriving), sum(counts))
    starts = [sum(arriving[:rank]) for rank in range(group.size)]
    parts = leaving(counts, group.rank, seed)
    group.settle()
    with torch.no_grad(), group.during("the shuffle"):
        for step in range(group.size):
            to = (group.rank + step) % group.size
            origin = (group.rank - step) % group.size
            start = starts[origin]
            for first in range(0, max(len(parts[to]), arriving[origin]), layout.rows):
                goes = _read(examples, indices[parts[to][first : first + layout.rows]])
                stop = start + min(first + layout.rows, arriving[origin])
                comes = [leaf[start + first : max(stop, start + first)] for leaf in mine]
                _pass(goes, to, comes, origin, group)
    inputs, targets = tree_unflatten(mine, layout.tree)
    return Examples(inputs, targets, classes=examples.classes)


def _room(layout: Layout, count: int, n: int) -> list[Tensor]:
    """For `count` of n examples: in memory, or on a disk where they are many."""
    free = available_memory()
    # All n, since the ranks may share a machine.
    if free is not None and 2 * n * layout.nbytes > free:
        try:
            disk = Disk()
            return [disk.empty((count, *leaf.shape), leaf.dtype) for leaf in layout.leaves]
        except DiskError:
            # There is none, or it is full: memory may still do.
            pass
    return [torch.empty((count, *leaf.shape), dtype=leaf.dtype) for leaf in layout.leaves]


def _read(examples: Examples, indices: Tensor) -> list[Tensor]:
    """The tensors of these examples; none of no examples."""
    if not len(indices):
        return []
    leaves, _ = tree_flatten(examples.batch(indices))
    return [materialised(leaf.detach()) for leaf in leaves]


def _pass(
    goes: Sequence[Tensor], to: int, comes: Sequence[Tensor], origin: int, group: Group
) -> None:
    """One piece out and one in; between a rank and itself without a message."""
    if to == group.rank:
        for target, source in zip(comes, goes, strict=True):
            target.copy_(source)
        return
    # As bytes: not every backend carries every dtype.
    sends = [(_bytes_of(leaf), to) for leaf in goes]
    receives = [(_bytes_of(leaf), origin) for leaf in comes]
    group.transfer(sends, receives)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check_alike(layout: Layout, group: Group) -> None:
    digests = group.all_gather_values([layout.digest()], "what examples consist of")
    other = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
    if other is not None:
        raise ValueError(
            f"an example of rank {other} has other tensors than one of rank 0, in number, shape, "
            f"dtype or structure: ranks that exchange examples have the same kind"
        )


def examples_sent(counts: Sequence[int], rank: int) -> int:
    """Examples that `rank` sends: all but those it deals to itself."""
    return counts[rank] - dealt(counts)[rank][rank]


def bytes_sent(counts: Sequence[int], rank: int, example: int) -> int:
    """Bytes that `rank` sends. example: bytes of one (`Layout.nbytes`)."""
    return example * examples_sent(counts, rank)


def messages_sent(counts: Sequence[int], rank: int, layout: Layout) -> int:
    """Messages that `rank` sends: one for each piece and each tensor that has elements."""
    row = dealt(counts)[rank]
    pieces = sum(-(-count // layout.rows) for to, count in enumerate(row) if to != rank)
    return pieces * sum(leaf.nbytes > 0 for leaf in layout.leaves)

"""Shuffle: ranks exchange their examples, until every rank has a sample of all examples.

Rank i has n_i of n examples, and the ranks before it have n_0 + … + n_(i-1) = o_i examples.

    p_i            a permutation of rank i's examples, a function of (seed, i)
    example p_i(k) of rank i outgoing to rank (o_i + k) mod N,    k = 0 … n_i - 1

Rank j thus gets n_i/N examples of rank i, drawn at random, and n/N examples in all. Both numbers
are rounded up or down to an integer. The destination of an example is a function of the seed and
the n_i alone: no rank has to know another rank's examples, and a resumed run repeats the exchange.

A rank sends each example that it does not keep, once: n_i - n_ii examples, with n_ij the number
from rank i for rank j (`shuffle_counts`). This is (N-1)/N of its examples if N divides n_i. The
exchange is an all-to-all of parts of unequal length, in pairs as in `dure.collectives.all_to_all`:
in step s rank r sends to rank r+s while it receives from rank r-s. A part is sent in pieces of
`PIECE` bytes, one message for each tensor of an example (`bytes_sent`, `messages_sent`). Memory:
the examples that a rank receives, and a piece. If all examples would take more than half of the
free memory, received examples are in files on a disk (`dure.memory.mapped`).

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


def shuffle_counts(counts: Sequence[int]) -> list[list[int]]:
    """Return the matrix n_ij of the numbers of examples that rank i sends to rank j.

    counts: the n_i.
    """
    ranks = len(counts)
    rows = []
    before = 0
    for count in counts:
        # Example k outgoing to rank (before + k) mod N: the first example for rank j has k = first.
        firsts = [(rank - before) % ranks for rank in range(ranks)]
        rows.append([max(0, -(-(count - first) // ranks)) for first in firsts])
        before += count
    return rows


def outgoing_positions(counts: Sequence[int], rank: int, seed: int) -> list[Tensor]:
    """Return the positions of the examples that `rank` sends to each rank, in ascending order."""
    ranks = len(counts)
    before = sum(counts[:rank])
    drawn = torch.randperm(counts[rank], generator=generator(seed, "deal", rank))
    # Sorted, so that examples on a disk are read sequentially. Only the destination is random here;
    # the order of training is drawn in every pass.
    return [drawn[(to - before) % ranks :: ranks].sort().values for to in range(ranks)]


def check_movable(examples: Examples) -> None:
    """Check that reading an example draws no random numbers. Raises ValueError otherwise.

    A dataset with random transforms gives another tensor for each read of an example, and the
    shuffle would send a single one of them.
    """
    if examples.draws:
        raise ValueError(
            "shuffle sends examples as tensors, but a dataset is read example by example, with "
            "new transforms each time: give tensors, or train without shuffle"
        )


class _Leaf(NamedTuple):
    """Shape and dtype of a tensor of an example."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ExampleLayout(NamedTuple):
    """Structure of an example: its tensors as leaves of a pytree."""

    leaves: list[_Leaf]
    tree: TreeSpec

    @classmethod
    def of(cls, examples: Examples, index: int = 0) -> ExampleLayout:
        """Return the layout of the example at `index`. The example is read."""
        leaves, tree = tree_flatten(examples.batch(torch.tensor([index])))
        return cls([_Leaf(leaf.shape[1:], leaf.dtype) for leaf in leaves], tree)

    @property
    def nbytes(self) -> int:
        """Bytes of an example."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def examples_per_piece(self) -> int:
        """Number of examples in a piece of `PIECE` bytes, at least 1."""
        return max(1, PIECE // max(1, self.nbytes))

    def digest(self) -> float:
        """Return a hash of the layout as a float64: ranks compare hashes to compare layouts."""
        text = f"{self.leaves} {self.tree}".encode()
        return float(int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little"))


def shuffle_examples(
    examples: Examples, indices: Tensor, counts: Sequence[int], seed: int, group: Group
) -> Examples:
    """Return the examples of this rank after the shuffle; all ranks call this function together.

    Args:
        examples: Examples, from which this rank reads the examples of its `indices`.
        indices: Indices of this rank's examples, int64 of shape (n_i,).
        counts: Numbers of examples of all ranks, the n_i.
        seed: Seed of the permutations.
        group: Group of the ranks.

    Returns:
        The received examples, in order of the sending rank.

    Raises:
        ValueError: on all ranks, if the structure of an example differs between them.
    """
    layout = ExampleLayout.of(examples, int(indices[0]))
    _check_alike(layout, group)
    sent_counts = shuffle_counts(counts)
    received_counts = [row[group.rank] for row in sent_counts]
    # Received examples are stored in the order of the sending ranks.
    received = _allocate(layout, sum(received_counts), sum(counts))
    starts = [sum(received_counts[:rank]) for rank in range(group.size)]
    positions = outgoing_positions(counts, group.rank, seed)
    group.settle()
    with torch.no_grad(), group.during("the shuffle"):
        for step in range(group.size):
            to = (group.rank + step) % group.size
            origin = (group.rank - step) % group.size
            start = starts[origin]
            for first in range(
                0, max(len(positions[to]), received_counts[origin]), layout.examples_per_piece
            ):
                outgoing = _read_piece(
                    examples, indices[positions[to][first : first + layout.examples_per_piece]]
                )
                stop = start + min(first + layout.examples_per_piece, received_counts[origin])
                # Empty once rank `origin` has no further piece, while rank `to` still gets pieces.
                incoming = [leaf[start + first : max(stop, start + first)] for leaf in received]
                _exchange_piece(outgoing, to, incoming, origin, group)
    inputs, targets = tree_unflatten(received, layout.tree)
    return Examples(inputs, targets, classes=examples.classes)


def _allocate(layout: ExampleLayout, count: int, n: int) -> list[Tensor]:
    """Return tensors for `count` of n examples, one tensor for each leaf of an example.

    The tensors are in files on a disk if the n examples take more than half of the free memory.
    """
    free = available_memory()
    # All n examples count, because all ranks may be on this machine.
    if free is not None and 2 * n * layout.nbytes > free:
        try:
            disk = Disk()
            return [disk.zeros((count, *leaf.shape), leaf.dtype) for leaf in layout.leaves]
        except DiskError:
            # There is no disk, or the disk is full: memory may still suffice.
            pass
    return [torch.empty((count, *leaf.shape), dtype=leaf.dtype) for leaf in layout.leaves]


def _read_piece(examples: Examples, indices: Tensor) -> list[Tensor]:
    """Return the tensors of a piece, with the examples in dimension 0; an empty list for none."""
    if not len(indices):
        return []
    leaves, _ = tree_flatten(examples.batch(indices))
    return [materialised(leaf.detach()) for leaf in leaves]


def _exchange_piece(
    outgoing: Sequence[Tensor], to: int, incoming: Sequence[Tensor], origin: int, group: Group
) -> None:
    """Send the piece `outgoing` to rank `to`, and receive the piece `incoming` from `origin`.

    A rank copies its own pieces without a message.
    """
    if to == group.rank:
        for target, source in zip(incoming, outgoing, strict=True):
            target.copy_(source)
        return
    # As bytes: not every backend supports every dtype.
    sends = [(_bytes_of(leaf), to) for leaf in outgoing]
    receives = [(_bytes_of(leaf), origin) for leaf in incoming]
    group.transfer(sends, receives)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check_alike(layout: ExampleLayout, group: Group) -> None:
    digests = group.all_gather_values([layout.digest()], "what examples consist of")
    other = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
    if other is not None:
        raise ValueError(
            f"examples of rank {other} differ from those of rank 0 in number, shape, dtype or "
            "structure of tensors: ranks that exchange examples need the same form"
        )


def examples_sent(counts: Sequence[int], rank: int) -> int:
    """Return the number of examples that `rank` sends: all except those that it keeps."""
    return counts[rank] - shuffle_counts(counts)[rank][rank]


def bytes_sent(counts: Sequence[int], rank: int, example: int) -> int:
    """Return the bytes that `rank` sends. example: bytes of an example (`ExampleLayout.nbytes`)."""
    return example * examples_sent(counts, rank)


def messages_sent(counts: Sequence[int], rank: int, layout: ExampleLayout) -> int:
    """Return the number of messages that `rank` sends.

    A piece is a message for each tensor of an example; an empty tensor is not sent.
    """
    row = shuffle_counts(counts)[rank]
    pieces = sum(
        -(-count // layout.examples_per_piece) for to, count in enumerate(row) if to != rank
    )
    return pieces * sum(leaf.nbytes > 0 for leaf in layout.leaves)

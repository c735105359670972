"""What travels in split learning and in FedAvg, by their formulas, and how often a client waits.

    all that cut    a round    n (2 q b + t), or n 2 (q + q') b with two cuts, and
    split                      K h: the head goes from client to client, with what its optimizer
                               remembers (in the U-shape with the end of the model)
    parallel split             a step: b |head| up from each client that has a batch, and down to
                               each client
    SplitFed                   2 b |head| K
    FedAvg                     2 b |W| K, and nothing else

for n examples of K clients, q elements of an example at the cut (q' at the second), b bytes each,
and t bytes of its targets. Every byte is counted once. So of one client with n_k examples SplitFed
sends and receives fewer bytes than FedAvg if

    n_k (2 q b + t) + 2 b |head| < 2 b |W|

which is 2 p q / K + 2 beta |W| < 2 |W| (Singh et al. 2019; Thapa et al. 2022) with the targets.

Sources: Singh et al. 2019, "Detailed comparison of communication efficiency of split learning and
federated learning"; Thapa et al. 2022, "SplitFed: When Federated Learning Meets Split Learning".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 4
"""b: bytes of a float."""


@dataclass(frozen=True)
class Shape:
    """Of a model that is cut.

    values: q, or q + q' with two cuts; targets: t, the bytes of an example's targets that travel;
    client: weights of the head, with those of the end; tensors: how many tensors these are; whole:
    all weights.
    """

    values: int
    targets: int
    client: int
    tensors: int
    whole: int


@dataclass(frozen=True)
class Work:
    """sizes: examples of each client. batch: of a client's step. rounds: of one epoch each."""

    sizes: Sequence[int]
    batch: int
    rounds: int

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def steps(self) -> list[int]:
        """Of each client in a round."""
        return [math.ceil(size / self.batch) for size in self.sizes]


def at_the_cut(shape: Shape, examples: int) -> int:
    """Bytes both ways of so many examples."""
    return examples * (2 * shape.values * WIDTH + shape.targets)


def handed(shape: Shape, moments: int) -> int:
    """Bytes of a head that is handed on; moments: what its optimizer remembers of each weight.

    Adam remembers two, and counts the steps of each tensor in a float.
    """
    counts = shape.tensors * WIDTH if moments == 2 else 0
    return (1 + moments) * shape.client * WIDTH + counts


def travels(system: str, shape: Shape, work: Work, moments: int = 0) -> int:
    """Bytes of all rounds. system: split, parallel, split-fed or fed-avg."""
    head = shape.client * WIDTH
    if system == "fed-avg":
        return 2 * work.rounds * work.clients * shape.whole * WIDTH
    cut = at_the_cut(shape, work.rounds * sum(work.sizes))
    if system == "split":
        # The first one has been nowhere: its optimizer remembers nothing.
        return cut + head + (work.rounds * work.clients - 1) * handed(shape, moments)
    if system == "parallel":
        up = sum(work.steps)
        down = max(work.steps) * work.clients
        return cut + (work.clients + work.rounds * (up + down)) * head
    if system == "split-fed":
        return cut + 2 * work.rounds * work.clients * head
    raise ValueError(f"there is no formula for {system}")


def crossover(shape: Shape) -> float:
    """n_k: of how many examples a client and round SplitFed sends as many bytes as FedAvg."""
    return 2 * WIDTH * (shape.whole - shape.client) / at_the_cut(shape, 1)


def trips(system: str, cuts: int, work: Work) -> tuple[int, int]:
    """(of all clients together, one after another): how often somebody waits for an answer.

    In a round; those one after another are what latency is paid for.
    """
    if system == "fed-avg":
        return work.clients, 1
    # Values up, gradients down; with two cuts outputs down and their gradients up besides.
    steps = [cuts * one for one in work.steps]
    if system == "split":
        # And for the head of the one before.
        return sum(steps) + work.clients, sum(steps) + work.clients
    if system == "parallel":
        # Every step ends with the sum of the heads' gradients.
        return sum(steps) + sum(work.steps), max(steps) + max(work.steps)
    return sum(steps) + work.clients, max(steps) + 1

"""Clients differ in their inputs: examples that look alike are with one client.

    s_i   the example's score: its inputs, as one vector, along the first principal component
    r_i   its place in the order of all scores, as a share of n
    key   SKEW·r_i + (1 - SKEW)·u_i,   u_i uniform in (0, 1)

Sorted by key and cut into parts that are equal to within one; which client has which part is drawn.
With SKEW 1 each client has a stretch of the component, such as bright or dark images; with 0 it is
`iid`. Examples are divided and not changed: their distribution over all clients stays what it is,
so that systems are measured on the same data as ever.

The component is that of at most 4,096 examples, evenly taken, and the scores are exact sums of
whole numbers (`_whole`): whoever computes them, with any number of threads, has the same bits, and
so the same clients. Nothing is standardised: where features have scales of their own, the score is
mostly that of the largest. Cost: one pass over the inputs each time that clients are told what is
theirs, three times at the start of a run; 0.8 s for 60,000 examples of 784 values on one core.

Source: dure's own. P. Kairouz et al., "Advances and Open Problems in Federated Learning", 2021,
section 3.1, call it covariate shift. Q. Li et al., "Federated Learning on Non-IID Data Silos: An
Experimental Study", ICDE 2022, make feature skew by noise that differs from client to client, which
changes the examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dure.data.examples import Examples
from dure.data.partition.partition import Partition
from dure.data.partition.parts import Parts, dealt
from dure.randomness.seeds import generator

SAMPLE = 4_096
"""Examples by which the component is found."""

CHUNK = 1_024
"""Examples that are read at once."""

TURNS = 20
"""Power iterations. The component is only approached where two are of nearly the same length, and
then either of them will do."""

FINE = 2**14
"""Steps between 0 and the largest value of the inputs."""

COARSE = 2**11
"""The same of directions and of scores: products and their sums stay below 2^53, where float64
has every whole number."""


@dataclass(frozen=True)
class FeatureSkew(Partition):
    """Examples with like inputs are with one client, as far as `skew` says.

    skew: in [0, 1]: 1 is sorted by the first principal component of the inputs, 0 is like IID.
    """

    name: ClassVar[str] = "feature-skew"
    skew: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.skew <= 1:
            raise ValueError(f"feature-skew: the skew is between 0 and 1, not {self.skew}")

    def _divide(self, clients: int, examples: Examples, seed: int) -> Parts:
        n = len(examples)
        drawn = generator(seed, "partition")
        owners = torch.randperm(clients, generator=drawn)
        by_chance = torch.rand(n, dtype=torch.float64, generator=drawn)
        place = torch.empty(n, dtype=torch.float64)
        order = scores(examples, str(self)).sort(stable=True).indices
        place[order] = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        keys = self.skew * place + (1 - self.skew) * by_chance
        return Parts(dealt(keys.sort(stable=True).indices, owners), clients)

    @property
    def description(self) -> str:
        return f"feature skew, {self.skew:g} of the way to sorted inputs"


def scores(examples: Examples, who: str) -> Tensor:
    """Where each example lies along the first principal component of the inputs, shape (n,).

    who: wants to know. Raises ValueError for inputs that are not one tensor of finite numbers each.
    """
    n = len(examples)
    count = min(n, SAMPLE)
    some = _rows(examples, torch.arange(count) * n // count, who)
    lowest = some.min(0).values
    widest = max(float((some - lowest).max()), 1e-300)
    whole = _whole((some - lowest) / widest, FINE)
    centre = torch.round(whole.sum(0) / count)
    component = _component(whole - centre)
    found = []
    for start in range(0, n, CHUNK):
        rows = _rows(examples, torch.arange(start, min(start + CHUNK, n)), who)
        # What lies beyond all of the sample counts as the outermost of it.
        near = ((rows - lowest) / widest).clamp(-1, 1)
        found.append((_whole(near, FINE) - centre) @ component)
    return torch.cat(found)


def _component(rows: Tensor) -> Tensor:
    """The first principal component of whole numbers, as whole numbers."""
    direction = _whole_part(rows.abs().sum(0))
    for _ in range(TURNS):
        direction = _whole_part(rows.T @ _whole_part(rows @ direction))
    return direction


def _whole_part(numbers: Tensor) -> Tensor:
    """Whole numbers in proportion to these, up to `COARSE`."""
    return _whole(numbers / numbers.abs().max().clamp(min=1.0), COARSE)


def _whole(numbers: Tensor, steps: int) -> Tensor:
    """Numbers in [-1, 1] as so many whole steps."""
    return torch.round(numbers * steps)


def _rows(examples: Examples, places: Tensor, who: str) -> Tensor:
    """The inputs of these examples, one flat row of float64 each."""
    needs = f"the partition {who} compares inputs, "
    if examples.draws:
        raise ValueError(f"{needs}and these are drawn anew each time they are read: take another")
    inputs, _ = examples.batch(places)
    if not isinstance(inputs, Tensor) or inputs.is_complex():
        raise ValueError(f"{needs}and these are not one tensor of real numbers: take another")
    rows = inputs.reshape(len(places), -1).double()
    if not bool(rows.isfinite().all()):
        raise ValueError(f"{needs}and some of these are not finite: mend the data")
    return rows

"""Clients differ in their inputs: similar examples are with the same client.

    s_i   the example's score: its inputs, as a vector, along the first principal component
    r_i   its rank in the order of all scores, as a share of n
    key   SKEW·r_i + (1 - SKEW)·u_i,   u_i uniform in (0, 1)

Sorted by key and cut into parts that are equal to within 1, in random order over the clients.
With SKEW 1 each client has a stretch of the component, such as bright or dark images; with 0 the
partition is like `iid`. Examples are divided and not changed: their distribution over all clients
stays the same, so that systems are measured on the same data.

The component is that of at most 4,096 examples, evenly taken, and the scores are exact sums of
whole numbers (`_whole`): any process, with any number of threads, gets the same bits, and so the
same clients. Features are not standardised: with different scales, the score is mostly that of the
largest. Cost: a pass over the inputs for each division, three times at the start of a run; 0.8 s
for 60,000 examples of 784 values on a single core.

Source: dure's own. P. Kairouz et al., "Advances and Open Problems in Federated Learning", 2021,
section 3.1, call it covariate shift. Q. Li et al., "Federated Learning on Non-IID Data Silos: An
Experimental Study", ICDE 2022, make feature skew by noise that differs from client to client, which
changes the examples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dure.arguments import between
from dure.data.examples import Examples
from dure.data.partition.partition import ClientParts, Partition, assign_parts
from dure.randomness.seeds import generator

SAMPLE = 4_096
"""Most examples for the estimate of the component."""

CHUNK = 1_024
"""Examples that are read at once."""

TURNS = 20
"""Power iterations.

If the two largest components are nearly equal, the result is a mixture of both, which serves as
well.
"""

FINE = 2**14
"""Steps between 0 and the largest value of the inputs."""

COARSE = 2**11
"""Steps of directions and of scores.

Products and their sums stay below 2^53, so that float64 represents them exactly.
"""


@dataclass(frozen=True)
class FeatureSkew(Partition):
    """Examples with similar inputs are with the same client, to the degree `skew`.

    Args:
        skew: in [0, 1]: 1 is sorted by the first principal component of the inputs, 0 is like IID.
    """

    name: ClassVar[str] = "feature-skew"
    skew: float = field(default=1.0, metadata=between(0, 1))

    def _divide(self, clients: int, examples: Examples, seed: int) -> ClientParts:
        n = len(examples)
        drawn = generator(seed, "partition")
        owners = torch.randperm(clients, generator=drawn)
        by_chance = torch.rand(n, dtype=torch.float64, generator=drawn)
        place = torch.empty(n, dtype=torch.float64)
        order = scores(examples, str(self)).sort(stable=True).indices
        place[order] = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        keys = self.skew * place + (1 - self.skew) * by_chance
        return ClientParts(assign_parts(keys.sort(stable=True).indices, owners), clients)

    @property
    def description(self) -> str:
        return f"feature skew, {self.skew:g} of the way to sorted inputs"


def scores(examples: Examples, who: str) -> Tensor:
    """Return each example's score along the first principal component of the inputs, shape (n,).

    who: name of the partition, for errors. Raises ValueError for inputs that are not a tensor of
    finite numbers.
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
        # Values beyond the range of the sample are clamped to it.
        near = ((rows - lowest) / widest).clamp(-1, 1)
        found.append((_whole(near, FINE) - centre) @ component)
    return torch.cat(found)


def _component(rows: Tensor) -> Tensor:
    """Return the first principal component of whole numbers, as whole numbers."""
    direction = _whole_part(rows.abs().sum(0))
    for _ in range(TURNS):
        direction = _whole_part(rows.T @ _whole_part(rows @ direction))
    return direction


def _whole_part(numbers: Tensor) -> Tensor:
    """Return whole numbers in proportion to the given numbers, up to `COARSE`."""
    return _whole(numbers / numbers.abs().max().clamp(min=1.0), COARSE)


def _whole(numbers: Tensor, steps: int) -> Tensor:
    """Return numbers in [-1, 1] as whole multiples of 1 / steps."""
    return torch.round(numbers * steps)


def _rows(examples: Examples, places: Tensor, who: str) -> Tensor:
    """Return the inputs of these examples, as flat rows of float64."""
    needs = f"the partition {who} compares inputs, "
    if examples.draws:
        raise ValueError(f"{needs}and these change at every reading: use another partition")
    inputs, _ = examples.batch(places)
    if not isinstance(inputs, Tensor) or inputs.is_complex():
        raise ValueError(
            f"{needs}and these are not one tensor of real numbers: use another partition"
        )
    rows = inputs.reshape(len(places), -1).double()
    if not bool(rows.isfinite().all()):
        raise ValueError(f"{needs}and some of these are not finite: correct the data")
    return rows

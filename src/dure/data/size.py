"""Size of an example in bytes: the traffic if the data themselves travelled."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dure.data.examples import Examples

SOME = 16
"""Examples that are read to measure a dataset."""


def example_bytes(examples: Examples) -> float:
    """Return the mean bytes of inputs and targets of an example; 0 without examples.

    Exact if all are alike, as in tensors; else the mean of some examples, evenly taken.
    """
    count = min(len(examples), SOME)
    if not count:
        return 0.0
    places = torch.arange(count) * len(examples) // count
    leaves = tree_leaves(examples.batch(places))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)) / count

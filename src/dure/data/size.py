"""How many bytes an example has, as it lies: what would travel if the data did."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dure.data.examples import Examples

SOME = 16
"""Examples by which those that are read one by one are measured."""


def example_bytes(examples: Examples) -> float:
    """Bytes of inputs and targets of one example, in the mean; 0 where there are none.

    Exact where all are alike, as in tensors; else that of some examples, evenly taken.
    """
    count = min(len(examples), SOME)
    if not count:
        return 0.0
    places = torch.arange(count) * len(examples) // count
    leaves = tree_leaves(examples.batch(places))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)) / count

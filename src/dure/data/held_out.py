"""What a client keeps of its examples, to measure models with.

n examples, share s    round(s n) are held out, at least one; at least one is trained on
random                 drawn ones, by the seed and the client
newest                 the last ones
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dure.randomness.seeds import generator

HeldOutOrder = Literal["random", "newest"]
"""Which examples of a client are held out: drawn ones, or its last ones."""


def split(
    parts: Sequence[Tensor], share: float, seed: int, which: HeldOutOrder = "random"
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """(what clients train on, what they keep for measuring), as indices; parts: of each client.

    The share of each is what comes last, in an order of its own or in that of the data; a client
    that has one example alone trains on it.
    """
    if not share:
        return parts, []
    own = []
    kept = []
    for client, part in enumerate(parts):
        # Clients that are elsewhere have nothing here.
        if not len(part):
            own.append(part)
            kept.append(part)
            continue
        # At least one example to measure with, and at least one to train on, which goes first.
        count = min(max(round(share * len(part)), 1), len(part) - 1)
        if which == "newest":
            order = torch.arange(len(part))
        else:
            order = torch.randperm(len(part), generator=generator(seed, "held out", client))
        # Sorted: which examples are held out is random, the order in which a client has the rest is
        # not (arrival goes by it).
        own.append(part[order[: len(part) - count].sort().values])
        kept.append(part[order[len(part) - count :].sort().values])
    return own, kept

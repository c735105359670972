"""Hold out a share of each client's examples, to measure models with.

n examples, share s    round(s n) are held out, at least 1; at least 1 is trained on
random                 drawn at random, by the seed and the client
newest                 the last examples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dure.randomness.seeds import generator

HeldOutOrder = Literal["random", "newest"]
"""Choice of the held-out examples of a client: random, or its last."""


def split_held_out(
    parts: Sequence[Tensor], share: float, seed: int, which: HeldOutOrder = "random"
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return (training indices, held-out indices) of each client. parts: indices of each client.

    A client holds out the end of a random order, or of the order of its data; a client with a
    single example trains on it. Without a share, the second result is empty.
    """
    if not share:
        return parts, []
    own = []
    kept = []
    for client, part in enumerate(parts):
        # A client on another machine has no examples here.
        if not len(part):
            own.append(part)
            kept.append(part)
            continue
        # At least one example to measure with, and at least one to train on, which has priority.
        count = min(max(round(share * len(part)), 1), len(part) - 1)
        if which == "newest":
            order = torch.arange(len(part))
        else:
            order = torch.randperm(len(part), generator=generator(seed, "held out", client))
        # Sorted: the choice of held-out examples is random, but the remaining examples keep the
        # order of the data, which arrival depends on.
        own.append(part[order[: len(part) - count].sort().values])
        kept.append(part[order[len(part) - count :].sort().values])
    return own, kept

"""All randomness is a function of (seed, purpose, round or step, client or rank).

Nothing draws from a generator that somebody else has advanced: whoever needs random numbers asks for a seed of
its own. That is why a resumed run goes on with the same bits, and why the order in which clients are visited
changes nothing.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive(seed: int, purpose: str, *position: int) -> int:
    """A seed in [0, 2^63) of its own for `purpose` at `position`; equal arguments give equal seeds.

    BLAKE2b of the arguments: the same on every machine and in every Python, unlike `hash`.
    """
    text = ":".join([str(seed), purpose, *map(str, position)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *position: int) -> torch.Generator:
    """A torch generator on the CPU, seeded by `derive`."""
    return torch.Generator().manual_seed(derive(seed, purpose, *position))


def shuffled(n: int, seed: int, epoch: int, client: int = 0) -> Tensor:
    """The order in which `client` visits its n examples in its epoch number `epoch`: a permutation, shape (n,).

    Every strategy shuffles by this one rule, so that a lone worker and a federation of one client visit the same
    examples in the same order.
    """
    return torch.randperm(n, generator=generator(seed, "shuffle", epoch, client))

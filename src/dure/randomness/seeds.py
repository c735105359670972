"""Seeds as a function of (seed, purpose, round or step, client or rank).

No code draws from a generator that other code has advanced: code that needs random numbers derives
a seed for its own purpose. For this reason a resumed run continues with the same bits, and the
order in which clients are visited changes nothing.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from dure.machine.devices import device_generators, restore_device_generators, seed_devices


def derive(seed: int, purpose: str, *position: int) -> int:
    """Return a separate seed in [0, 2^63) for `purpose` at `position`.

    Equal arguments give equal seeds. The seed is BLAKE2b of the arguments: the same on every
    machine and in every Python, unlike `hash`.
    """
    text = ":".join([str(seed), purpose, *map(str, position)])
    # 63 bits, so that a seed fits a signed 64-bit integer.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *position: int) -> torch.Generator:
    """Return a torch generator on the CPU, seeded by `derive`."""
    return torch.Generator().manual_seed(derive(seed, purpose, *position))


def shuffled(n: int, seed: int, epoch: int, client: int = 0) -> Tensor:
    """Return the order in which `client` visits its n examples in an epoch, shape (n,).

    Every strategy shuffles by this rule, so that a single worker and a federation of a single
    client visit the same examples in the same order.
    """
    # Reused and seeded again: creating a generator takes as long as ordering a few examples.
    own = _OWN.generator
    return torch.randperm(n, generator=own.manual_seed(derive(seed, "shuffle", epoch, client)))


class _Own(threading.local):
    """Generator of each thread."""

    def __init__(self) -> None:
        self.generator = torch.Generator()


_OWN = _Own()


def seed_generators(seed: int, purpose: str, *position: int, everything: bool = False) -> None:
    """Seed torch's global generators, from which dropout draws, by `derive`.

    These are the CPU generator and, in a process that uses accelerators, their generators.
    everything: also seed numpy's and Python's global generators, for users' code that draws from
    them.
    """
    own = derive(seed, purpose, *position)
    torch.default_generator.manual_seed(own)
    # A process that computes on the CPU leaves accelerators alone.
    seed_devices(own)
    if everything:
        numpy.random.seed(own % 2**32)
        random.seed(own)


def generators_state() -> dict[str, Any]:
    """Return the state of the global generators of torch, numpy and random.

    Used for data pipelines that draw from them. The state of torch covers the CPU and, in a process
    that uses accelerators, its devices.
    """
    numpy_state = numpy.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    return {
        "torch": torch.get_rng_state(),
        **device_generators(),
        # As tensors and numbers, which checkpoints can hold; numpy's own state is a dict of arrays.
        "numpy": {
            "key": torch.from_numpy(inner["key"].astype(numpy.int64)),
            "pos": int(inner["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "random": random.getstate(),
    }


def same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two values of `generators_state` are equal: nothing was drawn between them."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, Mapping):
            return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(equal, a, b))
        return bool(a == b)

    return equal(one, other)


def restore_generators(state: Mapping[str, Any]) -> None:
    """Restore a value of `generators_state`.

    The generator of an accelerator that the state or this process lacks stays unchanged.
    """
    torch.set_rng_state(state["torch"])
    restore_device_generators(state)
    stored = state["numpy"]
    numpy.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": stored["key"].numpy().astype(numpy.uint32), "pos": stored["pos"]},
            "has_gauss": stored["has_gauss"],
            "gauss": stored["gauss"],
        }
    )
    random.setstate(state["random"])


class RoundSeed(NamedTuple):
    """Seed of the run and number of the global model that the round computes, from 0."""

    seed: int
    number: int

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator for `purpose` in this round: the same numbers in every process."""
        return generator(self.seed, purpose, self.number)

"""All randomness is a function of (seed, purpose, round or step, client or rank).

Nothing draws from a generator that somebody else has advanced: code that needs random numbers asks
for a seed of its own. That is why a resumed run goes on with the same bits, and why the order in
which clients are visited changes nothing.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor


def derive(seed: int, purpose: str, *position: int) -> int:
    """A seed in [0, 2^63) of its own for `purpose` at `position`; equal arguments give equal seeds.

    BLAKE2b of the arguments: the same on every machine and in every Python, unlike `hash`.
    """
    text = ":".join([str(seed), purpose, *map(str, position)])
    # 63 bits, so that a seed fits every signed 64-bit integer that it may be kept in.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *position: int) -> torch.Generator:
    """A torch generator on the CPU, seeded by `derive`."""
    return torch.Generator().manual_seed(derive(seed, purpose, *position))


def shuffled(n: int, seed: int, epoch: int, client: int = 0) -> Tensor:
    """The order in which `client` visits its n examples in an epoch: a permutation, shape (n,).

    Every strategy shuffles by this one rule, so that a lone worker and a federation of one client
    visit the same examples in the same order.
    """
    # Seeded anew each time: to make one takes as long as to draw the order of a few examples.
    own = _OWN.generator
    return torch.randperm(n, generator=own.manual_seed(derive(seed, "shuffle", epoch, client)))


class _Own(threading.local):
    """A thread's own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator()


_OWN = _Own()


def seed_generators(seed: int, purpose: str, *position: int, everything: bool = False) -> None:
    """Seeds torch's global generators, from which dropout draws, by `derive`.

    They are the CPU's and, in a process that uses CUDA, those of its devices. everything: seeds
    those of numpy and random too, for users' code that draws from them.
    """
    own = derive(seed, purpose, *position)
    torch.default_generator.manual_seed(own)
    # A process that computes on the CPU leaves CUDA alone.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(own)
    if everything:
        numpy.random.seed(own % 2**32)
        random.seed(own)


def generators_state() -> dict[str, Any]:
    """The state of the global generators of torch, numpy and random.

    For data pipelines that draw from them. torch's are the CPU's and, in a process that uses CUDA,
    those of its devices.
    """
    numpy_state = numpy.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    on_devices = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        **({"cuda": torch.cuda.get_rng_state_all()} if on_devices else {}),
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
    """Whether two values of `generators_state` are equal: nothing was drawn between them."""

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
    """The inverse of `generators_state`.

    Generators of CUDA devices that the state lacks, or this process does, stay as they are.
    """
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device, own in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(own, device)
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

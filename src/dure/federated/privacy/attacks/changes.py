"""What is done to updates before anybody sees them: noise, compression. For asking "what if".

    noise z         each update is clipped to the norm S, noise N(0, (z S)²) is put on their sum
    compression     each update is what arrives of it (`dure.collectives.compression`)

So one recorded run tells what attacks would have got of its updates under protection. It is not
what a protected run gives: its model would have moved otherwise. The noise of an attack on a
recording protects nobody, and is drawn from the seed.

Source: H. B. McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR
2018.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dure.collectives.compression import Compression, NoCompression
from dure.federated.privacy.attacks.recording import Recorded
from dure.randomness.seeds import generator


@dataclass(frozen=True)
class Change:
    """noise: z; 0 leaves updates as they are, and clips none. clip: S; None is the median norm of
    those that are summed. compression: of each update."""

    noise: float = 0.0
    clip: float | None = None
    compression: Compression = field(default_factory=NoCompression)

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise is {self.noise}, but a deviation is 0 or more")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip is {self.clip}, but a largest norm is above 0")

    def __str__(self) -> str:
        said = []
        if self.noise:
            said.append(f"noise {self.noise:g}")
        if self.compression.compresses:
            said.append(str(self.compression))
        return ", ".join(said) or "as sent"


def changed(updates: Sequence[Recorded], change: Change, seed: int) -> list[Recorded]:
    """The updates of a sum, so that their sum is what would have been seen of it.

    The sum weighs by examples. Noise is on the sum: the first update has all of it.
    """
    sent = list(updates)
    if change.compression.compresses:
        sent = [_compressed(one, change.compression, seed) for one in sent]
    if not change.noise:
        return sent
    clip = change.clip or statistics.median(_norm(one.delta) for one in sent)
    sent = [
        _with(one, [t * min(1.0, clip / max(_norm(one.delta), 1e-30)) for t in one.delta])
        for one in sent
    ]
    total = sum(one.about.examples for one in sent)
    # The largest weight of a client decides on what one of them can do to the mean.
    largest = max(one.about.examples for one in sent) / total
    first = sent[0]
    draws = generator(seed, "noise", first.about.ticket)
    share = first.about.examples / total
    noisy = [
        tensor
        + change.noise
        * clip
        * largest
        / share
        * torch.randn(tensor.shape, generator=draws, dtype=torch.float64).to(tensor.dtype)
        for tensor in first.delta
    ]
    return [_with(first, noisy), *sent[1:]]


def _compressed(update: Recorded, compression: Compression, seed: int) -> Recorded:
    delta = []
    for tensor in update.delta:
        payload = compression.encode([tensor], seed, update.about.round, update.about.client)
        delta += compression.decode(payload, [tensor])
    return _with(update, delta)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def _with(update: Recorded, delta: Sequence[Tensor]) -> Recorded:
    return update._replace(delta=delta)

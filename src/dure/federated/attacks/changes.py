"""Changes to recorded updates before an attack: noise and compression.

    noise z         clip each update to the norm S and add noise N(0, (z S)²) to the sum
    compression     replace each update by its decoded form (`dure.collectives.compression`)

A single recorded run then shows the result of an attack under protection. The result differs from
an attack on a protected run, whose model would have taken another path. The noise of an attack on a
recording is drawn from the seed and protects no client.

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

from dure.arguments import above, at_least, check_ranges
from dure.collectives.compression import Compression, NoCompression
from dure.federated.attacks.recording import RecordedUpdate
from dure.randomness.seeds import generator


@dataclass(frozen=True)
class UpdateChange:
    """Noise and compression to apply to the updates of a sum.

    Args:
        noise: z, the noise multiplier; 0 adds no noise and clips no update.
        clip: S, the largest norm of an update; None uses the median norm of the summed updates.
        compression: compression of each update.
    """

    noise: float = field(default=0.0, metadata=at_least(0, finite=True))
    clip: float | None = field(default=None, metadata=above(0))
    compression: Compression = field(default_factory=NoCompression)

    def __post_init__(self) -> None:
        check_ranges(self)

    def __str__(self) -> str:
        said = []
        if self.noise:
            said.append(f"noise {self.noise:g}")
        if self.compression.compresses:
            said.append(str(self.compression))
        return ", ".join(said) or "as sent"


def changed(
    updates: Sequence[RecordedUpdate], change: UpdateChange, seed: int
) -> list[RecordedUpdate]:
    """Return changed updates whose sum is the sum that an attacker would have observed.

    The sum weighs updates by examples. The noise belongs to the sum: the first update carries all
    of it, divided by the weight of that update.
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
    # The sensitivity of the mean to a client is S times the largest weight.
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


def _compressed(update: RecordedUpdate, compression: Compression, seed: int) -> RecordedUpdate:
    delta = []
    for tensor in update.delta:
        payload = compression.encode([tensor], seed, update.about.round, update.about.client)
        delta += compression.decode(payload, [tensor])
    return _with(update, delta)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def _with(update: RecordedUpdate, delta: Sequence[Tensor]) -> RecordedUpdate:
    return update._replace(delta=delta)

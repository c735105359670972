"""Sum of compressed parts: every rank all-gathers, decodes and adds the parts.

Every rank encodes its part; the parts are added in order of rank. Nonlinear parts (signs, levels,
indices) cannot be added in transit, so a rank sends its payload of L bytes to all N-1 others:
(N-1)·L bytes in N-1 messages. The sum of N parts is not compressed again, so only each rank's own
encoding is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dure.collectives.algorithms import auto
from dure.collectives.all_gather import all_gather
from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression.bucket import CompressionBucket
from dure.collectives.compression.error_feedback import ErrorFeedback
from dure.collectives.group import Group


class Codec(Protocol):
    """Encoder and decoder between a bucket's vector and bytes.

    The vector has shape (n,) and the bucket's `work` dtype.
    """

    bucket: CompressionBucket
    nbytes: int
    """Length of a payload: the same for every content."""

    def encode(self, vector: Tensor, payload: Tensor, seed: int, position: Sequence[int]) -> None:
        """Fill `payload`, uint8 of shape (nbytes,).

        seed, position: arguments of the random numbers.
        """

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        """Add sign · (decoded payload) to `into`; sign is 1 or -1."""

    def is_finite(self, payload: Tensor) -> bool:
        """Return whether the payload decodes to finite numbers only."""

    def check(self, payload: Tensor) -> None:
        """Raise ValueError for bytes that `encode` cannot have written."""


def carrier(
    algorithm: Algorithm, group: Group, payload: Tensor
) -> Literal["ring", "one_shot", "native"]:
    """Return the all-gather that replaces an all-reduce by `algorithm`."""
    if algorithm == "ring":
        return "ring"
    if algorithm == "native":
        return "native"
    choice = auto.choose(
        len(payload),
        group.size,
        backend=group.backend(payload.device),
        device=payload.device.type,
    )
    return "native" if algorithm == "auto" and choice == "native" else "one_shot"


class GatheredCompressor:
    """Codec at work on a bucket, with error feedback if `remembers`."""

    def __init__(self, codec: Codec, remembers: bool, seed: int) -> None:
        self.codec = codec
        self.seed = seed
        self.calls = 0
        bucket = codec.bucket
        self.payload = torch.empty(codec.nbytes, dtype=torch.uint8, device=bucket.device)
        self.feedback = ErrorFeedback(bucket.n, bucket.work, bucket.device) if remembers else None

    @torch.no_grad()
    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        group: Group | torch.distributed.ProcessGroup | None,
        algorithm: Algorithm = "one_shot",
    ) -> None:
        bucket = self.codec.bucket
        codec = self.codec
        bucket.check(tensors)
        group = Group.of(group)
        vector = bucket.vector(tensors)
        corrected = vector if self.feedback is None else self.feedback.corrected(vector)
        # (call, rank): every payload of a run is rounded by different random numbers.
        codec.encode(corrected, self.payload, self.seed, (self.calls, group.rank))
        payloads = all_gather(self.payload, group, carrier(algorithm, group, self.payload))
        self.calls += 1
        # All payloads are tested, so that all ranks decide alike. The sent vector is this rank's
        # own payload, decoded.
        if self.feedback is not None and all(map(codec.is_finite, payloads)):
            codec.add(self.payload, corrected, -1)
            self.feedback.keep()
        # In order of rank, starting from zero on every rank: the same bits on all ranks.
        vector.zero_()
        for payload in payloads:
            codec.add(payload, vector, 1)
        bucket.give_back(vector, tensors)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"calls": self.calls}
        if self.feedback is not None:
            state["error"] = self.feedback.error.clone()
        return state

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`. Raises ValueError for another bucket's state."""
        if self.feedback is not None:
            error = state.get("error")
            if error is None or error.shape != self.feedback.error.shape:
                raise ValueError(
                    f"this state does not belong to a compressor of {self.codec.bucket.n} numbers"
                )
            self.feedback.error.copy_(error)
        self.calls = int(state["calls"])

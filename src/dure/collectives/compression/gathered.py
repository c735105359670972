"""The sum of compressed parts: they are all-gathered, and every rank decodes and adds them.

Every rank encodes its part; the parts are added in order of rank.

Parts that are not linear (signs, levels, indices) cannot be added on the way, so a rank sends its
payload of L bytes to all N-1 others: (N-1)·L bytes in N-1 messages. The sum of N parts is not
compressed once more, so nothing but a rank's own encoding is approximate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dure.collectives.algorithms import auto
from dure.collectives.all_gather import all_gather
from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression.bucket import Bucket
from dure.collectives.compression.error_feedback import ErrorFeedback
from dure.collectives.group import Group


class Codec(Protocol):
    """Bytes of a bucket's vector, and back.

    The vector has shape (n,) and the bucket's `work` dtype.
    """

    bucket: Bucket
    nbytes: int
    """Length of a payload: the same for every content."""

    def encode(self, vector: Tensor, payload: Tensor, seed: int, position: Sequence[int]) -> None:
        """Fills `payload`, uint8 of shape (nbytes,).

        seed, position: what random numbers are a function of.
        """

    def add(self, payload: Tensor, into: Tensor, sign: int) -> None:
        """into += sign · (what the payload decodes to); sign is 1 or -1."""

    def is_finite(self, payload: Tensor) -> bool:
        """Whether it decodes to finite numbers only."""

    def check(self, payload: Tensor) -> None:
        """Raises ValueError for bytes that `encode` cannot have written."""


def carrier(
    algorithm: Algorithm, group: Group, payload: Tensor
) -> Literal["ring", "one_shot", "native"]:
    """The all-gather that stands for an all-reduce by `algorithm`."""
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
    """A codec at work on one bucket, with error feedback if it `remembers`."""

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
        # (call, rank): no two payloads of a run are rounded by the same random numbers.
        codec.encode(corrected, self.payload, self.seed, (self.calls, group.rank))
        payloads = all_gather(self.payload, group, carrier(algorithm, group, self.payload))
        self.calls += 1
        # All payloads, so that all ranks decide alike; what was sent is this rank's own one,
        # decoded.
        if self.feedback is not None and all(map(codec.is_finite, payloads)):
            codec.add(self.payload, corrected, -1)
            self.feedback.keep()
        # In order of rank, and from zero on every rank: the same bits everywhere.
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
        """Goes on from a `state`. Raises ValueError if it is another bucket's."""
        if self.feedback is not None:
            error = state.get("error")
            if error is None or error.shape != self.feedback.error.shape:
                raise ValueError(
                    f"this state is not that of a compressor of {self.codec.bucket.n} numbers"
                )
            self.feedback.error.copy_(error)
        self.calls = int(state["calls"])

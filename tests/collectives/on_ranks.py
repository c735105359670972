"""Programs on ranks, what they measured, and tensors of every dtype, for the tests of
collectives."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import dure
from dure.collectives import Group
from dure.contracts.world import RankContext


def on_ranks(
    ranks: int, program: Callable[[RankContext], Any], backend: Literal["gloo", "dure"] = "gloo"
) -> list[Any]:
    """What `program` returns on every rank, in order of rank; `backend` carries its bytes."""

    def gathered(context: RankContext) -> list[Any]:
        return [
            pickle.loads(part)
            for part in context.group.gather_bytes(pickle.dumps(program(context)))
        ]

    result: list[Any] = dure.Processes(ranks, deadline=20, backend=backend).run(
        gathered, lambda event: None
    )
    return result


class Measured(NamedTuple):
    """What a call returned, and what its rank sent for it."""

    value: Any
    sent: int
    messages: int


def measured(group: Group, call: Callable[[], Any]) -> Measured:
    counters = group.meter.counters
    sent, messages = counters.bytes_sent, counters.messages_sent
    value = call()
    return Measured(value, counters.bytes_sent - sent, counters.messages_sent - messages)


def values(n: int, rank: int, dtype: torch.dtype) -> Tensor:
    """The same numbers on every machine; small integers, so that products stay finite."""
    generator = torch.Generator().manual_seed(1000 * n + rank)
    if dtype.is_complex:
        return torch.randn(n, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.rand(n, generator=generator) < 0.5
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -100
    return torch.randint(low, 100, (n,), generator=generator).to(dtype)


def bits(tensor: Tensor) -> bytes:
    """The bytes in memory, by which NaN equals NaN and 0 does not equal -0."""
    return (
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


def tensor_of(content: bytes, dtype: torch.dtype) -> Tensor:
    """The inverse of `bits`, in one dimension. Some dtypes cannot be pickled, but their bytes
    can."""
    return (
        torch.frombuffer(bytearray(content), dtype=dtype)
        if content
        else torch.empty(0, dtype=dtype)
    )

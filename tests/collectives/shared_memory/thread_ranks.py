"""Groups of the backend whose ranks are threads of this process: made in milliseconds, and all
ranks in one view."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dure.collectives.shared_memory import Options, SharedMemoryGroup, native

T = TypeVar("T")
Core = Literal["c", "torch"]

built = pytest.mark.skipif(native.library() is None, reason="the C core is not built here")
CORES = [pytest.param("c", marks=built), "torch"]
on_both_cores = pytest.mark.parametrize("core", CORES)


@contextmanager
def groups(size: int, core: Core, seconds: float = 20.0) -> Iterator[list[SharedMemoryGroup]]:
    """A group of `size` ranks, as each of them sees it."""
    store = dist.HashStore()

    def make(rank: int) -> Callable[[], SharedMemoryGroup]:
        limit = timedelta(seconds=seconds)
        return lambda: SharedMemoryGroup(store, rank, size, limit, list(range(size)), Options(core))

    made = together([make(rank) for rank in range(size)])
    try:
        yield made
    finally:
        for group in made:
            group.shutdown()


def on_every(ranks: Sequence[SharedMemoryGroup], call: Callable[[SharedMemoryGroup], T]) -> list[T]:
    """What the call returns on every rank, which are all in it at the same time."""
    return together([lambda group=group: call(group) for group in ranks])  # type: ignore[misc]


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What calls that wait for each other return. Raises the first error of any."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "some ranks wait for ever"
    return results


def random_bits(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any pattern of bits: normal and subnormal numbers, zeros of both signs, infinities, NaN;
    bools are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=generator).bool()
    bits = torch.randint(
        0, 256, (n * dtype.itemsize,), generator=generator, dtype=torch.uint8
    ).view(dtype)
    if dtype.is_floating_point:  # random bits of a float32 are hardly ever any of these
        tiny = torch.finfo(dtype).smallest_normal
        special = torch.tensor(
            [0.0, -0.0, 1.0, -1.0, tiny, -tiny / 4, float("inf"), float("-inf"), float("nan")],
            dtype=torch.float64,
        ).to(dtype)
        where = torch.randint(0, 4 * len(special), (n,), generator=generator)
        bits = torch.where(where < len(special), special[where % len(special)], bits)
    return bits


def same_bits(actual: Tensor, expected: Tensor) -> None:
    """Raises AssertionError unless all bits agree; a NaN is a NaN, whatever it carries."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        actual.dtype.itemsize
    ]
    different = actual.view(integer) != expected.view(integer)
    if actual.dtype.is_floating_point:
        different &= ~(actual.isnan() & expected.isnan())
    if bool(different.any()):
        at = int(different.nonzero()[0])
        raise AssertionError(
            f"{int(different.sum())} of {actual.numel()} differ, first at {at}: {actual[at]}, not "
            f"{expected[at]}"
        )

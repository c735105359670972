"""Ranks as threads, for what they tell each other: numbers, and tensors to one of them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

from torch import Tensor

from dure.collectives.group import Group


class _Between:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.told: list[list[float]] = [[] for _ in range(size)]
        self.all_here = threading.Barrier(size)
        self.mail: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)


class Rank(Group):
    """One of several ranks."""

    def __init__(self, rank: int, size: int, between: _Between) -> None:
        super().__init__()
        self.rank, self.size, self.between = rank, size, between

    def all_gather_values(self, values: list[float], operation: str = "") -> list[list[float]]:
        self.between.told[self.rank] = values
        self.between.all_here.wait(30)
        rows = list(self.between.told)
        self.between.all_here.wait(30)
        assert len(set(map(len, rows))) == 1, "ranks tell lists of one length"
        return rows

    def send(self, tensor: Tensor, to: int) -> None:
        self.between.mail[self.rank, to].put(tensor.clone())

    def receive(self, into: Tensor, source: int) -> None:
        into.copy_(self.between.mail[source, self.rank].get(timeout=30))


def on_ranks(size: int, work: Callable[[Rank], Any]) -> list[Any]:
    """What `work` returns on each rank, or the ValueError that it raises there."""
    between = _Between(size)

    def one(rank: int) -> Any:
        try:
            return work(Rank(rank, size, between))
        except ValueError as error:
            return error
        except BaseException:
            between.all_here.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))

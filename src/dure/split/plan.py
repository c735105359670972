"""Plan of a split learning run, before any node exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dure.collectives.compression import Compression, NoCompression
from dure.data.partition import Partition
from dure.split.client import Rules
from dure.split.leakage import Defence, NoDefence
from dure.split.messages import SideState
from dure.split.orders import Amounts, TurnOrder
from dure.split.sides import SideRunner

MakeOrder = Callable[[Amounts, SideState | None, Callable[[int], SideRunner], int], TurnOrder]
"""order(amounts, head, tail, seed): makes the order of turns; tail(number) makes a tail."""


@dataclass(frozen=True)
class SplitPlan:
    """Settings of a run.

    clients, at, local_epochs, batch_size, partition, defence, measure_leaks, compression,
    personal_heads, held_out: as in `Split`. rules: the agreement with clients. order: makes the
    order.
    """

    clients: int
    at: tuple[str, ...]
    local_epochs: int
    batch_size: int | None
    partition: Partition
    rules: Rules
    order: MakeOrder
    defence: Defence = field(default_factory=NoDefence)
    measure_leaks: bool = False
    compression: Compression = field(default_factory=NoCompression)
    personal_heads: bool = False
    held_out: float = 0.0

"""What a run of split learning is to be, before anybody lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dure.collectives.compression import Compression, NoCompression
from dure.data.partition import Partition
from dure.split.client import Rules
from dure.split.leakage import Defence, NoDefence
from dure.split.messages import Own
from dure.split.orders import Amounts, Order
from dure.split.sides import Party

MakeOrder = Callable[[Amounts, Own | None, Callable[[int], Party], int], Order]
"""order(amounts, head, tail, seed): who trains when; tail(number) makes a tail."""


@dataclass(frozen=True)
class Plan:
    """clients, at, local_epochs, batch_size, partition, defence, measure_leaks, compression: as in
    `Split`.
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

    @property
    def client_stages(self) -> list[int]:
        """The stages of the model that a client has."""
        return [0, 2] if self.rules.labels_stay else [0]

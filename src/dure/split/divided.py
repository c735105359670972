"""A model that is divided between clients and a server, as learners see it.

Two kinds: a model that is traced and cut (`dure.split.cutting`), and a head and a tail that were
written apart (`dure.split.apart`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from dure.collectives.compression import Compression
from dure.split.batching import Batching
from dure.split.leakage.guard import Crossing
from dure.split.sides import Side
from dure.tasks.loss_shares import CountedLoss


class Divided(ABC):
    """For batches of so many `examples` of a client.

    at: where, in words of the model. losses: what the clients' batches count. head_is_known:
    whether the server can make a head, and so give the first one.
    """

    at: Sequence[str]
    examples: int
    losses: CountedLoss
    head_is_known: bool

    @property
    @abstractmethod
    def heads(self) -> Side:
        """What clients have: the head, and in the U-shape the end."""

    @property
    @abstractmethod
    def tails(self) -> Side:
        """What the server has."""

    @property
    @abstractmethod
    def shares(self) -> Sequence[float]:
        """The share of each stage in the operations of the model, as estimated."""

    @property
    @abstractmethod
    def weights(self) -> Sequence[int]:
        """How many weights each stage trains."""

    @abstractmethod
    def message_bytes(self, compression: Compression) -> list[tuple[int, int]]:
        """Bytes at each cut, compressed so: of the values of a batch, and of their gradients."""

    @abstractmethod
    def crossings(self, few: int, many: int) -> list[list[Crossing]]:
        """What is known of the values at each cut, by batches of two sizes.

        Raises ValueError for one of which several cannot be put together.
        """

    def crossings_of_two(self) -> list[list[Crossing]]:
        """The same, by batches of a client's size and of twice that."""
        return self.crossings(self.examples, 2 * self.examples)

    @property
    @abstractmethod
    def batching(self) -> Callable[[Sequence[int]], Batching]:
        """Puts clients' batches of these sizes together, at the server."""

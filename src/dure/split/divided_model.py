"""Interface of a model that is divided between clients and a server, for learners.

There are two implementations: a model that is traced and cut (`dure.split.cutting`), and a separate
head and tail (`dure.split.separate_models`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from dure.collectives.compression import Compression
from dure.split.batching import Batching
from dure.split.leakage.guard import CutValue
from dure.split.sides import Side
from dure.tasks.loss_shares import CountedLoss


class DividedModel(ABC):
    """A divided model, for client batches of `examples` examples.

    at: the places of the cuts, as names of the model. losses: the loss, which counts the clients'
    batches. head_is_known: whether the server can make a head, and so send the first head.
    """

    at: Sequence[str]
    examples: int
    losses: CountedLoss
    head_is_known: bool

    @property
    @abstractmethod
    def heads(self) -> Side:
        """Side of the clients: the head, and in the U-shape the end."""

    @property
    @abstractmethod
    def tails(self) -> Side:
        """Side of the server."""

    @property
    @abstractmethod
    def shares(self) -> Sequence[float]:
        """Estimated share of each stage in the operations of the model."""

    @property
    @abstractmethod
    def weights(self) -> Sequence[int]:
        """Number of trained weights of each stage."""

    @abstractmethod
    def message_bytes(self, compression: Compression) -> list[tuple[int, int]]:
        """Return the bytes at each cut with this compression: of values, and of gradients."""

    @abstractmethod
    def crossings(self, few: int, many: int) -> list[list[CutValue]]:
        """Return the `CutValue` of each value at each cut, from batches of two sizes.

        Raises ValueError for a value that cannot be concatenated over clients.
        """

    def crossings_of_two(self) -> list[list[CutValue]]:
        """Return `crossings` for a client's batch size and twice that."""
        return self.crossings(self.examples, 2 * self.examples)

    @property
    @abstractmethod
    def batching(self) -> Callable[[Sequence[int]], Batching]:
        """Function that returns the server's concatenation of clients' batches of given sizes."""

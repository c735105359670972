"""Models to whose sums a client contributes no more, and its last answers.

    has       whether the client has helped to unmask a sum of updates from this model
    spend     from now on it has; nothing of the answer leaves before this returns
    answered  the answer to the same question, asked again

A list on disk, of clients on machines of their own, is `dure.worlds.network.client.spent`'s. The
list here lives in memory: that of a simulation, whose clients trust each other, and that of a
client without a folder. The list of an identity is one in a process, whoever asks for it; a client
whose identity outlives the process needs one that does so too.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol


class SpentModels(Protocol):
    """What `Holding` asks of a list.

    client: its number. model: `ModelDigest.spent`. question: digest of the message that was
    answered.
    """

    def has(self, client: int, model: bytes) -> bool:
        """Whether the client has helped to unmask a sum of updates from this model."""

    def spend(self, client: int, model: bytes, ticket: int, question: bytes, answer: bytes) -> None:
        """Notes it, with the answer to repeat. An update of this ticket is not needed any more."""

    def answered(self, client: int, ticket: int, question: bytes) -> bytes | None:
        """The answer that this question got; None for a question without one."""

    def drop(self, ticket: int) -> None:
        """Forgets the update of this ticket, which will be in no sum."""

    def settled(self, ticket: int) -> None:
        """Nobody asks about this ticket again."""


class SpentInMemory:
    """A list that ends with the process.

    Memory: about 150 bytes a model, and a bit for each client.
    """

    def __init__(self) -> None:
        # A model's clients are the bits of a number: a simulation has a thousand in each round.
        self._clients: dict[bytes, int] = {}
        self._answers: dict[int, tuple[bytes, bytes]] = {}

    def has(self, client: int, model: bytes) -> bool:
        return bool(self._clients.get(model, 0) >> client & 1)

    def spend(self, client: int, model: bytes, ticket: int, question: bytes, answer: bytes) -> None:
        self._clients[model] = self._clients.get(model, 0) | 1 << client
        self._answers[ticket] = question, answer

    def answered(self, client: int, ticket: int, question: bytes) -> bytes | None:
        asked, answer = self._answers.get(ticket, (b"", b""))
        return answer if asked == question else None

    def drop(self, ticket: int) -> None:
        """Updates are not kept here."""

    def settled(self, ticket: int) -> None:
        self._answers.pop(ticket, None)


@cache
def of_identity(public: str) -> SpentInMemory:
    """The list of the client with this public key, in this process."""
    return SpentInMemory()

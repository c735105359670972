"""Models that a client has helped to unmask, and the client's last answers.

    has       whether the client has helped to unmask a sum of updates from this model
    spend     record that it has; the answer must not leave before `spend` returns
    answered  the recorded answer to a repeated question

`dure.deploy.client.spent_models` has the list on disk, for clients on separate machines.
The list here is in memory: for a simulation, whose clients trust each other, and for a client
without a folder. An identity has a single list in a process; a client whose identity outlives the
process needs a list that outlives the process as well.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol


class SpentModels(Protocol):
    """Interface of the list that `PendingUpdates` uses.

    `client` is the client's number, `model` is `ModelDigest.spent`, and `question` is the digest of
    the answered message.
    """

    def has(self, client: int, model: bytes) -> bool:
        """Return whether the client has helped to unmask a sum of updates from this model."""

    def spend(self, client: int, model: bytes, ticket: int, question: bytes, answer: bytes) -> None:
        """Record the model and the answer to repeat.

        The update of this ticket is no longer needed.
        """

    def answered(self, client: int, ticket: int, question: bytes) -> bytes | None:
        """Return the answer that this question got; None for a question without an answer."""

    def drop(self, ticket: int) -> None:
        """Delete the update of this ticket, which will be in no sum."""

    def settled(self, ticket: int) -> None:
        """Delete the answer of this ticket: the server will not ask again."""


class SpentInMemory:
    """List that ends with the process.

    Memory: about 150 bytes a model, and a bit for each client.
    """

    def __init__(self) -> None:
        # Clients are bits of an integer, as a simulation has a thousand clients in each round.
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
        """Do nothing: the list in memory contains no updates."""

    def settled(self, ticket: int) -> None:
        self._answers.pop(ticket, None)


@cache
def of_identity(public: str) -> SpentInMemory:
    """Return the process's list of the client with this public key."""
    return SpentInMemory()

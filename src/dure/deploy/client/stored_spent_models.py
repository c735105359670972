"""`SpentModels` of a single client, stored in its folder, so that the list survives the process.

The client's index stores the last answers, and `spent-models` the file of digests.
"""

from __future__ import annotations

from dure.deploy.client.state import ClientState


class StoredSpentModels:
    """List of spent models in a client's folder; client numbers are ignored."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    def has(self, client: int, model: bytes) -> bool:
        return self._state.is_spent(model)

    def spend(self, client: int, model: bytes, ticket: int, question: bytes, answer: bytes) -> None:
        self._state.spend(model, ticket, question, answer)

    def answered(self, client: int, ticket: int, question: bytes) -> bytes | None:
        return self._state.answered(ticket, question)

    def drop(self, ticket: int) -> None:
        self._state.drop_update(ticket)

    def settled(self, ticket: int) -> None:
        """Do nothing: `ClientState.settle` has done the work."""

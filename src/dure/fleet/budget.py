"""Transfer budget: the bytes that a client may receive and send in a run.

A client is asked only if the model and its update still fit the budget. The bytes of an update that
a failed client does not send are returned to its budget. Cost O(1) per request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TransferBudget:
    """Transfers of clients.

    limit: bytes of each client, received and sent together; None is no limit, without counting.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.spent: dict[int, int] = {}
        """Bytes of each client that has been asked."""
        self.most = 0
        """Largest number of bytes of an assignment with its update."""

    def take(self, client: int, down: int, up: int) -> bool:
        """Take the bytes of a request from the client's budget; return False if they do not fit."""
        if self.limit is None:
            return True
        self.most = max(self.most, down + up)
        spent = self.spent.get(client, 0) + down + up
        if spent > self.limit:
            return False
        self.spent[client] = spent
        return True

    def give_back(self, client: int, up: int) -> None:
        """Return the bytes of an unsent update to the client's budget."""
        if self.limit is not None:
            self.spent[client] -= up

    def left(self, client: int) -> int:
        """Return how often the client can still be asked, at the largest request so far."""
        assert self.limit is not None
        return (self.limit - self.spent.get(client, 0)) // max(self.most, 1)

    @property
    def out(self) -> dict[int, int]:
        """Clients that cannot be asked any more, with their bytes."""
        if self.limit is None:
            return {}
        return {
            client: spent for client, spent in sorted(self.spent.items()) if not self.left(client)
        }

    def state(self) -> dict[str, Any]:
        """Return the state, as a tree for checkpoints."""
        return {"spent": dict(sorted(self.spent.items())), "most": self.most}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.spent = dict(state["spent"])
        self.most = state["most"]

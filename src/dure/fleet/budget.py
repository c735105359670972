"""A budget of transfers: how many bytes a client may receive and send in a run.

A client is asked only if the model that it would receive and the update that it would send still
fit. What it does not send in the end, since it has failed, is given back. Cost O(1) when a client
is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Budget:
    """What clients have transferred.

    limit: bytes of each, received and sent together; None is no limit, and nothing is counted.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.spent: dict[int, int] = {}
        """Bytes of each client that has been asked."""
        self.most = 0
        """The most bytes that an assignment and its update have taken."""

    def take(self, client: int, down: int, up: int) -> bool:
        """Whether the client can be asked; then these bytes are taken from its budget."""
        if self.limit is None:
            return True
        self.most = max(self.most, down + up)
        spent = self.spent.get(client, 0) + down + up
        if spent > self.limit:
            return False
        self.spent[client] = spent
        return True

    def give_back(self, client: int, up: int) -> None:
        """The client has sent nothing."""
        if self.limit is not None:
            self.spent[client] -= up

    def left(self, client: int) -> int:
        """How often the client can still be asked, at what that has taken so far."""
        assert self.limit is not None
        return (self.limit - self.spent.get(client, 0)) // max(self.most, 1)

    @property
    def out(self) -> dict[int, int]:
        """The clients that cannot be asked any more, and the bytes of each."""
        if self.limit is None:
            return {}
        return {
            client: spent for client, spent in sorted(self.spent.items()) if not self.left(client)
        }

    def state(self) -> dict[str, Any]:
        """As a tree for checkpoints."""
        return {"spent": dict(sorted(self.spent.items())), "most": self.most}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.spent = dict(state["spent"])
        self.most = state["most"]

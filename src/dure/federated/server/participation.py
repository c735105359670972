"""Participation: shares of clients and examples in new models, and clients that have left.

    clients share     clients whose updates are in the new model / all clients of the run
    examples share    their examples / the examples of all clients that have ever checked in

In rounds that sample clients both shares are small by design. On a network a client may leave for
good, and the run continues with the other clients: a warning reports a client that has left when a
model is made without it, and the report names the client at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

MOST_NAMED = 5
"""Largest number of clients that a warning names."""


class Participation:
    """Shares of the newest model, and clients that have left. who: names a client for messages."""

    def __init__(self, who: Callable[[int], str]) -> None:
        self._who = who
        self.left: dict[int, int] = {}
        """Clients that have left: client -> the first round without it."""
        self._told = 0
        """Number of clients in the last warning."""
        self._clients = 0
        self._total: tuple[int, int] | None = None
        """(all examples, number of clients that they were counted over)."""
        self.shares: dict[str, float] = {}
        """Shares of the newest model, by their names in the history."""

    def made(
        self,
        round: int,
        clients: Sequence[int] | None,
        sizes: Sequence[int],
        present: Collection[int] | None,
        knows_sizes: bool,
    ) -> str | None:
        """Note a new model. Returns a warning if more clients have left than before.

        Args:
            round: of the model, from 1 on.
            clients: clients in the model; None if participation is secret.
            sizes: the examples of each client of the run; 0 for a client that was never available.
            present: available clients; None in a simulation, whose clients do not leave.
            knows_sizes: whether the server knows each client's number of examples.
        """
        self._clients = len(sizes)
        self.shares = {}
        if clients is not None:
            self.shares["clients_share"] = len(set(clients)) / len(sizes)
            if knows_sizes:
                total = self._examples(sizes, present is None)
                some = sum(sizes[client] for client in set(clients))
                self.shares["examples_share"] = some / total if total else 0.0
        if present is None:
            return None
        came = {client for client, size in enumerate(sizes) if size}
        return self._leave(round, present, sorted(came.difference(present)))

    def _examples(self, sizes: Sequence[int], simulated: bool) -> int:
        # A simulation may have a million clients, whose examples do not change.
        if self._total is None or not simulated or self._total[1] != len(sizes):
            self._total = (sum(sizes), len(sizes))
        return self._total[0]

    def _leave(self, round: int, present: Collection[int], gone: Sequence[int]) -> str | None:
        self.left = {client: self.left.get(client, round) for client in gone}
        more = len(gone) > self._told
        self._told = len(gone)
        if not more:
            return None
        some = ", ".join(map(self._who, gone[:MOST_NAMED]))
        others = f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
        share = self.shares.get("examples_share")
        data = "" if share is None else f"; the new model is of {share:.0%} of the examples"
        here = len(present)
        return (
            f"round {round}: {here} of {self._clients} clients {'is' if here == 1 else 'are'} "
            f"connected, without {some}{others}, who left{data} (a selection with a larger "
            "minimum waits for them)"
        )

    def facts(self) -> dict[str, Any]:
        """Return the clients missing at the end, each with the first round without it."""
        if not self.left:
            return {}
        return {
            "left": sorted(self.left.items()),
            "took_part": {"clients": self._clients, **self.shares},
        }

    def state(self) -> dict[str, Any]:
        return {"left": dict(self.left), "told": self._told}

    def restore(self, state: dict[str, Any]) -> None:
        self.left = dict(state["left"])
        self._told = state["told"]

"""Publication of a lost rank between hosts, through the group's store: the first is valid."""

from __future__ import annotations

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dure.collectives.shared_memory.host import PeerLoss
from dure.errors import PeerLostError


class LossPublication:
    """Verdict of a group, as seen by a rank."""

    def __init__(self, store: Store) -> None:
        # A separate connection, since a TCPStore connection serves a request at a time, and another
        # thread's request may wait for a key.
        self._store = PrefixStore("lost", store.clone() if hasattr(store, "clone") else store)
        self._store_is_gone = False

    def tell(self, loss: PeerLostError) -> PeerLostError:
        """Publish a loss to all hosts; return the loss that was published first."""
        try:
            text = msgspec.json.encode(PeerLoss.of(loss)).decode()
            # Sets the key if it is unset; in both cases returns the current value.
            return msgspec.json.decode(
                self._store.compare_set("verdict", "", text), type=PeerLoss
            ).error()
        except RuntimeError:  # the store has gone with its host
            self._store_is_gone = True
            return loss

    def told(self) -> PeerLostError | None:
        """Return the loss that any host has published, or None."""
        if self._store_is_gone:  # each further request would make torch print an error
            return None
        try:
            if not self._store.check(["verdict"]):
                return None
            return msgspec.json.decode(self._store.get("verdict"), type=PeerLoss).error()
        except RuntimeError:
            self._store_is_gone = True
            return None

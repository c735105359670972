"""What hosts tell each other of a lost rank, through the group's store: the first one holds."""

from __future__ import annotations

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from dure.collectives.shared_memory.host import Loss
from dure.errors import PeerLostError


class Verdict:
    """One group's verdict, as one rank asks for it and gives it."""

    def __init__(self, store: Store) -> None:
        # Of its own, since a connection of a TCPStore serves one request at a time, and another
        # thread's may wait for a key.
        self._store = PrefixStore("lost", store.clone() if hasattr(store, "clone") else store)
        self._store_is_gone = False

    def tell(self, loss: PeerLostError) -> PeerLostError:
        """Tells all hosts; returns what was told first."""
        try:
            text = msgspec.json.encode(Loss.of(loss)).decode()
            # It sets the key if nobody has; either way it returns what stands there now.
            return msgspec.json.decode(
                self._store.compare_set("verdict", "", text), type=Loss
            ).error()
        except RuntimeError:  # the store has gone with its host
            self._store_is_gone = True
            return loss

    def told(self) -> PeerLostError | None:
        """What any host has told."""
        if self._store_is_gone:  # each further question would make torch print how it failed
            return None
        try:
            if not self._store.check(["verdict"]):
                return None
            return msgspec.json.decode(self._store.get("verdict"), type=Loss).error()
        except RuntimeError:
            self._store_is_gone = True
            return None

"""Session: keys in torchrun's store that belong to a single run of a single set of ranks.

The store outlives the ranks: after a restart it still has the keys of the earlier ranks, and a job
may do several runs. The ranks have no common number of the run either, because each torchrun agent
counts restarts by itself. The ranks therefore perform a handshake: every rank writes a new random
token, rank 0 answers each token with the name of the session, and a rank that has read the answer
to its token confirms under that name.

Cost: three short keys per rank.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from dure.errors import PeerLostError

LOOK_SECONDS = 0.005


def session(store: Store, rank: int, size: int, deadline: float) -> Store:
    """Return a store with the keys of this run, shared by exactly the `size` ranks that called it.

    Raises PeerLostError if the other ranks have not arrived within `deadline` seconds.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        name = f"session/{token}"
        _welcome_all(store, name, size, deadline)
    else:
        store.set(f"hello/{rank}", token)
        answered = f"welcome/{token}"
        _wait(deadline, lambda: () if store.check([answered]) else (0,))
        name = store.get(answered).decode()
        store.set(f"{name}/here/{rank}", "")
    return PrefixStore(name, store)


def _welcome_all(store: Store, name: str, size: int, deadline: float) -> None:
    """Answer new tokens on rank 0, until all ranks have confirmed."""
    absent = set(range(1, size))
    welcomed: set[str] = set()

    def missing() -> tuple[int, ...]:
        for other in sorted(absent):
            if store.check([f"{name}/here/{other}"]):
                absent.discard(other)
            elif store.check([f"hello/{other}"]):
                token = store.get(f"hello/{other}").decode()
                if token not in welcomed:
                    # The token may be from a rank that has ended: then nobody reads the answer.
                    welcomed.add(token)
                    store.set(f"welcome/{token}", name)
        return tuple(sorted(absent))

    _wait(deadline, missing)


def _wait(deadline: float, missing: Callable[[], tuple[int, ...]]) -> None:
    """Wait until no rank is missing. Raises PeerLostError after `deadline` seconds."""
    until = time.monotonic() + deadline
    while lost := missing():
        if time.monotonic() > until:
            reason = f"did not come within {deadline:g} s"
            raise PeerLostError(lost, "the meeting of the ranks", "the start", reason)
        time.sleep(LOOK_SECONDS)

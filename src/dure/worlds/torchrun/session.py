"""A part of torchrun's store that belongs to one run of one set of ranks.

The store outlives the ranks: after a restart the keys of the earlier ones still stand in it, and
one job may do several runs. Nor do the ranks have a number of the run in common, for each agent of
torchrun counts restarts by itself. So they meet first: every rank writes a token that is new, rank
0 answers each token with the name of the session, and a rank that has read the answer to its own
token says so under that name.

Cost: three short keys a rank.
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
    """The keys of this run, seen by all `size` ranks that called it and by nobody else.

    Raises PeerLostError if the others have not come within `deadline` seconds.
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
    """On rank 0: answers every token that it has not seen, until all ranks have read an answer."""
    absent = set(range(1, size))
    welcomed: set[str] = set()

    def missing() -> tuple[int, ...]:
        for other in sorted(absent):
            if store.check([f"{name}/here/{other}"]):
                absent.discard(other)
            elif store.check([f"hello/{other}"]):
                token = store.get(f"hello/{other}").decode()
                if token not in welcomed:
                    # It may be that of a rank long gone: then nobody reads the answer.
                    welcomed.add(token)
                    store.set(f"welcome/{token}", name)
        return tuple(sorted(absent))

    _wait(deadline, missing)


def _wait(deadline: float, missing: Callable[[], tuple[int, ...]]) -> None:
    """Until no rank is missing."""
    until = time.monotonic() + deadline
    while lost := missing():
        if time.monotonic() > until:
            reason = f"did not come within {deadline:g} s"
            raise PeerLostError(lost, "the meeting of the ranks", "the start", reason)
        time.sleep(LOOK_SECONDS)

"""A part of torchrun's store that belongs to one run of one set of ranks.

The store outlives the ranks: after a restart the keys of those before still stand in it, and one
job may do several runs. The ranks have no number of the run in common either, for each agent of
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
    until = time.monotonic() + deadline

    def wait(found: Callable[[], bool], missing: Callable[[], tuple[int, ...]]) -> None:
        while not found():
            if time.monotonic() > until:
                reason = f"did not come within {deadline:g} s"
                raise PeerLostError(missing(), "the meeting of the ranks", "the start", reason)
            time.sleep(LOOK_SECONDS)

    token = secrets.token_hex(8)
    if rank != 0:
        store.set(f"hello/{rank}", token)
        wait(lambda: store.check([f"welcome/{token}"]), lambda: (0,))
        name = store.get(f"welcome/{token}").decode()
        store.set(f"{name}/here/{rank}", "")
        return PrefixStore(name, store)
    name = f"session/{token}"
    absent = set(range(1, size))
    welcomed: set[str] = set()

    def welcome() -> bool:
        for other in sorted(absent):
            if store.check([f"{name}/here/{other}"]):
                absent.discard(other)
            elif (
                store.check([f"hello/{other}"])
                and (new := store.get(f"hello/{other}").decode()) not in welcomed
            ):
                welcomed.add(new)  # perhaps that of a rank long gone: then nobody reads the answer
                store.set(f"welcome/{new}", name)
        return not absent

    wait(welcome, lambda: tuple(sorted(absent)))
    return PrefixStore(name, store)

"""The ranks of one run meet in a store that others have used before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import Store

from dure.errors import PeerLostError
from dure.worlds.torchrun.session import session
from dure.worlds.torchrun.world import StopRequest


@pytest.fixture
def server() -> TCPStore:
    return TCPStore(
        "127.0.0.1", 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False
    )


def client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, None, False, timeout=timedelta(seconds=20))


def meet(server: TCPStore, size: int) -> list[Store]:
    """The sessions that ranks 0 to size-1 get, who call at the same time."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: session(client(server), rank, size, 20.0), range(size)))


def test_ranks_share_a_session_and_no_session_is_used_twice(server: TCPStore) -> None:
    for size in (3, 1, 2, 4, 2):
        sessions = meet(server, size)
        assert not any(one.check(["written"]) for one in sessions)
        sessions[-1].set("written", str(size))
        assert [one.get("written") for one in sessions] == [str(size).encode()] * size


def test_who_does_not_come_is_named(server: TCPStore) -> None:
    meet(server, 3)  # what the ranks before have left does not count
    with pytest.raises(
        PeerLostError,
        match=r"ranks 1, 2 did not come within 0.1 s, during the meeting of the ranks",
    ):
        session(server, 0, 3, 0.1)
    with pytest.raises(PeerLostError, match=r"rank 0 did not come within 0.1 s"):
        session(server, 1, 3, 0.1)


def test_rank_0_hears_that_another_rank_was_asked_to_end(server: TCPStore) -> None:
    first, second = (StopRequest(one) for one in meet(server, 2))
    assert not first.heard()
    second.ask()
    # What is set is not answered: this is, and comes after it.
    assert second.store.check(["end"])
    first._looked -= 1.0
    assert first.heard()
    assert not first.asked, "its own launcher has not asked it yet"

"""Exchanges between two hosts: right bits, whatever is under way; calls that differ, silence and
endings are told."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import built, random_bits, same_bits

from dure.collectives.shared_memory.calls import (
    ALL_GATHER,
    ALL_REDUCE,
    NUMBER_OF,
    SENSIBLE,
    SUM,
    CollectiveCall,
)
from dure.collectives.shared_memory.portable import reduced
from dure.collectives.shared_memory.rendezvous import GroupRendezvous
from dure.collectives.shared_memory.two_hosts import duplex as duplex_module
from dure.collectives.shared_memory.two_hosts.duplex import (
    Duplex,
    PeerCallMismatchError,
    connection,
)
from dure.collectives.shared_memory.two_hosts.planned import PlannedOverDuplex
from dure.errors import PeerLostError

pytestmark = built

SOON = timedelta(seconds=20)


@contextlib.contextmanager
def pair(buffers: int = 0) -> Iterator[tuple[Duplex, Duplex]]:
    """Two ends over the loopback, whose kernel buffers hold so many bytes if not as many as it
    likes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.socket()
        for each in (server, there) if buffers else ():
            for which in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                each.setsockopt(socket.SOL_SOCKET, which, buffers)
        there.connect(server.getsockname())
        here, _ = server.accept()
    ends = Duplex(here, first=True), Duplex(there, first=False)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def sum_of(n: int, dtype: torch.dtype = torch.float32, op: int = SUM) -> CollectiveCall:
    return CollectiveCall(ALL_REDUCE, NUMBER_OF[dtype], op, -1, n)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(SENSIBLE, key=str)),
            st.sampled_from([0, 1, 7, 1000, 131_071, 200_003]),
            st.sampled_from(["sum", "scatter", "gather"]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1),
    st.sampled_from([0, 4096]),
)
def test_what_is_begun_ends_with_the_right_bits_whoever_begins_first(plan, first, buffers):
    with pair(buffers) as ends:
        sides = [PlannedOverDuplex(end, here) for here, end in enumerate(ends)]
        under_way, expected = [], []
        for here in (
            first,
            1 - first,
        ):  # one end begins everything before the other begins anything
            for number, ((dtype, op), n, kind) in enumerate(plan):
                given = [random_bits(2 * n, dtype, 10 * number + rank) for rank in range(2)]
                own, call = given[here].clone(), sum_of(n, dtype, op)
                if kind == "sum":
                    begun, into, right = (
                        sides[here].all_reduce(call, own, op),
                        own,
                        reduced(given, op),
                    )
                elif kind == "scatter":
                    into, right = own.new_empty(n), reduced(given, op)[here * n : (here + 1) * n]
                    begun = sides[here].reduce_scatter(call, own, into, op)
                else:
                    into, right = own.new_empty(2 * n), torch.cat([each[:n] for each in given])
                    begun = sides[here].all_gather(
                        CollectiveCall(ALL_GATHER, NUMBER_OF[dtype], 0, -1, n), into, own[:n]
                    )
                under_way.append(begun)
                expected.append((into, right))
        for begun in reversed(under_way):
            begun.work.wait(SOON)
            begun.then()
            assert begun.work.is_completed()
            assert 0 < begun.ended() <= time.perf_counter()
        for into, right in expected:
            same_bits(into, right)


def test_calls_that_differ_are_told_at_both_ends_and_what_follows_is_right():
    with pair() as ends:
        tensors = [torch.full((n,), 2.0) for n in (300_000, 299_999)]
        unlike = [
            end.begin(sum_of(len(tensor)), tensor, tensor, tensor)
            for end, tensor in zip(ends, tensors, strict=True)
        ]
        after = [torch.ones(5) for _ in ends]
        like = [
            end.begin(sum_of(5), tensor, tensor, tensor)
            for end, tensor in zip(ends, after, strict=True)
        ]
        for exchange, theirs in zip(unlike, reversed(tensors), strict=True):
            with pytest.raises(PeerCallMismatchError) as caught:
                exchange.wait(SOON)
            assert caught.value.theirs == sum_of(len(theirs))
        for exchange in like:
            exchange.wait(SOON)
        assert all(tensor.eq(2).all() for tensor in [*tensors, *after])


def test_a_silent_peer_is_waited_for_no_longer_than_asked():
    with pair() as (here, _):
        exchange = here.begin(sum_of(3), torch.ones(3), torch.ones(3))
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="timed out"):
            exchange.wait(timedelta(seconds=0.05))
        assert time.monotonic() - started >= 0.05
        assert not exchange.is_completed()
        assert exchange.ended == 0


def test_the_end_of_one_side_is_told_to_the_other_at_once_and_ever_after():
    with pair() as (here, there):
        exchange = here.begin(sum_of(5_000_000), torch.ones(5_000_000), torch.empty(5_000_000))
        threading.Timer(0.05, there.close).start()
        for each in (exchange, here.begin(sum_of(1), torch.ones(1), torch.ones(1))):
            with pytest.raises(RuntimeError, match="lost"):
                each.wait(SOON)
            assert each.is_completed()
        with pytest.raises(RuntimeError, match="was closed"):
            there.begin(sum_of(1), torch.ones(1), torch.ones(1))


def test_tensors_that_nobody_else_has_stay_until_their_exchange_is_over():
    with pair() as (here, there):
        tensor = torch.ones(100_000)
        gone = weakref.ref(tensor)
        here.begin(sum_of(100_000), tensor, tensor, tensor)
        del tensor
        assert gone() is not None
        other = torch.ones(100_000)
        there.begin(sum_of(100_000), other, other, other).wait(SOON)
        until = time.monotonic() + 20
        while gone() is not None and time.monotonic() < until:
            for end in (here, there):
                end.begin(sum_of(1), torch.ones(1), torch.ones(1))
        assert gone() is None
        assert other.eq(2).all()


# How two hosts reach each other.


def both(tmp_path: Path, call: Callable[[GroupRendezvous], object]) -> list[object]:
    """What a call gives on each of two hosts, here threads with a store each."""
    results: list[object] = [None, None]

    def run(here: int) -> None:
        results[here] = call(
            GroupRendezvous(dist.FileStore(str(tmp_path / "store"), 2), here, (0, 1), 30)
        )

    threads = [threading.Thread(target=run, args=(here,)) for here in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_hosts_reach_each_other_and_nobody_else_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = socket.create_connection

    def behind_a_stranger(address, **options):
        stranger = reach(address, **options)
        stranger.sendall(b"let me in please")
        return reach(address, **options)

    monkeypatch.setattr(duplex_module.socket, "create_connection", behind_a_stranger)
    ends = both(tmp_path, lambda meeting: connection(meeting, "127.0.0.1", True))
    assert all(isinstance(end, socket.socket) for end in ends)
    ends[0].sendall(b"word")
    assert ends[1].recv(4, socket.MSG_WAITALL) == b"word"
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("addresses", "willing", "reachable"),
    [
        ((None, "127.0.0.1"), (True, True), True),
        (("127.0.0.1", "127.0.0.1"), (True, False), True),
        (("127.0.0.1", "127.0.0.1"), (True, True), False),
        (("192.0.2.1", "127.0.0.1"), (True, True), True),
    ],
    ids=[
        "an address unknown",
        "one does not want to",
        "nobody answers",
        "an address that is not here",
    ],
)
def test_where_hosts_do_not_reach_each_other_both_know(
    addresses, willing, reachable, tmp_path, monkeypatch
) -> None:
    def refused(*_, **__):
        raise ConnectionRefusedError

    monkeypatch.setattr(duplex_module, "_PATIENCE", 0.2)
    if not reachable:
        monkeypatch.setattr(duplex_module.socket, "create_connection", refused)
    ends = both(
        tmp_path,
        lambda meeting: connection(meeting, addresses[meeting.rank], willing[meeting.rank]),
    )
    assert ends == [None, None]


def test_where_the_word_is_not_heard_both_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(server: socket.socket, word: bytes, key: bytes, patience: float) -> None:
        server.accept()[0].close()

    monkeypatch.setattr(duplex_module, "_accepted", deaf)
    assert both(tmp_path, lambda meeting: connection(meeting, "127.0.0.1", True)) == [None, None]


def test_hosts_with_the_same_key_reach_each_other(tmp_path: Path) -> None:
    ends = both(tmp_path, lambda meeting: connection(meeting, "127.0.0.1", True, b"a key"))
    ends[1].sendall(b"word")
    assert ends[0].recv(4, socket.MSG_WAITALL) == b"word"
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ((b"a key", b"another"), "rank [01] has not proved that it has DURE_KEY"),
        ((b"a key", None), "rank [01] has (a|no) key, unlike this one: set DURE_KEY"),
    ],
)
def test_who_reads_the_store_and_has_not_the_key_is_not_let_in(
    keys, reason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplex_module, "_PATIENCE", 0.3)

    def refused(meeting: GroupRendezvous) -> str:
        try:
            connection(meeting, "127.0.0.1", True, keys[meeting.rank])
        except PeerLostError as error:
            return str(error)
        return "let in"

    for said in both(tmp_path, refused):
        assert re.match(reason, str(said)), said


def test_silent_strangers_do_not_keep_the_other_host_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach, strangers = socket.create_connection, []

    def behind_strangers(address, **options):
        # One after another they would take more time than there is.
        strangers.extend(reach(address, **options) for _ in range(40))
        strangers[0].sendall(b"no proof at all, and of some length" * 3)
        return reach(address, **options)

    monkeypatch.setattr(duplex_module.socket, "create_connection", behind_strangers)
    ends = both(tmp_path, lambda meeting: connection(meeting, "127.0.0.1", True))
    assert all(isinstance(end, socket.socket) for end in ends)
    for end in [*ends, *strangers]:
        end.close()


def test_who_waits_when_its_own_end_is_closed_is_told_and_tensors_stay_as_they_are():
    with pair() as (here, there):
        tensor = torch.ones(300_000)
        exchange = here.begin(sum_of(300_000), tensor, tensor, tensor)
        here.close()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="lost"):
                exchange.wait(SOON)
        here.abandon()  # the number may be another file's by now
        late = torch.ones(300_000)
        with pytest.raises(RuntimeError, match="lost"):
            there.begin(sum_of(300_000), late, late, late).wait(SOON)
        assert tensor.eq(1).all()


def test_who_does_not_come_to_connect_is_named(tmp_path: Path) -> None:
    meeting = GroupRendezvous(dist.FileStore(str(tmp_path / "store"), 2), 0, (4, 7), 0.2)
    with pytest.raises(PeerLostError, match="rank 7 did not come within"):
        connection(meeting, "127.0.0.1", True)

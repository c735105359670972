"""Messages within a host: by source and tag, of any size, in both directions at once, whatever
their ranks do."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import Core, groups, on_both_cores, on_every, together

from dure.collectives.shared_memory import SharedMemoryGroup, empty_shared
from dure.errors import MismatchError, PeerLostError

LARGE = 1_000_000  # elements: many times what a channel or a pipe holds


def numbers(n: int, seed: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) * 3 + seed


def send(group: SharedMemoryGroup, tensor: torch.Tensor, to: int, tag: int = 0) -> Any:
    return group.send([tensor], to, tag)


def receive(
    group: SharedMemoryGroup, tensor: torch.Tensor, source: int, tag: int = 0
) -> torch.Tensor:
    group.recv([tensor], source, tag).wait()
    return tensor


def wait_for(posted: list[Any]) -> None:
    """Waits for what was posted and had not left at once."""
    for work in posted:
        if work is not None:
            work.wait()


@on_both_cores
@pytest.mark.parametrize("n", [10, LARGE])
def test_tags_are_taken_in_any_order_and_one_tag_in_its_own(core: Core, n: int) -> None:
    with groups(2, core) as (one, two):
        works = [
            send(one, numbers(n, 10 * tag + copy), 1, tag) for copy in range(2) for tag in (3, 1, 2)
        ]
        got = [(tag, receive(two, torch.empty(n), 0, tag)) for tag in (2, 3, 2, 1, 1, 3)]
        for work in works:
            work.wait()
    seen: dict[int, int] = {}
    for tag, tensor in got:
        assert torch.equal(tensor, numbers(n, 10 * tag + seen.get(tag, 0)))
        seen[tag] = seen.get(tag, 0) + 1


@on_both_cores
@pytest.mark.parametrize("n", [0, 1, LARGE])
def test_both_directions_at_once_and_oneself(core: Core, n: int) -> None:
    with groups(3, core) as ranks:

        def body(group: SharedMemoryGroup) -> None:
            works = [
                send(group, numbers(n, group.rank()), to) for to in range(3)
            ]  # oneself as well
            for source in (2, 0, 1):
                assert torch.equal(receive(group, torch.empty(n), source), numbers(n, source))
            for work in works:
                work.wait()

        on_every(ranks, body)


@on_both_cores
def test_two_that_both_send_large_messages_first_finish(core: Core) -> None:
    with groups(2, core) as ranks:

        def body(group: SharedMemoryGroup) -> None:
            other = 1 - group.rank()
            incoming = torch.empty(LARGE)
            work = group.recv([incoming], other)
            send(group, numbers(LARGE, group.rank()), other).wait()
            work.wait()
            assert torch.equal(incoming, numbers(LARGE, other))

        on_every(ranks, body)


@on_both_cores
def test_any_source_is_told_and_a_named_source_is_left_for_its_own_receive(core: Core) -> None:
    with groups(3, core) as (zero, one, two):
        works = [
            send(one, numbers(5, 1), 0, 7),
            send(two, numbers(5, 2), 0, 7),
            send(two, numbers(5, 3), 0, 8),
        ]
        assert torch.equal(receive(zero, torch.empty(5), 2, 8), numbers(5, 3))
        sources = []
        for _ in range(2):
            tensor = torch.empty(5)
            work = zero.recv_anysource([tensor], 7)
            work.wait()
            sources.append(work._source_rank())
            assert torch.equal(tensor, numbers(5, sources[-1]))
        assert sorted(sources) == [1, 2]
        for work in works:
            work.wait()


@on_both_cores
def test_a_message_to_oneself_is_found_by_any_source_before_and_after(core: Core) -> None:
    with groups(2, core) as (zero, _):
        early, late = torch.empty(3), torch.empty(3)
        first = zero.recv_anysource([early], 1)
        send(zero, numbers(3, 1), 0, 1).wait()
        send(zero, numbers(3, 2), 0, 1).wait()
        receive(zero, late, 0, 1)
        first.wait()
        assert torch.equal(early, numbers(3, 1))
        assert torch.equal(late, numbers(3, 2))


@on_both_cores
def test_what_was_sent_is_what_arrives_though_the_tensor_changes_afterwards(core: Core) -> None:
    with groups(2, core) as (one, two):
        tensor = numbers(10, 1)
        send(one, tensor, 1).wait()
        tensor.zero_()
        itself = numbers(10, 2)
        send(one, itself, 0)
        itself.zero_()
        assert torch.equal(receive(two, torch.empty(10), 0), numbers(10, 1))
        assert torch.equal(receive(one, torch.empty(10), 0), numbers(10, 2))


@on_both_cores
def test_what_is_posted_arrives_in_the_order_of_sends_and_is_done_where_it_has_left(
    core: Core,
) -> None:
    with groups(2, core) as (one, two):
        works: list[Any] = [one.transport.post(numbers(3, 1), 1)]
        assert works[0] is None  # all of it has left
        works += [
            one.transport.post(numbers(LARGE, 2), 1),
            one.transport.post(numbers(4, 3), 1),
            send(one, numbers(5, 4), 1),
        ]
        assert not works[1].is_completed()  # no channel holds it
        assert not works[2].is_completed()  # it does not overtake
        works.append(one.transport.post(numbers(6, 5), 0))
        for n, seed in ((3, 1), (LARGE, 2), (4, 3), (5, 4)):
            got = torch.empty(n)
            two.transport.expect(got, 0).wait()
            assert torch.equal(got, numbers(n, seed))
        assert torch.equal(receive(one, torch.empty(6), 0), numbers(6, 5))
        wait_for(works)


PLANS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 2),
        st.sampled_from([0, 1, 7, 4000, 70_000, 200_000]),
    ),
    max_size=25,
)
"""Source, destination, tag and elements of each message."""


@on_both_cores
@settings(max_examples=12)
@given(plan=PLANS, order=st.permutations(range(9)))
def test_many_interleaved_messages_all_find_their_receives(
    core: Core, plan: list[tuple[int, int, int, int]], order: list[int]
) -> None:
    """order: of sources and tags, in which they are asked for."""
    messages = list(enumerate(plan))

    def body(group: SharedMemoryGroup) -> None:
        works = [
            send(group, numbers(n, i), to, tag)
            for i, (source, to, tag, n) in messages
            if source == group.rank()
        ]
        mine = [message for message in messages if message[1][1] == group.rank()]
        wanted = sorted(mine, key=lambda message: order[3 * message[1][0] + message[1][2]])
        incoming = [torch.empty(n) for _, (_, _, _, n) in wanted]
        for tensor, (_, (source, _, tag, _)) in zip(incoming, wanted, strict=True):
            works.append(group.recv([tensor], source, tag))
        for work in works:
            work.wait()
        for tensor, (i, (_, _, _, n)) in zip(incoming, wanted, strict=True):
            assert torch.equal(tensor, numbers(n, i))

    with groups(3, core) as ranks:
        on_every(ranks, body)


@on_both_cores
@pytest.mark.parametrize("asked_first", [True, False], ids=["asked for first", "sent first"])
@pytest.mark.parametrize(
    ("sent", "room"),
    [
        (torch.ones(4), torch.empty(3)),
        (torch.ones(LARGE), torch.empty(3)),
        (torch.ones(3), torch.empty(LARGE)),
        (torch.ones(4), torch.empty(4, dtype=torch.int32)),
        (torch.ones(0), torch.empty(1)),
    ],
    ids=["shorter", "much shorter", "much longer", "another dtype", "nothing for something"],
)
def test_a_message_that_does_not_fit_is_told_and_later_ones_arrive(
    core: Core, asked_first: bool, sent: torch.Tensor, room: torch.Tensor
) -> None:
    with groups(2, core) as (one, two):
        if asked_first:
            receiving = two.recv([room], 0, 5)
            sending = send(one, sent, 1, 5)
        else:
            sending = send(one, sent, 1, 5)
            receiving = two.recv([room], 0, 5)
        with pytest.raises(MismatchError) as caught:
            receiving.wait()
        assert str(caught.value) == (
            f"the ranks disagree at a message: rank 0 called send of {sent.nbytes} bytes with tag "
            f"5; "
            f"rank 1 called recv of {room.nbytes} bytes of {str(room.dtype).removeprefix('torch.')}"
        )
        sending.wait()
        for tag in (5, 6):
            work = send(one, numbers(100, tag), 1, tag)
            assert torch.equal(receive(two, torch.empty(100), 0, tag), numbers(100, tag))
            work.wait()


@on_both_cores
def test_a_message_moves_while_its_sender_is_in_a_collective(core: Core) -> None:
    with groups(2, core) as ranks:

        def body(group: SharedMemoryGroup) -> None:
            total = torch.ones(10)
            if group.rank() == 0:
                work = send(group, numbers(LARGE, 0), 1)
                group.all_reduce(total)  # rank 1 comes when it has the message
                work.wait()
            else:
                assert torch.equal(receive(group, torch.empty(LARGE), 0), numbers(LARGE, 0))
                group.all_reduce(total)
            assert total.eq(2).all()

        on_every(ranks, body)


@on_both_cores
@pytest.mark.parametrize("busy", [0, 1], ids=["sender", "receiver"])
def test_a_message_moves_while_one_end_computes(core: Core, busy: int) -> None:
    with groups(2, core) as (one, two):
        arrived = threading.Event()
        incoming = torch.empty(LARGE)

        def end(rank: int) -> None:
            work = send(one, numbers(LARGE, 0), 1) if rank == 0 else two.recv([incoming], 0)
            if rank == busy:
                assert arrived.wait(20), "it moves only when its rank comes back"
            work.wait()
            arrived.set()

        together([lambda: end(0), lambda: end(1)])
        assert torch.equal(incoming, numbers(LARGE, 0))


@on_both_cores
def test_nobody_has_to_wait_for_a_message_to_arrive(core: Core) -> None:
    with groups(2, core) as (one, two):
        incoming = torch.empty(LARGE)
        receiving, sending = two.recv([incoming], 0), send(one, numbers(LARGE, 0), 1)
        until = time.monotonic() + 20
        while (
            not (receiving.is_completed() and sending.is_completed()) and time.monotonic() < until
        ):
            time.sleep(0.002)
        assert receiving.is_completed()
        assert torch.equal(incoming, numbers(LARGE, 0))


@on_both_cores
def test_tensors_with_gaps_and_shared_ones_travel(core: Core) -> None:
    with groups(2, core) as (one, two):
        holes, room = torch.zeros(100, 2), empty_shared(2, 100).zero_()
        holes[:, 1] = numbers(100, 1)
        work = send(one, holes[:, 1], 1)
        receive(two, room.t()[:, 0], 0)
        work.wait()
        assert torch.equal(room[0], numbers(100, 1))
        assert not room[1].any()


@on_both_cores
def test_waiting_for_a_message_can_be_limited_and_it_still_comes(core: Core) -> None:
    with groups(2, core) as (one, two):
        tensor = torch.empty(3)
        work = two.recv([tensor], 0)
        with pytest.raises(TimeoutError):
            work.wait(timedelta(seconds=0.05))
        send(one, numbers(3, 1), 1).wait()
        assert work.wait()
        assert torch.equal(tensor, numbers(3, 1))


@on_both_cores
def test_a_message_that_nobody_sends_ends_in_an_error_on_all_ranks(core: Core) -> None:
    with groups(3, core, seconds=0.5) as ranks:
        with pytest.raises(PeerLostError) as caught:
            receive(ranks[0], torch.empty(3), 2, 9)
        assert caught.value.ranks == (2,)
        assert "recv(from rank 2, tag 9)" in str(caught.value)
        assert "did not come within 0.5 s" in str(caught.value)
        for group in ranks:
            with pytest.raises(PeerLostError) as again:
                send(group, torch.ones(1), 1)
            assert str(again.value) == str(caught.value)


@on_both_cores
def test_what_a_rank_sent_before_it_left_still_arrives(core: Core) -> None:
    with groups(2, core) as (one, two):
        send(one, numbers(10, 1), 1).wait()
        one.shutdown()
        assert torch.equal(receive(two, torch.empty(10), 0), numbers(10, 1))
        with pytest.raises(PeerLostError, match="rank 0 left the group"):
            receive(two, torch.empty(10), 0)


SIZES = st.lists(st.sampled_from([0, 1, 7, 4000, 70_000, 200_000, LARGE]), min_size=1, max_size=15)


@on_both_cores
@settings(max_examples=12)
@given(sizes=SIZES, asked=st.lists(st.booleans(), min_size=15, max_size=15))
def test_what_is_fetched_is_the_next_message_whether_it_has_come_or_not(
    core: Core, sizes: list[int], asked: list[bool]
) -> None:
    """asked: which messages are received without `fetch`, as others may be between."""

    def body(group: SharedMemoryGroup) -> None:
        other = 1 - group.rank()
        works = [group.transport.post(numbers(n, i + other), other) for i, n in enumerate(sizes)]
        for i, n in enumerate(sizes):
            got = torch.empty(n)
            if asked[i]:
                receive(group, got, other)
            else:
                group.transport.fetch(got, other)
            assert torch.equal(got, numbers(n, i + group.rank()))
        wait_for(works)

    with groups(2, core) as ranks:
        on_every(ranks, body)


@on_both_cores
def test_fetching_finds_what_was_put_aside_what_comes_from_oneself_and_wakes_no_thread(
    core: Core,
) -> None:
    with groups(2, core) as (one, two):
        send(one, numbers(9, 1), 1, tag=4).wait()
        send(one, numbers(5, 2), 1).wait()
        two.transport.fetch(got := torch.empty(5), 0)  # the one before it is put aside
        assert torch.equal(got, numbers(5, 2))
        assert torch.equal(receive(two, torch.empty(9), 0, 4), numbers(9, 1))
        send(two, numbers(6, 3), 1)
        two.transport.fetch(got := torch.empty(6), 1)
        assert torch.equal(got, numbers(6, 3))
        complex_ones = torch.randn(4, dtype=torch.complex64)
        wait_for([one.transport.post(complex_ones, 1)])
        two.transport.fetch(twin := torch.empty(4, dtype=torch.complex64), 0)
        assert torch.equal(twin, complex_ones)

        wait_for([one.transport.post(numbers(3, 5), 1)])
        two.transport.fetch(holes := torch.zeros(3, 2).t()[0], 0)
        assert torch.equal(holes, numbers(3, 5))
        late = torch.empty(3)
        together(
            [
                lambda: two.transport.fetch(late, 0),
                lambda: (time.sleep(0.05), wait_for([one.transport.post(numbers(3, 4), 1)])),
            ]
        )
        assert torch.equal(late, numbers(3, 4))
        assert two._mailbox._thread is None


@on_both_cores
def test_fetching_what_does_not_fit_or_does_not_come_is_told(core: Core) -> None:
    with groups(2, core, seconds=0.5) as (one, two):
        send(one, torch.ones(4), 1).wait()
        with pytest.raises(
            MismatchError,
            match="rank 0 called send of 16 bytes with tag 0; rank 1 called recv of 12",
        ):
            two.transport.fetch(torch.empty(3), 0)
        send(one, numbers(2, 1), 1).wait()
        two.transport.fetch(got := torch.empty(2), 0)
        assert torch.equal(got, numbers(2, 1))
        with pytest.raises(PeerLostError, match=r"rank 0 did not come within 0\.5 s"):
            two.transport.fetch(got, 0)
        with pytest.raises(PeerLostError):
            two.transport.fetch(got, 0)


@on_both_cores
def test_what_a_rank_sent_before_it_left_is_fetched(core: Core) -> None:
    with groups(2, core) as (one, two):
        for seed in (1, 2):
            send(one, numbers(10, seed), 1).wait()
        one.shutdown()
        for seed in (1, 2):
            two.transport.fetch(got := torch.empty(10), 0)
            assert torch.equal(got, numbers(10, seed))
        with pytest.raises(PeerLostError, match="rank 0 left the group"):
            two.transport.fetch(got, 0)

"""Messages from one rank to another: in order, by tag, from anybody, and many at once."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from harness import DURE, Ranks, on_ranks, raises, same, values


@on_ranks(2, 3, 4)
def test_a_message_goes_round(ranks: Ranks) -> None:
    to, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for n in (1, 0, 1_000, 600_000):
        received = torch.zeros(n)
        if ranks.rank == 0:
            dist.send(values(0, n), group=ranks.group, group_dst=to)
            dist.recv(received, group=ranks.group, group_src=source)
        else:
            dist.recv(received, group=ranks.group, group_src=source)
            dist.send(received, group=ranks.group, group_dst=to)
        same(received, values(0, n), n)


@on_ranks(2, 3)
def test_messages_of_every_dtype(ranks: Ranks) -> None:
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
    ):
        if ranks.rank == 0:
            for to in range(1, ranks.size):
                dist.send(values(0, 3, 4, dtype=dtype, seed=to), group=ranks.group, group_dst=to)
        else:
            received = torch.zeros(3, 4, dtype=dtype)
            dist.recv(received, group=ranks.group, group_src=0)
            same(received, values(0, 3, 4, dtype=dtype, seed=ranks.rank), dtype)


@on_ranks(2, 3, backends=DURE)
def test_booleans_shorts_and_complex_numbers_travel(ranks: Ranks) -> None:
    for dtype in (torch.bool, torch.int16, torch.complex64, torch.complex128):
        if ranks.rank == 0:
            dist.send(values(0, 5, dtype=dtype), group=ranks.group, group_dst=1)
        elif ranks.rank == 1:
            received = torch.zeros(5, dtype=dtype)
            dist.recv(received, group=ranks.group, group_src=0)
            same(received, values(0, 5, dtype=dtype), dtype)


@on_ranks(2)
def test_messages_with_one_tag_arrive_in_order(ranks: Ranks) -> None:
    for number in range(200):
        if ranks.rank == 0:
            dist.send(torch.tensor([number]), group=ranks.group, group_dst=1)
        else:
            received = torch.tensor([-1])
            dist.recv(received, group=ranks.group, group_src=0)
            assert int(received) == number


@on_ranks(2)
def test_a_tag_picks_its_message(ranks: Ranks) -> None:
    if ranks.rank == 0:
        works = [
            dist.isend(torch.full((3,), float(tag)), group=ranks.group, group_dst=1, tag=tag)
            for tag in range(8)
        ]
        for work in works:
            work.wait()
    else:
        for tag in (5, 0, 7, 1, 6, 2, 4, 3):
            received = torch.zeros(3)
            dist.recv(received, group=ranks.group, group_src=0, tag=tag)
            same(received, torch.full((3,), float(tag)), tag)


@on_ranks(2)
def test_large_messages_are_picked_by_tag_too(ranks: Ranks) -> None:
    n = 700_000
    if ranks.rank == 0:
        parts = [torch.full((n,), float(tag)) for tag in range(3)]
        works = [
            dist.isend(part, group=ranks.group, group_dst=1, tag=tag)
            for tag, part in enumerate(parts)
        ]
        for work in works:
            work.wait()
    else:
        for tag in (2, 0, 1):
            received = torch.zeros(n)
            dist.recv(received, group=ranks.group, group_src=0, tag=tag)
            same(received, torch.full((n,), float(tag)), tag)


@on_ranks(2, 3, 4)
def test_receiving_from_anybody_tells_from_whom(ranks: Ranks) -> None:
    for round_ in range(5):
        if ranks.rank == 0:
            heard = []
            for _ in range(1, ranks.size):
                received = torch.zeros(2)
                source = dist.recv(received, group=ranks.group)
                same(received, torch.tensor([float(source), float(round_)]))
                heard.append(source)
            assert sorted(heard) == [ranks.world_rank(r) for r in range(1, ranks.size)]
        else:
            number = float(ranks.world_rank(ranks.rank))
            dist.send(torch.tensor([number, float(round_)]), group=ranks.group, group_dst=0)
        dist.barrier(ranks.group)


@on_ranks(2)
def test_receiving_tells_from_whom_where_it_is_known(ranks: Ranks) -> None:
    if ranks.rank == 0:
        dist.send(torch.ones(1), group=ranks.group, group_dst=1)
    else:
        assert dist.recv(torch.zeros(1), group=ranks.group, group_src=0) == ranks.world_rank(0)


@on_ranks(2, 3)
def test_receiving_from_anybody_by_tag(ranks: Ranks) -> None:
    if ranks.rank == ranks.size - 1:
        for tag in (2, 1):
            received = torch.zeros(1)
            source = dist.recv(received, group=ranks.group, tag=tag)
            assert source == ranks.world_rank(0)
            same(received, torch.tensor([float(tag)]))
    elif ranks.rank == 0:
        works = [
            dist.isend(
                torch.tensor([float(tag)]), group=ranks.group, group_dst=ranks.size - 1, tag=tag
            )
            for tag in (1, 2)
        ]
        for work in works:
            work.wait()


@on_ranks(2, 3, 4)
def test_all_send_to_all_at_once(ranks: Ranks) -> None:
    for n in (10, 300_000):
        others = [r for r in ranks.all if r != ranks.rank]
        received = {r: torch.zeros(n) for r in others}
        parts = {r: torch.full((n,), float(10 * ranks.rank + r)) for r in others}
        works: list[Any] = [dist.irecv(received[r], group=ranks.group, group_src=r) for r in others]
        works += [dist.isend(parts[r], group=ranks.group, group_dst=r) for r in others]
        for work in works:
            work.wait()
        for r in others:
            same(received[r], torch.full((n,), float(10 * r + ranks.rank)), (n, r))


@on_ranks(2)
def test_two_ranks_that_both_send_first_do_not_wait_for_ever(ranks: Ranks) -> None:
    for n in (1, 500_000):
        sending = dist.isend(
            torch.full((n,), float(ranks.rank)), group=ranks.group, group_dst=1 - ranks.rank
        )
        received = torch.zeros(n)
        dist.recv(received, group=ranks.group, group_src=1 - ranks.rank)
        sending.wait()
        same(received, torch.full((n,), float(1 - ranks.rank)), n)


@on_ranks(2, 3, 4)
def test_a_batch_of_sends_and_receives(ranks: Ranks) -> None:
    to, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    for n in (7, 400_000):
        received = [torch.zeros(n), torch.zeros(n)]
        batch = [
            dist.P2POp(dist.isend, values(ranks.rank, n), group=ranks.group, group_peer=to),
            dist.P2POp(dist.isend, values(ranks.rank, n, seed=1), group=ranks.group, group_peer=to),
            dist.P2POp(dist.irecv, received[0], group=ranks.group, group_peer=source),
            dist.P2POp(dist.irecv, received[1], group=ranks.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        same(received[0], values(source, n), n)
        same(received[1], values(source, n, seed=1), n)


@on_ranks(2)
def test_a_batch_may_list_receives_first_or_last(ranks: Ranks) -> None:
    received = torch.zeros(50)
    operations = [
        dist.P2POp(dist.irecv, received, group=ranks.group, group_peer=1 - ranks.rank),
        dist.P2POp(
            dist.isend, values(ranks.rank, 50), group=ranks.group, group_peer=1 - ranks.rank
        ),
    ]
    for work in dist.batch_isend_irecv(operations if ranks.rank else operations[::-1]):
        work.wait()
    same(received, values(1 - ranks.rank, 50))


@on_ranks(2, 3)
def test_messages_and_collectives_do_not_disturb_one_another(ranks: Ranks) -> None:
    received = torch.zeros(40)
    work = None
    if ranks.rank == 1:
        work = dist.irecv(received, group=ranks.group, group_src=0)
    for number in range(10):
        tensor = torch.full((100,), float(number))
        dist.all_reduce(tensor, group=ranks.group)
        same(tensor, torch.full((100,), float(number * ranks.size)), number)
        if number == 5 and ranks.rank == 0:
            work = dist.isend(values(0, 40), group=ranks.group, group_dst=1)
    if work is not None:
        work.wait()
    if ranks.rank == 1:
        same(received, values(0, 40))


@on_ranks(2, backends=DURE)
def test_messages_with_gaps(ranks: Ranks) -> None:
    whole = torch.zeros(6, 8)
    if ranks.rank == 0:
        whole[:, ::2] = values(0, 6, 4)
        dist.send(whole[:, ::2], group=ranks.group, group_dst=1)
    else:
        dist.recv(whole[:, ::2], group=ranks.group, group_src=0)
        same(whole[:, ::2], values(0, 6, 4))
        same(whole[:, 1::2], torch.zeros(6, 4), "between")


@on_ranks(2)
def test_what_was_sent_may_be_changed_after_send(ranks: Ranks) -> None:
    for n in (10, 400_000):
        if ranks.rank == 0:
            tensor = torch.ones(n)
            dist.send(tensor, group=ranks.group, group_dst=1)
            tensor.fill_(-1)
            dist.send(tensor, group=ranks.group, group_dst=1)
        else:
            for expected in (1.0, -1.0):
                received = torch.zeros(n)
                dist.recv(received, group=ranks.group, group_src=0)
                same(received, torch.full((n,), expected), n)


@on_ranks(2, 3)
def test_sending_to_oneself_is_refused(ranks: Ranks) -> None:
    with raises((ValueError, RuntimeError)):
        dist.send(torch.ones(1), group=ranks.group, group_dst=ranks.rank)


@on_ranks(2, backends=DURE)
def test_a_message_that_does_not_fit_is_an_error_where_it_is_received(ranks: Ranks) -> None:
    if ranks.rank == 0:
        with suppress(RuntimeError):  # the sender may have gone on before anybody looked
            dist.send(torch.ones(10), group=ranks.group, group_dst=1)
    else:
        with raises(RuntimeError):
            dist.recv(torch.zeros(4), group=ranks.group, group_src=0)


@on_ranks(2, backends=DURE)
def test_one_element_and_nothing_travel_with_any_stride(ranks: Ranks) -> None:
    for n in (1, 0):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            tensor = torch.zeros(n, 2, dtype=dtype)[..., 1]
            if ranks.rank == 0:
                dist.send(tensor.fill_(1), group=ranks.group, group_dst=1)
            else:
                dist.recv(tensor, group=ranks.group, group_src=0)
                same(tensor, torch.ones(n, dtype=dtype), (n, dtype))


@on_ranks(2)
def test_parameters_are_sent_and_received(ranks: Ranks) -> None:
    for n in (10, 300_000):
        parameter = torch.nn.Parameter(torch.full((n,), float(ranks.rank + 1)))
        if ranks.rank == 0:
            dist.send(parameter, group=ranks.group, group_dst=1)
        else:
            time.sleep(0.05)  # it has arrived before it is asked for
            dist.recv(parameter, group=ranks.group, group_src=0)
            same(parameter.detach(), torch.ones(n), n)

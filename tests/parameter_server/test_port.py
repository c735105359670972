"""Ports: those who know the token talk, and strangers hold up nobody."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared
from dure.contracts.world import RankContext as Surroundings
from dure.parameter_server.manager import first_layout
from dure.parameter_server.messages import Pull, Push, Values
from dure.parameter_server.optimizer import OptimizerRecipe
from dure.parameter_server.processes.endpoint import Disconnected, Endpoint
from dure.parameter_server.processes.frames import BufferRange
from dure.parameter_server.processes.handshake import NONCE, Caller, call
from dure.parameter_server.processes.memory import RankMemory, own_card
from dure.parameter_server.processes.messages import RunEnded
from dure.parameter_server.processes.serving import serve
from dure.parameter_server.server import ShardServer
from dure.parameter_server.shard import Terms

TOKEN = b"a token of this job"


class Listening(threading.Thread):
    """Has a port listen until it is closed; what it hears."""

    def __init__(
        self, endpoint: Endpoint, answer: Callable[[str, Any], Any] = lambda who, what: None
    ):
        super().__init__(daemon=True)
        self.port = endpoint
        self.answer = answer
        self.heard: list[Any] = []
        self.over = False

    def run(self) -> None:
        while not self.over:
            for sender, said in self.port.hear(0.01):
                self.heard.append((sender, said))
                answer = self.answer(sender, said)
                if answer is not None:
                    self.port.say(sender, answer)
        self.port.close()


@contextmanager
def two(
    answer: Callable[[str, Any], Any] = lambda who, what: None, token: bytes = TOKEN
) -> Iterator[tuple[Listening, Endpoint]]:
    """A server that listens in a thread, and a worker that has not called it yet."""
    server, worker = Endpoint("server 0", TOKEN, 1 << 24), Endpoint("worker 0", token, 1 << 24)
    cards = {port.name: own_card(port.name, port.address) for port in (server, worker)}
    server.meet(cards, [])
    listening = Listening(server, answer)
    listening.start()
    try:
        worker.meet(cards, ["server 0"])
        yield listening, worker
    finally:
        listening.over = True
        listening.join()
        worker.close()


def soon(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def heard(endpoint: Endpoint) -> Any:
    """The next that a port hears."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for _, said in endpoint.hear(0.1):
            return said
    raise AssertionError("nothing came")


def push(gradient: torch.Tensor) -> Push:
    return Push(0, 0, 0, 0, 0, 0, gradient, 1.0, 0)


def back(who: str, said: Any) -> Values | None:
    """Gives back the gradient of a push."""
    return Values(0, 0, 1, said.gradient, 0, 0, None, 0) if isinstance(said, Push) else None


@pytest.mark.parametrize("count", [3, 100_000, 3_000_000])
@pytest.mark.parametrize("shared", [False, True])
def test_tensors_arrive_whole_in_memory_that_is_shared_or_not(count: int, shared: bool) -> None:
    gradient = empty_shared(count) if shared else torch.empty(count)
    gradient.copy_(torch.arange(count))
    with two(back) as (listening, worker):
        for _ in range(2):
            worker.say("server 0", push(gradient))
        for _ in range(2):
            assert torch.equal(heard(worker).values, gradient)
        assert worker.sent == worker.received == 2 * gradient.nbytes
        # What lies in shared memory is not sent, but read there.
        gradient.add_(1)
        assert torch.equal(listening.heard[0][1].gradient, gradient) == shared


def test_an_answer_is_written_where_the_question_wants_it() -> None:
    room = empty_shared(5).zero_()

    def answer(who: str, said: Any) -> Values | None:
        if not isinstance(said, Pull) or said.into is None:
            return None
        return Values(0, 0, said.number, said.into.copy_(torch.arange(5.0)), 0, 0, None, 0)

    with two(answer) as (_, worker):
        worker.say("server 0", Pull(0, 0, 0, 0, 1, 0, 5, into=room))
        assert heard(worker).values.data_ptr() == room.data_ptr()
        assert room.tolist() == [0, 1, 2, 3, 4]


def test_what_is_said_together_arrives_in_order() -> None:
    with two() as (listening, worker):
        for number in range(100):
            worker.say("server 0", Pull(0, 0, 0, 0, number, 0, 5))
        worker.flush()
        soon(lambda: len(listening.heard) == 100)
        assert [said.number for _, said in listening.heard] == list(range(100))


def test_memory_that_was_seen_is_read_after_its_owner_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def died(*_: object) -> int:
        raise OSError("there is no such process")

    gradient = empty_shared(3).fill_(7)
    cards = {name: own_card(name, ("127.0.0.1", 1)) for name in ("worker 0", "server 0")}
    place = RankMemory("worker 0", cards).place_of(gradient)
    assert place is not None
    server, late = RankMemory("server 0", cards), RankMemory("server 0", cards)
    server.see(cards)
    monkeypatch.setattr("dure.parameter_server.processes.memory.open_of", died)
    found = server.look(place, torch.float32, 3)
    assert found is not None
    assert found.tolist() == [7, 7, 7]
    assert late.look(place, torch.float32, 3) is None


@given(st.integers(-(1 << 62), 1 << 62), st.integers(1, 1 << 62))
def test_only_what_is_in_the_memory_of_a_process_can_be_looked_at(offset: int, count: int) -> None:
    card = own_card("worker 0", ("127.0.0.1", 1))
    memory = RankMemory("worker 0", {"worker 0": card})
    found = memory.look(BufferRange("worker 0", offset), torch.float64, count)
    inside = offset >= 0 and offset + 8 * count <= card.nbytes and offset % 8 == 0
    assert (found is not None) == inside
    assert memory.look(BufferRange("worker 1", 0), torch.float64, 1) is None


def test_a_port_that_was_closed_can_be_woken() -> None:
    port = Endpoint("server 0", TOKEN, 1 << 16)
    port.wake()
    port.close()
    port.wake()


def strangers(address: tuple[str, int], said: Sequence[bytes]) -> list[socket.socket]:
    """Some that call, and say this."""
    found = []
    for words in said:
        stranger = socket.create_connection(address)
        stranger.sendall(words)
        found.append(stranger)
    return found


def test_strangers_hold_up_nobody() -> None:
    silent = [b""] * 70
    talking = [b"\xff" * 100, b"\x08\x00worker 0" + b"x" * 48, b"\x02", b"GET / HTTP/1.1\r\n\r\n"]
    server = Endpoint("server 0", TOKEN, 1 << 16)
    calling = strangers(server.address, [*silent, *talking])
    worker = Endpoint("worker 0", TOKEN, 1 << 16)
    cards = {port.name: own_card(port.name, port.address) for port in (server, worker)}
    server.meet(cards, [])
    listening = Listening(server)
    listening.start()
    worker.meet(cards, ["server 0"])
    assert worker.reaches("server 0")
    worker.say("server 0", push(torch.ones(3)))
    worker.flush()
    soon(lambda: bool(listening.heard))
    ((sender, said),) = listening.heard
    assert sender == "worker 0"
    assert said.gradient.tolist() == [1, 1, 1]
    listening.over = True
    listening.join()
    worker.close()
    for stranger in calling:
        stranger.close()


def test_one_who_does_not_know_the_token_is_not_let_in_and_lets_nobody_in() -> None:
    with two(token=b"of another job") as (listening, worker):
        assert not worker.reaches("server 0")
        assert not listening.port.reaches("worker 0")
        worker.say("server 0", push(torch.ones(3)))
        worker.flush()
    assert listening.heard == []


def test_one_who_sends_no_frame_is_gone_and_the_port_goes_on() -> None:
    with two(back) as (listening, worker):
        worker._lines["server 0"].socket.sendall(b"\xff" * 64)
        soon(lambda: bool(listening.heard))
        assert isinstance(listening.heard[0][1], Disconnected)
        assert isinstance(heard(worker), Disconnected)
        # It calls again when it has something to say.
        worker.say("server 0", push(torch.ones(3)))
        assert heard(worker).values.tolist() == [1, 1, 1]


def test_a_stranger_that_says_a_byte_now_and_then_does_not_hold_up_a_call() -> None:
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            there, _ = listener.accept()
            with there, contextlib.suppress(OSError):
                while len(said) < NONCE:
                    there.send(b"x")
                    said.append(b"x")
                    time.sleep(0.1)

        stranger = threading.Thread(target=drip)
        stranger.start()
        with pytest.raises(TimeoutError):
            call(listener.getsockname()[:2], "worker 0", "server 0", TOKEN, 0.3)
        assert len(said) < NONCE
        stranger.join()


def test_a_server_calls_the_one_again_whose_copies_it_has() -> None:
    """The other may not call it, and would wait for it without end."""
    start = nn.Parameter(torch.zeros(3))
    terms = Terms(OptimizerRecipe.of(torch.optim.SGD([start], lr=0.1), [[start]]))
    follower = ShardServer(1, first_layout([0], 2, [[0]], replicas=1), terms, beat=0.02)
    leader, owner = Endpoint("manager", TOKEN, 1 << 24), Endpoint("server 0", TOKEN, 1 << 24)
    copy = Endpoint("server 1", TOKEN, 1 << 10)
    cards = {port.name: own_card(port.name, port.address) for port in (leader, owner, copy)}
    leader.meet(cards, [])
    owner.meet(cards, [])

    def serves() -> None:
        copy.meet(cards, ["manager", "server 0"])
        serve(follower, copy, Surroundings(Group()))

    def gone() -> bool:
        list(leader.hear(0.001))
        return any(isinstance(said, Disconnected) for _, said in owner.hear(0.001))

    def reached() -> bool:
        gone()
        return owner.reaches("server 1") and leader.reaches("server 1")

    life = threading.Thread(target=serves)
    life.start()
    soon(reached)
    # A frame that is longer than any that is expected there: it hangs up.
    owner.say("server 1", push(torch.zeros(1 << 10)))
    soon(gone)
    soon(reached)
    leader.say("server 1", RunEnded(""))
    leader.close()
    life.join()
    copy.close()
    owner.close()


def name_of(caller: Caller) -> str:
    while (name := caller.hear(TOKEN, "server 0")) is None:
        time.sleep(0.001)
    return name


def test_a_caller_who_gave_up_before_it_had_its_answer_has_not_called() -> None:
    """The listener was slow: else it would take the end of this connection for the caller's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(call, address, "worker 0", "server 0", TOKEN, 0.3)
            there, _ = listener.accept()
            slow = Caller(there, time.monotonic() + 60)
            with pytest.raises(OSError, match="timed out"):
                calling.result()
            # All that it has said is there, and the answer is sent to nobody.
            with there, pytest.raises(ConnectionError):
                name_of(slow)
            calling = pool.submit(call, address, "worker 0", "server 0", TOKEN, 30)
            again, _ = listener.accept()
            caller = Caller(again, time.monotonic() + 60)
            assert name_of(caller) == "worker 0"
            with again, calling.result():
                pass

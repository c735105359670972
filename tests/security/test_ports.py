"""The ports of a parameter server: strangers are hung up on before they cost anything."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dure
from dure.errors import PeerLostError
from dure.parameter_server.messages import Pull
from dure.parameter_server.processes.endpoint import _MOST_CALLERS, Disconnected
from dure.parameter_server.processes.frames import HEAD, MOST_HEADER
from dure.parameter_server.processes.handshake import NONCE, call
from dure.parameter_server.processes.incoming import Incoming
from dure.parameter_server.processes.meeting import _check_keys
from dure.parameter_server.processes.memory import own_card
from dure.tensors.block_allocator import BlockAllocator
from small import small_task

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parameter_server"))
from listeners import GARBAGE
from test_port import TOKEN, soon, two

SECONDS = 20.0


@settings(max_examples=40)
@given(sent=st.lists(GARBAGE, min_size=1, max_size=5))
def test_whatever_strangers_say_is_no_connection_and_holds_up_nobody(sent: list[bytes]) -> None:
    with two() as (listening, worker):
        links = []
        for said in sent:
            link = socket.create_connection(listening.port.address, SECONDS)
            links.append(link)
            with suppress(ConnectionError):
                link.sendall(said)
        worker.say("server 0", Pull(0, 0, 0, 0, 7, 0, 5))
        worker.flush()
        soon(lambda: any(isinstance(said, Pull) for _, said in listening.heard))
        assert set(listening.port._lines) == {"worker 0"}
        assert len(listening.port._callers) <= _MOST_CALLERS
        for link in links:
            link.close()


def test_a_first_frame_of_900_mib_is_not_read() -> None:
    with two() as (listening, _):
        with socket.create_connection(listening.port.address, SECONDS) as link:
            taken = 0
            with suppress(ConnectionError):
                link.sendall(HEAD.pack(MOST_HEADER, 900 << 20))
                while taken < 64 << 20:
                    taken += link.send(bytes(1 << 16))
        # What the system's own buffers hold, and no more.
        assert taken < 32 << 20
        assert set(listening.port._lines) <= {"worker 0"}


def test_silent_strangers_are_hung_up_on_without_another_call() -> None:
    with (
        two() as (listening, _),
        socket.create_connection(listening.port.address, SECONDS) as link,
    ):
        assert len(link.recv(NONCE, socket.MSG_WAITALL)) == NONCE
        assert link.recv(1) == b""


def test_who_knows_the_token_has_the_name_of_a_process_of_the_job() -> None:
    with two() as (listening, worker):
        for name in ("worker 9", "anybody", "worker 0 heart heart"):
            link = call(listening.port.address, name, "server 0", TOKEN, SECONDS)
            link.settimeout(SECONDS)
            assert link.recv(1) == b""
            link.close()
        assert worker.reach("server 0")
        soon(lambda: "worker 0" in listening.port._lines)


@given(header=st.integers(0, (1 << 32) - 1), data=st.integers(0, (1 << 63) - 1))
def test_a_frame_is_never_longer_than_the_layout_needs(header: int, data: int) -> None:
    most = 1 << 20
    incoming = Incoming(most, BlockAllocator())
    room = incoming.room()
    room[: HEAD.size] = HEAD.pack(header, data)
    if header > MOST_HEADER or data > most:
        with pytest.raises(ValueError, match="longer than any"):
            incoming.came(HEAD.size)
    else:
        incoming.came(HEAD.size)


def test_a_peer_that_sends_what_is_no_message_is_gone_by_name() -> None:
    with two() as (listening, _):
        link = call(listening.port.address, "worker 0", "server 0", TOKEN, SECONDS)
        link.sendall(HEAD.pack(0, 1 << 40))
        soon(lambda: any(isinstance(said, Disconnected) for _, said in listening.heard))
        assert "longer than any" in next(
            said.reason for _, said in listening.heard if isinstance(said, Disconnected)
        )
        link.close()


def test_a_job_with_a_key_trains_and_its_ports_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DURE_KEY", "a secret of this job")
    run = dure.train(
        small_task(),
        dure.ParameterServer(servers=1, workers=1, batch_size=8),
        dure.Processes(3),
        stop=dure.Stop(rounds=2),
        out=tmp_path / "run",
    )
    assert run.summary["steps"] == 2


@pytest.mark.parametrize(
    ("own", "theirs", "said"),
    [("a", "b", "another DURE_KEY"), ("a", "", "no key"), ("", "b", "a key")],
)
def test_hosts_with_other_keys_are_named(own: str, theirs: str, said: str) -> None:
    cards = {name: own_card(name, ("", 0), key) for name, key in (("m", own), ("s", theirs))}
    with pytest.raises(PeerLostError, match=f"rank 1 has {said}"):
        _check_keys(cards, own)
    _check_keys({"m": cards["m"]}, own)

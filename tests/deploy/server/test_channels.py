"""Channels of clients: who gets one, what comes out of it in which order, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from dure.deploy.client.channel import RunEndedError
from dure.deploy.client.link import RefusedError
from dure.deploy.server.channels import MOST_WAITING, NetworkChannels
from dure.protocol.channels import ClientConnected, ClientDisconnected, ClientFrame
from dure.wire.signatures import Key, Signer
from served_channels import SECONDS, client, events, opened, served_channels


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """(channels, url, access, port)"""
    with served_channels(tmp_path) as found:
        yield found


def test_frames_go_both_ways_whole_and_in_order(served: Any) -> None:
    served.channels.allow(4_000_000)
    with opened(served, client(served)) as channel:
        channel.allow(4_000_000)
        channel.say([b"hello"])
        # The server accepts long frames after the first message.
        assert events(served, 1) == [ClientConnected(0, b"hello")]
        frames = [b"", b"one", bytes(3_000_000)]
        for frame in frames:
            channel.say([frame[:1], memoryview(frame)[1:]])
        assert events(served, 3) == [ClientFrame(0, frame) for frame in frames]
        for frame in frames:
            served.channels.say(0, [frame])
        assert [bytes(channel.next(SECONDS)) for _ in frames] == frames


def test_who_has_signed_nothing_or_no_place_gets_no_channel(served: Any) -> None:
    address = served.url.replace("http", "ws")
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{address}/v1/channel")
    assert refused.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        connect(f"{address}/v1/other")
    assert refused.value.response.status_code == 401
    with pytest.raises(RefusedError, match="check in first"):
        opened(served, Signer(Key.make()))
    assert served.channels.next(0.05) is None


def test_a_client_that_comes_again_has_one_channel(served: Any) -> None:
    signer = client(served)
    with opened(served, signer) as first, opened(served, signer) as second:
        first.say([b"1"])
        assert events(served, 1) == [ClientConnected(0, b"1")]
        second.say([b"2"])
        gone, came = events(served, 2)
        assert (gone.client, came) == (0, ClientConnected(0, b"2"))
        assert isinstance(gone, ClientDisconnected)
        with pytest.raises(RefusedError, match="another process of this client"):
            first.next(SECONDS)
        served.channels.say(0, [b"for the second"])
        assert second.next(SECONDS) == b"for the second"


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        (lambda channels: channels.reject(0, "not so"), RefusedError),
        (lambda channels: channels.over("all is done"), RunEndedError),
    ],
)
def test_a_client_hears_why_its_channel_ends(
    served: Any, ends: Callable[[NetworkChannels], None], error: type[Exception]
) -> None:
    with opened(served, client(served)) as channel:
        channel.say([b"hello"])
        events(served, 1)
        # What was said before still arrives.
        served.channels.say(0, [b"last"])
        ends(served.channels)
        assert channel.next(SECONDS) == b"last"
        with pytest.raises(error, match=r"not so|all is done"):
            channel.next(SECONDS)
    (gone,) = events(served, 1)
    assert gone.why in ("not so", "all is done")


def test_whoever_comes_when_all_is_over_hears_so(served: Any) -> None:
    served.channels.over("all is done")
    with (
        opened(served, client(served)) as channel,
        pytest.raises(RunEndedError, match="all is done"),
    ):
        channel.next(SECONDS)


def test_a_client_that_does_not_wait_for_answers_is_read_no_further(served: Any) -> None:
    with opened(served, client(served)) as channel:
        channel.say([b"hello"])
        for _ in range(4 * MOST_WAITING):
            channel.say([b"x"])
        time.sleep(0.3)
        # Those that wait to be dealt with, and one that is looked at.
        assert served.channels._channels[0].waiting <= MOST_WAITING + 1
        assert len(events(served, 1 + 4 * MOST_WAITING)) == 1 + 4 * MOST_WAITING


def test_text_is_no_frame(served: Any) -> None:
    with opened(served, client(served)) as channel:
        channel.say([b"hello"])
        assert events(served, 1) == [ClientConnected(0, b"hello")]
        channel._socket._protocol.send_text(b"words")
        channel._socket._write()
        assert events(served, 1) == [
            ClientDisconnected(0, "messages have to be bytes, but this one is text")
        ]
        with pytest.raises(RefusedError, match="this one is text"):
            channel.next(SECONDS)

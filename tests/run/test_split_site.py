"""What a client of split learning says of an error in its own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dure.deploy.client.split_site import take_part
from dure.errors import StateError, WorkerFailedError
from dure.split.blame import InvalidMessageError
from dure.split.network.control import ClientFailed
from dure.split.network.frames import decode
from small import small_task


class Session:
    """A session whose channels keep what is said on them."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    @contextmanager
    def channel(self) -> Iterator[Any]:
        yield SimpleNamespace(say=lambda frame, kind, at_once: self.said.append(b"".join(frame)))

    def patiently(self, call: Callable[[], Any]) -> Any:
        return call()


def takes_part(error: BaseException, session: Session) -> None:
    def talks(channel: Any) -> None:
        raise error

    site = SimpleNamespace(
        talks=talks, at="round 3", hello=ClientFailed("hello"), device=torch.device("cpu")
    )
    take_part(
        small_task(),
        None,
        SimpleNamespace(client=1, machine=SimpleNamespace(threads=1)),  # type: ignore[arg-type]
        session,  # type: ignore[arg-type]
        SimpleNamespace(folder=None, temporary=True),  # type: ignore[arg-type]
        name="",
        part=None,
        share_errors=False,
        known=None,
        event=lambda what, about: None,
        make=lambda *_: site,
    )


@pytest.mark.parametrize("error", [KeyError("no such patient"), SystemExit(7)])
def test_it_names_the_client_and_the_round_and_the_server_hears_what_it_may(
    error: BaseException,
) -> None:
    session = Session()
    with pytest.raises(WorkerFailedError) as caught:
        takes_part(error, session)
    said = f"client 1 failed in round 3: {type(error).__name__}: {error}"
    assert str(caught.value) == said
    told = decode(session.said[-1])
    assert isinstance(told, ClientFailed)
    assert told.reason.startswith(type(error).__name__)
    assert "patient" not in told.reason


@pytest.mark.parametrize("error", [StateError("is damaged"), InvalidMessageError("not asked for")])
def test_what_dure_finds_itself_stays_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        takes_part(error, Session())

"""A client that a test plays itself: it says what the test wants it to say."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from dure.deploy.client.session import Session
from dure.deploy.client.state import ClientState
from dure.run.client_training import ClientTraining
from dure.wire.requests import CheckIn, Train, UpdateOutcome, UploadRequest, Welcome
from dure.wire.tensors import digest_of, forms_of, size_of
from small import small_task


class Scripted:
    """Checks in at once, as client `number`, with 5 examples unless `said` says otherwise."""

    def __init__(self, url: str, number: int, **said: Any) -> None:
        self.state = ClientState(None)
        self.session = Session(
            url, context=None, state=self.state, audit=None, stop=threading.Event()
        )
        training = ClientTraining(small_task(), f"player {number}", number)
        about = {"version": 1, "name": training.name, "examples": 5, "wants": number}
        self.welcome: Welcome = self.session.check_in(CheckIn(**{**about, **said}))
        self.outcomes: list[UpdateOutcome] = []
        self._confirmed: list[int] = []

    def __enter__(self) -> Scripted:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.close()
        self.state.close()

    def work(self, seconds: float = 30.0) -> Train:
        """The next assignment; outcomes before it are kept."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            word = self.session.next(self._confirmed)
            self.outcomes += word.outcomes
            self._confirmed = [one.ticket for one in word.outcomes]
            if word.train is not None:
                return word.train
            assert word.over is None, word.over
        raise AssertionError("nothing to do")

    def hears_the_end(self) -> None:
        """Waits until the run is over: the server then waits for nobody."""
        while self.session.next([]).over is None:
            pass

    def update(self, train: Train, **changed: Any) -> tuple[UploadRequest, dict[str, torch.Tensor]]:
        """A small step. changed: what the reservation says otherwise."""
        model = self.session.fetch(train.round, train.tensors, train.bytes)
        tensors = {name: torch.full_like(one, 0.01) for name, one in model.items()}
        return self.reserve(train, tensors, **changed), tensors

    def reserve(
        self, train: Train, tensors: Mapping[str, torch.Tensor], **changed: Any
    ) -> UploadRequest:
        said = {
            "ticket": train.ticket,
            "bytes": size_of(forms_of(tensors)),
            "digest": digest_of(tensors),
            "examples": 5,
            "samples": 5,
            "loss": 1.0,
        }
        return UploadRequest(**{**said, **changed})

    def send(self, reserve: UploadRequest, tensors: Mapping[str, torch.Tensor]) -> bool:
        return self.session.send(reserve, tensors, lambda: True)

    def answer(self, train: Train) -> None:
        """Sends a good update."""
        assert self.send(*self.update(train))

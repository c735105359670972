"""A client with a training loop of its own, in any framework whose weights are named arrays.

    with dure.Client(url, examples=len(data)) as client:
        for work in client:
            work.load(model)
            ...                         # train
            work.send(model, loss=loss)

The server serves a model of torch whose tensors have the same names and shapes; what trains them
here is the caller's business. Arrays may be numpy's, torch's or anything that numpy reads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dure.errors import PolicyError
from dure.run.site import Reach, opened, path_of, privacy_of
from dure.wire.layout import is_extra
from dure.wire.requests import VERSION, CheckIn, Failed, Reserve, Train, Welcome
from dure.wire.tensors import digest_of, forms_of, size_of
from dure.worlds.network.client.link import RefusedError, StoppedError


class Client:
    """One client of the federation at `url`: iterating over it gives what there is to train.

    examples: how many it trains on; updates weigh by them. name, state, part, token, authority,
    certificate, approve, give_up, owner, insecure: as in `dure.join`. What policy.toml in `state`
    says holds here too, but for how long the loop trains, which is its own business.

    Raises dure.errors.DureError for a server that does not take this client, or a run that the
    site does not take part in: one that asks clients to mask, clip or noise what they send too,
    which is `dure.join`'s to do.
    """

    def __init__(
        self,
        url: str,
        *,
        examples: int,
        name: str = "",
        state: str | Path | None = None,
        part: int | None = None,
        token: str = "",
        authority: str | Path | None = None,
        certificate: str | Path | None = None,
        approve: bool = False,
        give_up: float | None = 24.0,
        owner: str = "",
        insecure: bool = False,
    ) -> None:
        if examples < 1:
            raise ValueError(f"examples is {examples}, but a client trains on at least one")
        self.examples = examples
        self.over: str | None = None
        """Why the run is over, once it is."""
        self._part = part
        self._stop = threading.Event()
        self._ending = ExitStack()
        files = path_of(authority), path_of(certificate)
        reach = Reach(
            name, path_of(state), part, token, *files, give_up, owner=owner, insecure=insecure
        )
        self._name = name
        try:
            self._site = self._ending.enter_context(opened(url, reach, self._stop))
            self.session = self._site.session
            self._site.policy.hold()
            # First a look: whoever declines takes nobody's place.
            welcome = self._look()
            _check_protects_nothing(welcome)
            self._site.agree(welcome, approve)
            self.welcome = self._check_in()
            self._site.enter(self.welcome)
        except BaseException:
            self._ending.close()
            raise

    def _look(self) -> Welcome:
        """What is served; nobody is there yet."""
        said = CheckIn(version=VERSION, name=self._name, examples=0, wants=self._part, looks=True)
        return self._site.look(said)

    def _check_in(self) -> Welcome:
        said = CheckIn(version=VERSION, name=self._name, examples=self.examples, wants=self._part)
        return self.session.check_in(said)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves; another process may have the folder now."""
        self._stop.set()
        self._ending.close()

    def __iter__(self) -> Iterator[Work]:
        """What there is to train, one after another, until the run is over."""
        confirmed: list[int] = []
        while True:
            # Outside its hours the site does not call.
            if self._stop.wait(self._site.closed()):
                return
            try:
                word = self.session.next(confirmed)
            except StoppedError:
                return
            except RefusedError as refused:
                if refused.status != 409:
                    raise
                self._check_in()
                continue
            confirmed = [outcome.ticket for outcome in word.outcomes]
            if word.over is not None:
                self.over = word.over
                return
            if word.train is not None:
                yield from self._works(word.train)

    def _works(self, train: Train) -> Iterator[Work]:
        """One assignment. While the caller trains, the server knows that it is there."""
        with self.session.working(train.ticket) as wanted:
            work = self._work(train, wanted)
            if work is None:
                return
            yield work
            if not work.sent and wanted():
                self.session.failed(Failed(train.ticket, "NothingSent"))

    def _work(self, train: Train, wanted: Callable[[], bool]) -> Work | None:
        try:
            tensors = self.session.fetch(train.round, train.tensors, train.bytes)
        # The server has a newer one by now.
        except RefusedError as refused:
            if refused.status != 410:
                raise
            return None
        return Work(self, train, tensors, wanted)


def _check_protects_nothing(welcome: Welcome) -> None:
    """Raises PolicyError for a run whose clients have to protect what they send."""
    privacy = privacy_of(welcome)
    by_clients = privacy.user is not None and privacy.user.where != "server"
    if welcome.holds or privacy.secure or privacy.example or by_clients:
        raise PolicyError(
            f"the run asks its clients for {privacy}, and a training loop of its own would send "
            f"bare updates: take part with dure join"
        )


class Work:
    """One assignment: train from these weights.

    round: of the global model, from 0. tensors: by name, as they came. wanted: tells whether an
    update would still count. sent: whether one was sent.
    """

    def __init__(
        self,
        client: Client,
        train: Train,
        tensors: Mapping[str, Tensor],
        wanted: Callable[[], bool],
    ) -> None:
        self._client = client
        self._train = train
        self._began = time.perf_counter()
        self.wanted = wanted
        self.sent = False
        self.round = train.round
        self.tensors = {n: t for n, t in tensors.items() if not is_extra(n)}

    @property
    def arrays(self) -> dict[str, numpy.ndarray[Any, Any]]:
        """The tensors as numpy's arrays, in memory of their own."""
        return {name: tensor.numpy().copy() for name, tensor in self.tensors.items()}

    def load(self, model: Any) -> None:
        """Puts the weights into a module of torch, or into the arrays of a mapping by name.

        Raises ValueError where one of the names is missing there, or has another shape.
        """
        there = _named(model)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if name not in there:
                    raise ValueError(f"the model has no {name!r}, which the server trains")
                shape = list(there[name].shape)
                if shape != list(tensor.shape):
                    raise ValueError(f"{name} is {shape}, and {list(tensor.shape)} is wanted")
                if isinstance(there[name], Tensor):
                    there[name].copy_(tensor)
                else:
                    there[name][...] = tensor.numpy()

    def send(
        self,
        model: Any,
        *,
        examples: int | None = None,
        loss: float = 0.0,
        samples: int | None = None,
        steps: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Sends how the weights moved; whether the server has it.

        The server weighs updates by their examples, and refuses more samples than it asked for.

        model: a module of torch, or a mapping of arrays by name. examples: on which it trained, at
        most those that were said. loss: mean over them. samples: processed, local epochs counted.
        steps: of the optimizer; by default as many as the strategy asks for. metrics: numbers for
        the report. False where the update is not wanted any more.

        Raises ValueError for tensors of other names or shapes, or that are not finite, for more
        examples than the client has, and for more steps than samples; RefusedError where the server
        takes no such update.
        """
        own = self._client.examples
        count = own if examples is None else examples
        if not 1 <= count <= own:
            raise ValueError(f"examples is {count}, but this client has said that it has {own}")
        processed = count if samples is None else samples
        if steps is not None and not 1 <= steps <= processed:
            raise ValueError(
                f"steps is {steps}, and a step has at least one of the {processed} samples"
            )
        moved = self._moved(_named(model))
        if not math.isfinite(loss):
            raise ValueError(f"loss is {loss}, but it is a finite number")
        reserve = Reserve(
            ticket=self._train.ticket,
            bytes=size_of(forms_of(moved)),
            digest=digest_of(moved),
            examples=count,
            samples=processed,
            loss=loss,
            seconds=time.perf_counter() - self._began,
            metrics=dict(metrics or {}),
            steps=steps or 0,
        )
        try:
            sent = self._client.session.send(reserve, moved, self.wanted)
        except RefusedError as refused:
            # The round ended while it was on its way.
            if refused.status != 410:
                raise
            sent = False
        self.sent = True
        return sent

    def _moved(self, there: Mapping[str, Any]) -> dict[str, Tensor]:
        """What travels: the changes of weights, and buffers as they are now."""
        buffers = set(self._client.welcome.trains.buffers)
        moved = {}
        for name, before in self.tensors.items():
            if name not in there:
                raise ValueError(f"the model has no {name!r}, which the server trains")
            now = torch.as_tensor(there[name]).detach().to(before.dtype)
            if now.shape != before.shape:
                raise ValueError(f"{name} is {list(now.shape)}, and {list(before.shape)} is wanted")
            moved[name] = now.clone() if name in buffers else now - before
            if not moved[name].isfinite().all():
                raise ValueError(f"{name} is not finite: the training has diverged")
        return moved


def _named(model: Any) -> Mapping[str, Any]:
    if isinstance(model, nn.Module):
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if isinstance(model, Mapping):
        return model
    raise ValueError(
        f"a {type(model).__name__} has no named arrays: give a torch.nn.Module, or a mapping"
    )

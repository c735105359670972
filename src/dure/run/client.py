"""A client with a custom training loop, in any framework whose weights are named arrays.

    with dure.Client(url, examples=len(data)) as client:
        for work in client:
            work.load(model)
            ...                         # train
            work.send(model, loss=loss)

The server serves a torch model whose tensors have the same names and shapes; the caller chooses how
to train them. Arrays may be numpy's, torch's or anything that numpy reads.
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

from dure.deploy.client.link import RefusedError, StoppedError
from dure.deploy.client.site import ConnectionOptions, opened, path_of, privacy_of
from dure.errors import PolicyError
from dure.wire.layout import is_extra
from dure.wire.requests import VERSION, CheckIn, Train, TrainingFailure, UploadRequest, Welcome
from dure.wire.tensors import digest_of, forms_of, size_of


class Client:
    """A client of the federation at `url`: iterating yields its assignments.

    policy.toml in `state` applies here too, except for its limits on training time, since the loop
    is the caller's.

    Args:
        url: address of the server.
        examples: number of training examples, which weigh the client's updates.
        name: as in `dure.join`.
        state: as in `dure.join`.
        part: as in `dure.join`.
        token: as in `dure.join`.
        authority: as in `dure.join`.
        certificate: as in `dure.join`.
        approve: as in `dure.join`.
        give_up: as in `dure.join`.
        owner: as in `dure.join`.
        insecure: as in `dure.join`.

    Raises:
        dure.errors.DureError: if the server refuses this client, if the site's policy refuses the
            run, or if the run asks clients to mask, clip or noise their updates, which only
            `dure.join` does.
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
            raise ValueError(f"examples is {examples}, but a client needs at least 1")
        self.examples = examples
        self.over: str | None = None
        """Reason for the end of the run, once it has ended; None before."""
        self._part = part
        self._stop = threading.Event()
        self._ending = ExitStack()
        files = path_of(authority), path_of(certificate)
        reach = ConnectionOptions(
            name, path_of(state), part, token, *files, give_up, owner=owner, insecure=insecure
        )
        self._name = name
        try:
            self._site = self._ending.enter_context(opened(url, reach, self._stop))
            self.session = self._site.session
            self._site.policy.hold()
            # A look takes no place, so that a client that declines leaves the place to others.
            welcome = self._look()
            _check_protects_nothing(welcome)
            self._site.agree(welcome, approve)
            self.welcome = self._check_in()
            self._site.enter(self.welcome)
        except BaseException:
            self._ending.close()
            raise

    def _look(self) -> Welcome:
        """Return the description of the served run, without taking a place."""
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
        """Leave the federation, and release the state folder for other processes."""
        self._stop.set()
        self._ending.close()

    def __iter__(self) -> Iterator[ClientAssignment]:
        """Yield the assignments in order, until the run ends."""
        confirmed: list[int] = []
        while True:
            # Outside of its hours the site sends no requests.
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

    def _works(self, train: Train) -> Iterator[ClientAssignment]:
        """Yield the assignment, and send heartbeats to the server while the caller trains."""
        with self.session.working(train.ticket) as wanted:
            work = self._work(train, wanted)
            if work is None:
                return
            yield work
            if not work.sent and wanted():
                self.session.failed(TrainingFailure(train.ticket, "NothingSent"))

    def _work(self, train: Train, wanted: Callable[[], bool]) -> ClientAssignment | None:
        try:
            tensors = self.session.fetch(train.round, train.tensors, train.bytes)
        # 410: the server has a newer model by now.
        except RefusedError as refused:
            if refused.status != 410:
                raise
            return None
        return ClientAssignment(self, train, tensors, wanted)


def _check_protects_nothing(welcome: Welcome) -> None:
    """Raise PolicyError if the run requires clients to protect their updates."""
    privacy = privacy_of(welcome)
    by_clients = privacy.user is not None and privacy.user.where != "server"
    if welcome.holds or privacy.secure or privacy.example or by_clients:
        raise PolicyError(
            f"the run requires {privacy} of its clients, and a custom training loop would send "
            "unprotected updates: use dure join"
        )


class ClientAssignment:
    """An assignment: train from these weights, and send the update.

    round: of the global model, from 0. tensors: received weights by name. wanted: function that
    returns whether an update would still count. sent: whether an update was sent.
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
        """Copies of the tensors as numpy arrays."""
        return {name: tensor.numpy().copy() for name, tensor in self.tensors.items()}

    def load(self, model: Any) -> None:
        """Copy the weights into a torch module, or into the arrays of a mapping by name.

        Raises ValueError if a name is missing in `model`, or its array has another shape.
        """
        there = _named(model)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if name not in there:
                    raise ValueError(f"the model does not have {name!r}, which the server trains")
                shape = list(there[name].shape)
                if shape != list(tensor.shape):
                    raise ValueError(
                        f"{name} has the shape {shape}, but the model needs {list(tensor.shape)}"
                    )
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
        """Send the changes of the weights; return whether the server accepted the update.

        The server weighs updates by their examples, and refuses more samples than it requested.

        Args:
            model: a torch module, or a mapping of arrays by name.
            examples: examples trained on, at most those of the client; None means all of them.
            loss: mean loss over the examples.
            samples: processed samples, with local epochs counted; by default `examples`.
            steps: steps of the optimizer; by default the number that the strategy requests.
            metrics: numbers for the report.

        Returns:
            False if the server no longer needs the update.

        Raises:
            ValueError: for tensors with other names or shapes or values that are not finite, for
                more examples than the client has, and for more steps than samples.
            RefusedError: if the server refuses the update.
        """
        own = self._client.examples
        count = own if examples is None else examples
        if not 1 <= count <= own:
            raise ValueError(
                f"examples is {count}, but this client has reported {own} to the server"
            )
        processed = count if samples is None else samples
        if steps is not None and not 1 <= steps <= processed:
            raise ValueError(
                f"steps is {steps}, but each step needs at least one of the {processed} samples"
            )
        moved = self._moved(_named(model))
        if not math.isfinite(loss):
            raise ValueError(f"loss is {loss}, but it has to be a finite number")
        reserve = UploadRequest(
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
            # 410: the round ended during the upload.
            if refused.status != 410:
                raise
            sent = False
        self.sent = True
        return sent

    def _moved(self, there: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the update: the changes of weights, and the buffers unchanged."""
        buffers = set(self._client.welcome.trains.buffers)
        moved = {}
        for name, before in self.tensors.items():
            if name not in there:
                raise ValueError(f"the model does not have {name!r}, which the server trains")
            now = torch.as_tensor(there[name]).detach().to(before.dtype)
            if now.shape != before.shape:
                raise ValueError(
                    f"{name} has the shape {list(now.shape)}, but the server needs "
                    f"{list(before.shape)}"
                )
            moved[name] = now.clone() if name in buffers else now - before
            if not moved[name].isfinite().all():
                raise ValueError(
                    f"{name} contains values that are not finite: the training has diverged"
                )
        return moved


_WRAPPERS = ("_FabricModule", "DistributedDataParallel")
"""Classes of modules around the user's module, which they have as `module`."""


def _named(model: Any) -> Mapping[str, Any]:
    # Wrappers of Lightning Fabric and of torch name the tensors otherwise.
    if isinstance(model, nn.Module) and type(model).__name__ in _WRAPPERS:
        model = model.module
    if isinstance(model, nn.Module):
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if isinstance(model, Mapping):
        return model
    raise ValueError(
        f"a {type(model).__name__} has no named arrays: give a torch.nn.Module, or a mapping"
    )

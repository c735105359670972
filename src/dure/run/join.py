"""A client of a federation on a network: this machine's examples, trained for a server elsewhere.

The server says by which strategy, with which seed and as which of how many clients; the task is
this site's own, and no code travels. What is trained is what a simulated client of the same number
and examples would train, by the same draws.
"""

from __future__ import annotations

import copy
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.contracts.strategy import examples_for, seeded_model
from dure.contracts.task import Task
from dure.errors import PolicyError
from dure.federated.client.clients import Clients
from dure.federated.strategy import Federated
from dure.fleet.conditions import Conditions, EngineName
from dure.machine.compiler import left_out
from dure.machine.threads import threads
from dure.protocol.messages import Assignment, Measure, Settled, Update, nbytes
from dure.run.registry import decode_strategy
from dure.tasks.trained import machine_of, trains_of
from dure.tensors.flat import trained_of
from dure.tensors.frozen import frozen_of, load_frozen
from dure.wire.layout import Layout
from dure.wire.requests import (
    VERSION,
    CheckIn,
    Machine,
    MeasuredThis,
    MeasureThis,
    Outcome,
    Reserve,
    Train,
    Trains,
    Welcome,
)
from dure.wire.tensors import digest_of, forms_of, size_of
from dure.worlds.network.client.audit import Audit
from dure.worlds.network.client.link import StoppedError
from dure.worlds.network.client.loop import Answered, Loop
from dure.worlds.network.client.policy import Policy
from dure.worlds.network.client.session import Session
from dure.worlds.network.client.state import ClientState

ENGINE: EngineName = "loop"
"""How clients on a network train."""

Progress = Callable[[str, Mapping[str, object]], None]


def _ignore(what: str, about: Mapping[str, object]) -> None:
    pass


def join(
    url: str,
    task: Task,
    *,
    name: str = "",
    state: str | Path | None = None,
    part: int | None = None,
    token: str = "",
    authority: str | Path | None = None,
    certificate: str | Path | None = None,
    approve: bool = False,
    stop: threading.Event | None = None,
    on_progress: Progress = _ignore,
) -> str:
    """Takes part in the federation that the server at `url` serves, until its run is over.

    task: what is learned, with this site's own examples. part: for demonstrations, takes the place
    of simulated client `part`: of the task's examples only those that the strategy's partition
    gives it. name: how the client is called; by default its host. state: the folder of what it
    keeps; a client that has one can be killed and started again. token: of an invitation, needed
    once. authority: PEM file of who signed the server's certificate; the system's by default.
    certificate: PEM file of this client's own, where the server wants one. approve: agrees to the
    run that is served, where policy.toml asks. stop: ends it when it is set. on_progress: hears of
    what happens, such as ("training", {"round": 3}).

    Returns why the run is over. Raises dure.errors.DureError for a server that does not take this
    client, and ValueError for a task that cannot be trained.
    """
    folder = Path(state) if state is not None else None
    policy = Policy() if folder is None else Policy.beside(folder)
    with ExitStack() as ending:
        kept = ending.enter_context(ClientState(folder))
        audit = None
        if folder is not None:
            audit = Audit(folder / "audit.jsonl")
            ending.callback(audit.close)
        session = Session(
            url,
            context=context_for(url, authority, certificate),
            state=kept,
            audit=audit,
            stop=stop or threading.Event(),
            tell=lambda text: on_progress("waiting", {"why": text}),
            moved=lambda count: on_progress("moved", {"bytes": count}),
            bytes_per_second=policy.bandwidth,
        )
        ending.callback(session.close)
        if token and kept.about is None:
            session.enrol(token, name, part)
        site = Training(task, name, part, policy.share_errors)
        policy.hold()
        welcome = session.check_in(site.look())
        if approve:
            kept.approve(welcome.run)
        agree(policy, welcome, kept)
        welcome = session.check_in(site.enter())
        session.belongs(welcome, name)
        site.begin(welcome, None if kept.temporary else kept.memory())
        site.take_frozen(session, welcome)
        with threads(site.threads), left_out():
            return Loop(session, site, on_progress, partial(closed, policy)).run()


def closed(policy: Policy) -> float:
    """Seconds until the site works again; 0 while it does."""
    return policy.seconds_until_open(datetime.now().astimezone())


def agree(policy: Policy, welcome: Welcome, kept: ClientState) -> None:
    """Raises PolicyError where the site does not take part in what is served."""
    reasons = policy.check(welcome)
    if policy.asks and not kept.approved(welcome.run):
        system = welcome.strategy.get("name")
        reasons.append(
            f"run {welcome.run} ({system}, {welcome.clients} clients) is not approved: look at it, "
            f"and join once with --approve"
        )
    if reasons:
        raise PolicyError(f"this site does not take part: {'; '.join(reasons)}")


def stopped() -> type[Exception]:
    """What `join` raises when it was stopped."""
    return StoppedError


def check(
    url: str,
    task: Task,
    *,
    name: str = "",
    state: str | Path | None = None,
    part: int | None = None,
    token: str = "",
    authority: str | Path | None = None,
    certificate: str | Path | None = None,
) -> Iterator[str]:
    """Tries what `join` would need, and says in lines what it found and what would be sent.

    Network, certificate and identity by a check-in that only looks; disk by a file of the size of
    what is kept; one batch by training on it. Nothing of the data leaves. Raises what `join` does.
    """
    folder = Path(state) if state is not None else None
    policy = Policy() if folder is None else Policy.beside(folder)
    with ExitStack() as ending:
        kept = ending.enter_context(ClientState(folder))
        context = context_for(url, authority, certificate)
        session = Session(url, context=context, state=kept, audit=None, stop=threading.Event())
        ending.callback(session.close)
        if token and kept.about is None:
            session.enrol(token, name, part)
        site = Training(task, name, part)
        welcome = session.check_in(site.look())
        yield f"network: {url} answers, run {welcome.run}" + ("" if context else ", without TLS")
        who = "a place is free" if welcome.client < 0 else f"client {welcome.client}"
        yield f"identity: {who}, of {welcome.clients}"
        reasons = policy.check(welcome)
        yield f"policy: {'; '.join(reasons) or 'this run is allowed'}"
        site.begin(welcome, None)
        sent = site.would_send()
        free = shutil.disk_usage(kept.folder).free
        yield f"disk: {free:,} bytes are free, and {8 * sent:,} are needed at most"
        with left_out():
            seconds = site.one_step()
        yield f"training: one step took {seconds:.3f} s on {site.examples:,} examples"
        yield (
            f"would be sent: {sent:,} bytes an update, with the number of examples, samples and "
            f"the mean loss" + (", and metrics on held-out data" if site.held_out else "")
        )


def context_for(
    url: str, authority: str | Path | None, certificate: str | Path | None
) -> ssl.SSLContext | None:
    """For TLS with the server; None over plain HTTP."""
    if not url.startswith("https:"):
        return None
    # Here: not every client needs these libraries.
    from dure.wire.certificates import client_context

    own = None
    if certificate is not None:
        own = Path(certificate), Path(certificate).with_suffix(".key")
    return client_context(Path(authority) if authority is not None else None, own)


@dataclass
class Training:
    """A task of dure's, trained as one client of a federated strategy.

    part: the simulated client whose examples it takes; None: all of the task's are its own.
    """

    task: Task
    name: str
    part: int | None = None
    share_errors: bool = False
    folder: Path | None = None
    examples: int = 0
    held_out: int = 0
    threads: int = 1
    _began: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wants = self.part
        self.model: nn.Module = seeded_model(self.task, 0)

    def look(self) -> CheckIn:
        """A check-in that only looks at what is served."""
        return replace(self.enter(), looks=True)

    def enter(self) -> CheckIn:
        """A check-in that takes a place, and is not there yet."""
        return CheckIn(
            version=VERSION, name=self.name, examples=0, wants=self.wants, trains=self.trains()
        )

    def trains(self) -> Trains | None:
        return trains_of(self.task, self.model)

    def machine(self) -> Machine | None:
        return machine_of(ENGINE, self.threads)

    def begin(self, welcome: Welcome, memory: Sequence[Tensor] | None) -> None:
        strategy = decode_strategy(welcome.strategy)
        if not isinstance(strategy, Federated):
            raise ValueError(f"{strategy.name} is no federated system")
        # Who only looks has no number yet.
        self.client = welcome.client if welcome.client >= 0 else self.part or 0
        self.threads = welcome.machine.threads
        self.model = seeded_model(self.task, welcome.seed)
        self.clients: Clients = strategy.one_client(
            self.task,
            self.model,
            Conditions(engine=ENGINE),
            welcome.seed,
            self.client,
            welcome.clients,
            divides=self.part is not None,
        )
        self.layout: Layout = strategy.layout(self.task, self.model, welcome.clients)
        self.examples = self.clients.sizes[self.client]
        measured = self.client in self.clients.personal.clients
        self.held_out = self.clients.personal.count(self.client) if measured else 0
        self.remember(memory)

    def take_frozen(self, session: Session, welcome: Welcome) -> None:
        """The server's frozen weights in place of one's own, where these differ.

        Weights that were drawn under the same seed may differ between processors.
        """
        served = welcome.trains.frozen
        own = frozen_of(self.model)
        if served is None or served == digest_of(own):
            return
        size = welcome.trains.frozen_bytes
        tensors = session.fetch_frozen(served, size, forms_of(own))
        load_frozen(self.model, tensors)

    def would_send(self) -> int:
        """Bytes of an update, but for what an algorithm sends besides."""
        return sum(one.nbytes for one in [*trained_of(self.model), *self.model.buffers()])

    def one_step(self) -> float:
        """Trains on one batch, and forgets it; how many seconds that took."""
        model = copy.deepcopy(self.model)
        optimizer = self.task.optimizer(trained_of(model))
        own = self.clients.parts[self.client][: self.clients.local.batch(self.examples)]
        inputs, targets = examples_for(model, self.task)[0].batch(own)
        started = time.perf_counter()
        loss = self.task.loss(model(inputs), targets)
        torch.autograd.backward(loss[0] if isinstance(loss, tuple) else loss)
        optimizer.step()
        return time.perf_counter() - started

    def train(self, train: Train, tensors: Mapping[str, Tensor]) -> Answered:
        weights, buffers, extra = self.layout.apart(tensors)
        assignment = Assignment(
            ticket=train.ticket,
            client=self.client,
            round=train.round,
            turn=train.turn,
            weights=weights,
            buffers=buffers,
            nbytes=nbytes(weights) + nbytes(buffers) + nbytes(extra),
            extra=extra,
        )
        started = time.perf_counter()
        update = self.clients.receive(assignment)
        assert isinstance(update, Update)
        seconds = time.perf_counter() - started
        named: dict[str, Tensor] = {}
        if update.failure is None:
            named = self.layout.named(update.delta, update.buffers, update.extra)
        reserve = Reserve(
            ticket=train.ticket,
            bytes=size_of(forms_of(named)) if named else 0,
            digest=digest_of(named) if named else "",
            examples=update.examples,
            samples=update.samples,
            loss=update.loss,
            counted=update.counted,
            failure=update.failure,
            seconds=seconds,
        )
        return Answered(reserve, named, self.clients.keeps(train.ticket))

    def measure(self, measure: MeasureThis, tensors: Mapping[str, Tensor]) -> MeasuredThis:
        weights, buffers, _ = self.layout.apart(tensors)
        with torch.no_grad():
            measured = self.clients.measure(Measure(measure.round, weights, buffers, 0.0))
        failure = measured.failures.get(self.client, "")
        if self.client not in measured.clients:
            return MeasuredThis(measure.round, failure=failure)
        place = list(measured.clients).index(self.client)
        return MeasuredThis(
            round=measure.round,
            values={name: each[place] for name, each in measured.values.items()},
            examples={name: each[place] for name, each in measured.examples.items()},
            sums={name: list(each[place]) for name, each in measured.sums.items()},
            forms=dict(measured.forms),
            failure=failure,
        )

    def settle(self, outcome: Outcome) -> None:
        tickets = [outcome.ticket]
        self.clients.settle(Settled(tickets, []) if outcome.kept else Settled([], tickets))

    def remember(self, memory: Sequence[Tensor] | None) -> None:
        if memory is not None:
            self.clients.memories[self.client] = list(memory)

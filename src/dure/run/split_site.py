"""A client of split learning on a network: what `dure.join` does where the run is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from dure.collectives.group import Group
from dure.contracts.strategy import examples_for, seeded_model
from dure.contracts.task import Task
from dure.data.batches import Batches
from dure.data.examples import Examples
from dure.data.own_part import OwnPart, divide
from dure.machine.compiler import left_out
from dure.machine.memory import memory_kept
from dure.machine.threads import threads
from dure.split.compressed import exchange_of
from dure.split.cutting import Cut
from dure.split.halves import Halves
from dure.split.leakage.randomised_response import relabelled
from dure.split.network.control import Failed, Hello
from dure.split.network.forward import Forward
from dure.split.network.frames import encode
from dure.split.network.site import Identity, Site
from dure.split.strategy import Split
from dure.tasks.batch_norm import needs_two
from dure.tasks.loss_shares import CountedLoss
from dure.wire import requests
from dure.wire.boxes import BoxKey
from dure.wire.requests import Welcome
from dure.wire.roster import Pinned, read_identities
from dure.wire.tensors import digest_of
from dure.worlds.network.client.channel import OverError
from dure.worlds.network.client.failure import what_is_told
from dure.worlds.network.client.link import RefusedError, StoppedError
from dure.worlds.network.client.session import Session
from dure.worlds.network.client.state import ClientState

Progress = Callable[[str, Mapping[str, object]], None]


def take_part(
    task: Task,
    strategy: Split,
    welcome: Welcome,
    session: Session,
    kept: ClientState,
    *,
    name: str,
    part: int | None,
    share_errors: bool,
    identities: Path | None,
    event: Progress,
) -> str:
    """Trains until the run is over; why it is. Raises as `dure.join` does."""
    known = None if identities is None else read_identities(identities)
    site = _site(task, strategy, welcome, session, kept, name, part, known, event)
    with threads(welcome.machine.threads), left_out(), memory_kept():
        while True:
            channel = session.patiently(session.channel)
            try:
                with channel:
                    event("joined", {"client": welcome.client})
                    site.talks(channel)
            except OverError as over:
                # Whoever steals it later reads nothing of this run with it.
                if not kept.temporary:
                    (kept.folder / _box_of(welcome.run)).unlink(missing_ok=True)
                return str(over)
            except OSError as error:
                event("waiting", {"why": str(error)})
                session.rest()
            except (RefusedError, StoppedError):
                raise
            except Exception as error:
                # The server hears of it at once, and need not wait for this client.
                with suppress(Exception), session.channel() as other:
                    told = what_is_told(0, error, share_errors, kept.folder)
                    other.say(encode(site.hello))
                    other.say(encode(Failed(_in_words(told))))
                raise


def _site(
    task: Task,
    strategy: Split,
    welcome: Welcome,
    session: Session,
    kept: ClientState,
    name: str,
    part: int | None,
    known: Mapping[int, str] | None,
    event: Progress,
) -> Site:
    plan = strategy.of(task).plan
    model = seeded_model(task, welcome.seed).train()
    train, test = examples_for(model, task)
    own = own_part(strategy, welcome, train, part, needs_two(model, train))
    batch = min(own.batches.batch_size, len(own.indices))
    seen = relabelled(plan.defence, train, welcome.seed)
    divided = Cut(task, model, plan.at, batch, welcome.seed, CountedLoss(task.loss, seen))
    cut = divided.cut
    head = divided.heads.own()
    machine = Halves(divided, plan, seen, welcome.seed).client(welcome.client, head, own)
    key = session.key
    folder = None if kept.temporary else kept.folder
    box = BoxKey.make() if folder is None else BoxKey.kept_in(folder / _box_of(welcome.run))
    known_as = name or f"client {welcome.client}"
    member = box.member(key, welcome.client, known_as, welcome.run)
    pinned = Pinned.kept_in(kept.folder, welcome.run)
    hello = Hello(
        examples=len(own.indices),
        member=msgspec.json.encode(member),
        digest=digest_of({f"{n}": one for n, one in enumerate(head.weights)}),
    )
    return Site(
        task,
        machine,
        Identity(key, box, member, welcome.run, pinned, known),
        model,
        Forward(cut, plan.compression),
        exchange_of(plan.compression, cut),
        test,
        hello,
        Group(),
        folder,
        lambda what, about: event(what, about),
    )


def check_part(task: Task, strategy: Split, welcome: Welcome, part: int | None) -> Iterator[str]:
    """Tries one batch up to the cut, and says in lines what would be sent."""
    model = seeded_model(task, welcome.seed).train()
    train, _ = examples_for(model, task)
    # Who only looks has no number yet.
    seen = replace(welcome, client=max(welcome.client, part or 0, 0))
    own = own_part(strategy, seen, train, part, needs_two(model, train))
    plan = strategy.of(task).plan
    batch = min(own.batches.batch_size, len(own.indices))
    with left_out():
        divided = Cut(task, model, plan.at, batch, welcome.seed, CountedLoss(task.loss, train))
        halves = Halves(divided, plan, train, welcome.seed)
        machine = halves.client(seen.client, divided.heads.own(), own)
        began = time.perf_counter()
        machine.party.forward(0, 0, machine.read(0)[1], [])
        seconds = time.perf_counter() - began
    values, gradients = divided.message_bytes(plan.compression)[0]
    yield f"training: the head took {seconds:.3f} s for a batch of {batch}"
    labels = "labels stay here" if plan.rules.labels_stay else "its labels go with it"
    yield (
        f"would be sent: {values:,} bytes a batch of what the head makes of it, and {gradients:,} "
        f"come back; {labels}"
    )


def _box_of(run: str) -> str:
    """In the state folder: the key for which other clients of the run seal their heads."""
    return f"box-{run}.pem"


def own_part(
    strategy: Split, welcome: Welcome, train: Examples, part: int | None, joins: bool
) -> OwnPart:
    """What a client trains on: all that it has, or its part of it in a demonstration."""
    size = strategy.batch_size
    if part is not None:
        parts = divide(strategy.partition, welcome.clients, train, size, welcome.seed, joins)
        return parts[welcome.client]
    everything: Tensor = torch.arange(len(train))
    batches = Batches(len(train), size, welcome.seed, welcome.client, joins)
    return OwnPart(everything, batches, everything[:0])


def _in_words(told: requests.Failed) -> str:
    """What a server is told of an error."""
    place = f" at {told.file}:{told.line}" if told.file else ""
    return f"{told.kind}{place}{': ' if told.message else ''}{told.message}"

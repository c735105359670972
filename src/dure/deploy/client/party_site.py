"""A party of vertical split learning on a network: `dure.join` for a `VerticalSplit` run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec
import torch

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.data.examples import reader_on
from dure.deploy.client import split_site
from dure.deploy.client.session import Session
from dure.deploy.client.split_site import Progress
from dure.deploy.client.state import ClientState
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import device_of_model, synchronize
from dure.split.network.control import Hello
from dure.split.network.parties_site import PartySite
from dure.split.network.site import Identity, SiteLimits
from dure.split.parties.model import select
from dure.split.vertical import VerticalSplit
from dure.tasks.modes import in_mode
from dure.wire.boxes import BoxKey
from dure.wire.requests import Welcome
from dure.wire.roster import PinnedRoster
from dure.wire.tensors import digest_of


def _site(
    task: Task,
    strategy: VerticalSplit,
    welcome: Welcome,
    session: Session,
    kept: ClientState,
    name: str,
    part: int | None,
    known: Mapping[int, str] | None,
    event: Progress,
    limits: SiteLimits,
    device: torch.device | None,
) -> PartySite:
    run = welcome.run
    folder = None if kept.temporary else kept.folder
    site = _party(task, strategy, welcome, welcome.client, kept, event, device)
    box = (
        BoxKey.make() if folder is None else BoxKey.load_or_create(folder / split_site.box_of(run))
    )
    member = box.member(session.key, welcome.client, name or f"client {welcome.client}", run)
    pinned = PinnedRoster.load(kept.folder, run)
    hello = Hello(
        examples=len(site.known),
        member=msgspec.json.encode(member),
        digest=digest_of(dict(site.part.module.named_parameters())),
    )
    site.takes(hello, Identity(session.key, box, member, run, pinned, known), limits)
    return site


def _party(
    task: Task,
    strategy: VerticalSplit,
    welcome: Welcome,
    number: int,
    kept: ClientState,
    event: Progress,
    device: torch.device | None,
) -> PartySite:
    """Return the site of the party with this number among the joined parties.

    The number decides which columns the party owns.
    """
    seed = welcome.seed
    folder = None if kept.temporary else kept.folder
    # Building an optimizer would load the compiler, which takes seconds.
    with deferred_compiler():
        model = split_site.site_model(task, seed, device, strategy.defence)
        device = device or device_of_model(model)
        train, test = examples_for(task)
        return PartySite(
            task.on(device),
            model,
            train,
            test,
            strategy.plan,
            number,
            seed,
            folder,
            welcome.run,
            event,
            device,
        )


take_part = partial(split_site.take_part, make=_site)
"""`dure.deploy.client.split_site.take_part` for a `VerticalSplit`."""


def check_part(
    task: Task,
    strategy: VerticalSplit,
    welcome: Welcome,
    kept: ClientState,
    part: int | None,
    device: torch.device | None = None,
) -> Iterator[str]:
    """Try one batch of the head and yield lines that describe the data to be sent."""
    # A dry run has no number yet.
    number = max(welcome.client, part or 0, 0)
    site = _party(task, strategy, welcome, number, kept, lambda what, about: None, device)
    size = strategy.batch_size or len(site.known)
    inputs, _ = reader_on(site.train, site.device)(site.known[:size])
    with deferred_compiler(), torch.no_grad(), in_mode(site.part.module, training=False):
        began = time.perf_counter()
        values = site.part.module(select(inputs, site.columns))
        synchronize(site.device)
        seconds = time.perf_counter() - began
    columns = ", ".join(map(str, site.columns))
    yield f"training: the head of {site.name} took {seconds:.3f} s for a batch of {len(values)}"
    yield (
        f"this party would send: {values.nbytes:,} bytes per batch, the head's activations for "
        f"the columns {columns}, and receive gradients of the same size; columns and weights stay "
        "here"
    )

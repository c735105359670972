"""A client of split learning on a network: `dure.join` for a `Split` run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypedDict

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from dure.collectives.compression import Compression
from dure.collectives.group import Group
from dure.contracts.fresh_model import examples_for, seeded_model
from dure.contracts.task import Task
from dure.data.batches import Batches
from dure.data.client_part import ClientExamples, divide
from dure.data.examples import Examples, reader_on
from dure.deploy.client.channel import RunEndedError
from dure.deploy.client.failure import failure_report
from dure.deploy.client.link import RefusedError, StoppedError
from dure.deploy.client.session import Session
from dure.deploy.client.state import ClientState
from dure.errors import DureError, WorkerFailedError, described, traceback_of
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import as_current, device_of_model, synchronize
from dure.machine.memory import keep_freed_memory
from dure.machine.threads import threads
from dure.split.batching import values_at
from dure.split.blame import InvalidMessageError
from dure.split.builders import SplitBuilder, guard_of
from dure.split.client import SplitClient
from dure.split.compressed import CompressedNode, exchange_of
from dure.split.cutting import TracedDividedModel
from dure.split.leakage.defence import Defence
from dure.split.leakage.guard import CutValue
from dure.split.leakage.randomised_response import relabelled
from dure.split.network import sizes
from dure.split.network.control import ClientFailed, Hello, RosterMembers
from dure.split.network.cut_model import CutClientPart, check_arriving
from dure.split.network.frames import SplitFrameError, encode
from dure.split.network.incoming import CheckedClient
from dure.split.network.incoming import CutValueChecks as Crossed
from dure.split.network.outgoing import say
from dure.split.network.separate_parts import SeparateClientPart
from dure.split.network.site import UNLIMITED, Identity, SiteClient, SiteLimits, SplitSite
from dure.split.placement import model_on, needs_doubles
from dure.split.plan import SplitPlan
from dure.split.separate_models.form import OutputForm, decoded, encoded
from dure.split.separate_models.sides import ClientPart
from dure.split.sides import SideRunner
from dure.split.strategy import Split
from dure.tasks.batch_norm import needs_two
from dure.tasks.loss_shares import CountedLoss
from dure.tasks.parts import HeadTask, ModelParts
from dure.wire import requests
from dure.wire.boxes import BoxKey
from dure.wire.requests import Welcome
from dure.wire.roster import PinnedRoster
from dure.wire.tensors import digest_of

Progress = Callable[[str, Mapping[str, object]], None]


def take_part(
    task: Task,
    strategy: Any,
    welcome: Welcome,
    session: Session,
    kept: ClientState,
    *,
    name: str,
    part: int | None,
    share_errors: bool,
    known: Mapping[int, str] | None,
    event: Progress,
    limits: SiteLimits = UNLIMITED,
    device: torch.device | None = None,
    make: Callable[..., Any] | None = None,
) -> str:
    """Train until the run ends, and return the reason. Raises the errors of `dure.join`.

    Args:
        task: the client's task.
        strategy: strategy of the run.
        welcome: description of the run.
        session: session with the server.
        kept: state folder of the client.
        name: name of the client; may be empty.
        part: simulated client of a demonstration, else None.
        share_errors: whether the server gets the text of an error.
        known: public keys or fingerprints of the other clients, by number; None if unknown.
        event: receives progress.
        limits: limits that the site imposes on its server.
        device: device on which the client computes; None for the device of the task's model.
        make: function that makes the site; None for that of `Split`.
    """
    makes = make or _site
    site = makes(task, strategy, welcome, session, kept, name, part, known, event, limits, device)
    with (
        threads(welcome.machine.threads),
        deferred_compiler(),
        keep_freed_memory(),
        as_current(site.device),
    ):
        while True:
            channel = session.patiently(session.channel)
            try:
                with channel:
                    event("joined", {"client": welcome.client})
                    site.talks(channel)
            except RunEndedError as over:
                # The box key is deleted: a later thief cannot open this run's heads with it.
                site.export()
                if not kept.temporary:
                    (kept.folder / box_of(welcome.run)).unlink(missing_ok=True)
                return str(over)
            except OSError as error:
                event("waiting", {"why": str(error)})
                session.rest()
            except (RefusedError, StoppedError):
                raise
            except (Exception, SystemExit) as error:
                # Report the failure at once, so that the server need not wait for this client.
                with suppress(Exception), session.channel() as other:
                    told = failure_report(0, error, share_errors, kept.folder)
                    failed = ClientFailed(_in_words(told))
                    say(other, site.hello, encode(site.hello))
                    say(other, failed, encode(failed))
                # Wrong messages of the server are no errors of this site's own code.
                if isinstance(error, DureError | SplitFrameError | InvalidMessageError):
                    raise
                who = f"client {welcome.client}"
                reason = described(error)
                raise WorkerFailedError(who, site.at, reason, traceback_of(error)) from error


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
    limits: SiteLimits,
    device: torch.device | None,
) -> SplitSite:
    plan = strategy.of(task).plan
    model = site_model(task, welcome.seed, device, plan.defence)
    device = device or device_of_model(model)
    task = task.on(device)
    train, test = examples_for(task)
    key = session.key
    # Not the run's seed: the server knows it, and could subtract the same noise and label flips.
    secret = key.seed(f"defences of {welcome.run}")
    seen = relabelled(plan.defence, train, secret)
    folder = None if kept.temporary else kept.folder
    box = BoxKey.make() if folder is None else BoxKey.load_or_create(folder / box_of(welcome.run))
    known_as = name or f"client {welcome.client}"
    member = box.member(key, welcome.client, known_as, welcome.run)
    pinned = PinnedRoster.load(kept.folder, welcome.run)
    # The number of examples does not depend on the treatment of the last batch, so False will do.
    own = own_part(strategy, welcome, train, part, False)
    batch = min(own.batches.batch_size, len(own.indices))
    losses = CountedLoss(task.loss, seen)
    side: _CutSide | _HeadSide
    if isinstance(task, HeadTask):
        assert isinstance(model, ModelParts)
        part_of = ClientPart(task, model, train, batch, welcome.seed)
        side = _HeadSide(part_of, losses, secret, device)
    else:
        cut = TracedDividedModel(task, model, plan.at, batch, welcome.seed, losses)
        side = _CutSide(cut, plan.compression, secret, device)
    hello = Hello(
        examples=len(own.indices),
        member=msgspec.json.encode(member),
        digest=digest_of({name: one.detach() for name, one in model.named_parameters()}),
        joins=needs_two(model.only("head") if isinstance(model, ModelParts) else model, train),
        head=sizes.model_bytes(
            model.only("head", "end") if isinstance(model, ModelParts) else model
        ),
        tests=0 if test is None else len(test),
        **side.forms(plan.rules.labels_stay),
    )

    def makes(told: RosterMembers) -> SiteClient:
        mine = own_part(strategy, welcome, train, part, told.joins)
        return side.working(told, plan, seen, mine, welcome, limits)

    return SplitSite(
        task,
        Identity(key, box, member, welcome.run, pinned, known),
        makes,
        model,
        test,
        hello,
        Group(),
        folder,
        event,
        limits,
        device,
    )


def site_model(task: Task, seed: int, device: torch.device | None, defence: Defence) -> nn.Module:
    """Return the run's new model on a device; None leaves it where the task makes it.

    Raises ValueError for a device without a dtype that the site needs.
    """
    model = seeded_model(task, seed)
    where = device or device_of_model(model)
    return model_on(model, where, needs_doubles(defence, averages=False))


class CutForms(TypedDict, total=False):
    """JSON descriptions of the values that cross the cut: fields of `Hello`."""

    form: bytes
    targets: bytes


class _CutSide:
    """A client that has the whole model, and trains its part."""

    def __init__(
        self,
        divided: TracedDividedModel,
        compression: Compression,
        secret: int,
        device: torch.device,
    ) -> None:
        self._divided = divided
        self._device = device
        self._compression = compression
        self._secret = secret

    def forms(self, labels_stay: bool) -> CutForms:
        """Return {}: the server has traced the model itself and knows the values at the cut."""
        return {}

    def working(
        self,
        told: RosterMembers,
        plan: SplitPlan,
        train: Examples,
        own: ClientExamples,
        welcome: Welcome,
        limits: SiteLimits,
    ) -> SiteClient:
        if told.form:
            raise ValueError(
                "the server holds the tail of the model: join with the task of the head"
            )
        divided = self._divided
        heads = divided.heads
        makes = SplitBuilder(divided, plan, train, welcome.seed, self._secret, self._device)
        machine = makes.client(welcome.client, heads.own(), own)
        exchange = exchange_of(plan.compression, divided.cut)
        crossing = sizes.crossing_of_cut(divided.cut, _most_examples(divided.task, own))
        leaving = [one.differentiable for one in values_at(divided.cut, 0, divided.cut.examples)]
        checked = CheckedClient(
            machine,
            Crossed(leaving, partial(check_arriving, divided.cut)),
            _steps(plan, own),
            welcome.clients,
            limits.largest_gradient,
        )
        return SiteClient(
            checked,
            checked if exchange is None else CompressedNode(checked, exchange),
            CutClientPart(divided.cut, self._compression, machine.end),
            [*heads.parameters, *heads.written],
            sizes.largest_message(crossing, sizes.head_bytes(heads)),
        )


class _HeadSide:
    """A client that has only the head."""

    def __init__(
        self, part: ClientPart, losses: CountedLoss, secret: int, device: torch.device
    ) -> None:
        self._part = part
        self._device = device
        self._losses = losses
        self._secret = secret

    def forms(self, labels_stay: bool) -> CutForms:
        """Return descriptions of the activations that leave, and of targets unless they stay."""
        targets = b"" if labels_stay else encoded(self._part.targets)
        return {"form": encoded(self._part.leaving), "targets": targets}

    def working(
        self,
        told: RosterMembers,
        plan: SplitPlan,
        train: Examples,
        own: ClientExamples,
        welcome: Welcome,
        limits: SiteLimits,
    ) -> SiteClient:
        arriving = decoded(told.form) if told.form else None
        heads = self._part.side(self._losses, arriving)
        party = SideRunner(heads, heads.own(), welcome.client)
        machine = SplitClient(
            welcome.client,
            party,
            plan.rules,
            train,
            own.at,
            self._losses,
            welcome.seed,
            lambda *_: 0.0,
            guard_of(plan.defence, lambda: self._crossings(arriving), self._secret, welcome.client),
            self._device,
        )
        at_client = SeparateClientPart(self._part, arriving)
        examples = _most_examples(self._part.task, own)
        crossing = sizes.crossing_of_forms([self._part.leaving, arriving], examples)
        leaving = [one.differentiable for one in self._part.leaving.tensors]

        def check(values: Sequence[Tensor], count: int) -> None:
            if arriving is not None:
                arriving.check(values, count, "the tail")

        checked = CheckedClient(
            machine,
            Crossed(leaving, check),
            _steps(plan, own),
            welcome.clients,
            limits.largest_gradient,
        )
        return SiteClient(
            checked,
            checked,
            at_client,
            [*heads.parameters, *heads.written],
            sizes.largest_message(crossing, sizes.head_bytes(heads)),
        )

    def _crossings(self, arriving: OutputForm | None) -> list[list[CutValue]]:
        """Return the crossing values of each cut."""
        forms = [self._part.leaving] if arriving is None else [self._part.leaving, arriving]
        for form in forms:
            form.check_dims()
        return [form.crossings() for form in forms]


def check_part(
    task: Task,
    strategy: Split,
    welcome: Welcome,
    part: int | None,
    device: torch.device | None = None,
) -> Iterator[str]:
    """Try one batch up to the cut, and yield lines that describe the data to be sent."""
    model = site_model(task, welcome.seed, device, strategy.defence)
    device = device or device_of_model(model)
    train, _ = examples_for(task)
    # A look has no number yet.
    seen = replace(welcome, client=max(welcome.client, part or 0, 0))
    own = own_part(strategy, seen, train, part, False)
    plan = strategy.of(task).plan
    batch = min(own.batches.batch_size, len(own.indices))
    with deferred_compiler():
        if isinstance(task, HeadTask):
            assert isinstance(model, ModelParts)
            crosses = ClientPart(task, model, train, batch, welcome.seed).leaving.nbytes(batch)
        else:
            losses = CountedLoss(task.loss, train)
            divided = TracedDividedModel(task, model, plan.at, batch, welcome.seed, losses)
            crosses = divided.message_bytes(plan.compression)[0]
        inputs, _ = reader_on(train, device)(own.indices[:batch])
        began = time.perf_counter()
        if isinstance(model, ModelParts):
            model.only("head")(inputs)
        else:
            model(inputs)
        synchronize(device)
        seconds = time.perf_counter() - began
    what = "the head" if isinstance(task, HeadTask) else "the whole model"
    yield f"training: the forward pass of {what} took {seconds:.3f} s for a batch of {batch}"
    labels = (
        "labels stay here" if plan.rules.labels_stay else "labels are sent with the activations"
    )
    yield (
        f"this client would send: {crosses[0]:,} bytes of activations per batch, and receive "
        f"{crosses[1]:,} bytes; {labels}"
    )


def _steps(plan: SplitPlan, own: ClientExamples) -> int:
    """Return the steps of a turn of this client."""
    return plan.local_epochs * own.batches.steps_per_epoch


def _most_examples(task: Task, own: ClientExamples) -> int:
    """Return the largest number of examples of a batch, in training or evaluation."""
    return max(own.batches.batch_size, task.eval_batch_size)


def box_of(run: str) -> str:
    """Return the file name, in the state folder, of the key to which clients seal their heads."""
    return f"box-{run}.pem"


def own_part(
    strategy: Split, welcome: Welcome, train: Examples, part: int | None, joins: bool
) -> ClientExamples:
    """Return the client's training examples: all of its own, or its part in a demonstration."""
    size = strategy.batch_size
    if part is not None:
        parts = divide(strategy.partition, welcome.clients, train, size, welcome.seed, joins)
        return parts[welcome.client]
    everything: Tensor = torch.arange(len(train))
    batches = Batches(len(train), size, welcome.seed, welcome.client, joins)
    return ClientExamples(everything, batches, everything[:0])


def _in_words(told: requests.TrainingFailure) -> str:
    """Return the text about an error for the server."""
    place = f" at {told.file}:{told.line}" if told.file else ""
    return f"{told.kind}{place}{': ' if told.message else ''}{told.message}"

"""A client of a federation on a network: train on this machine's examples for a remote server.

The task is this site's own, and no code travels.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dure.contracts.task import Task
from dure.deploy.client import party_site
from dure.deploy.client.evaluations import EvaluationBound
from dure.deploy.client.link import StoppedError
from dure.deploy.client.loop import ClientLoop
from dure.deploy.client.site import ConnectionOptions, opened, path_of
from dure.deploy.client.split_site import check_part, take_part
from dure.deploy.client.stored_spent_models import StoredSpentModels
from dure.federated.protections import SecureClientContext
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import to_cpu
from dure.machine.threads import threads
from dure.run.client_training import ClientTraining
from dure.run.registry import decode_strategy
from dure.run.task_checks import check_data_asks
from dure.split.network.site import SiteLimits
from dure.split.strategy import Split
from dure.split.vertical import VerticalSplit
from dure.tensors.frozen import frozen_of

CHECK_SECONDS = 10.0
"""Seconds for which a check retries an unreachable server."""

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
    give_up: float | None = 24.0,
    identities: str | Path | None = None,
    owner: str = "",
    insecure: bool = False,
    rules: Sequence[str] = (),
    device: str = "",
    stop: threading.Event | None = None,
    on_progress: Progress = _ignore,
) -> str:
    """Take part in the federation that the server at `url` serves, until its run ends.

    Args:
        url: address of the server.
        task: the task with this site's own examples.
        name: as in `dure.deploy.client.site.ConnectionOptions`.
        state: as in `dure.deploy.client.site.ConnectionOptions`.
        part: as in `dure.deploy.client.site.ConnectionOptions`.
        token: as in `dure.deploy.client.site.ConnectionOptions`.
        authority: as in `dure.deploy.client.site.ConnectionOptions`.
        certificate: as in `dure.deploy.client.site.ConnectionOptions`.
        approve: consent to the served run, if policy.toml requires consent.
        give_up: as in `dure.deploy.client.site.ConnectionOptions`.
        identities: as in `dure.deploy.client.site.ConnectionOptions`.
        owner: as in `dure.deploy.client.site.ConnectionOptions`.
        insecure: as in `dure.deploy.client.site.ConnectionOptions`.
        rules: as in `dure.deploy.client.site.ConnectionOptions`.
        device: as in `dure.deploy.client.site.ConnectionOptions`.
        stop: event that ends the client when it is set.
        on_progress: receives events, such as ("training", {"round": 3}).

    Returns:
        The reason for the end of the run.

    Raises:
        dure.errors.DureError: if the server refuses this client, is not at the URL, or stays
            unreachable for `give_up`.
        ValueError: for a task that cannot be trained, or a URL without TLS.
    """
    files = path_of(authority), path_of(certificate)
    reach = ConnectionOptions(
        name,
        path_of(state),
        part,
        token,
        *files,
        give_up,
        path_of(identities),
        owner,
        insecure,
        tuple(rules),
        device,
    )
    # Before the connection: an unusable task spends no token.
    training = ClientTraining(task, name, part, computes_on=reach.computes_on)
    with opened(
        url,
        reach,
        stop or threading.Event(),
        tell=lambda text: on_progress("waiting", {"why": text}),
        moved=lambda count: on_progress("moved", {"bytes": count}),
    ) as site:
        session, kept, policy = site.session, site.kept, site.policy
        training.ask = site.given(task)
        policy.hold()
        # A look takes no place, so that a client that declines leaves the place to others.
        look = site.look(training.look())
        site.agree(look, approve)
        training.check(look)
        welcome = session.check_in(training.enter())
        signed = site.enter(welcome)
        training.policy = policy
        training.evaluations = EvaluationBound(policy, kept, welcome.run)
        training.sums = SecureClientContext(
            run=welcome.run,
            refuses=lambda reason: on_progress("left", {"why": reason}),
            key=session.key,
            identities=signed,
            smallest_cohort=policy.smallest_cohort,
            spent=StoredSpentModels(kept),
        )
        if trust := site.trust(welcome):
            on_progress("trust", {"in": trust})
        strategy = decode_strategy(welcome.strategy, training.ask)
        # Checked here, because the client draws the batches and not the server.
        check_data_asks(task, strategy, strategy.traits.kind)
        if isinstance(strategy, Split | VerticalSplit):
            takes = party_site.take_part if isinstance(strategy, VerticalSplit) else take_part
            return takes(
                task,
                strategy,
                welcome,
                session,
                kept,
                name=name,
                part=part,
                share_errors=policy.share_errors,
                known=site.known(signed),
                event=on_progress,
                limits=SiteLimits(
                    policy.largest_gradient, reach.give_up_seconds, training.evaluations.another
                ),
                device=training.computes_on,
            )
        training.begin(welcome, None if kept.temporary else kept.memory())
        session.expects = training.forms()
        training.take_frozen(session, welcome)
        frozen = to_cpu(frozen_of(training.model))
        if frozen and not kept.temporary:
            kept.keep_frozen(frozen)
        with threads(training.threads), deferred_compiler():
            return ClientLoop(session, training, on_progress, site.closed).run()


def stopped() -> type[Exception]:
    """Return the exception that `join` raises after `stop` was set."""
    return StoppedError


def check(url: str, task: Task, reach: ConnectionOptions) -> Iterator[str]:
    """Try the steps of `join`, and yield lines about the findings and the data to be sent.

    A check-in that only looks tests network, certificate and identity; a line says how much disk is
    free and how much the client needs; one training step tests the task. No data leave the
    machine, and the check-in is in the log of outgoing messages. Raises the errors of `join`, after
    `CHECK_SECONDS` if the server is unreachable.
    """
    training = ClientTraining(task, reach.name, reach.part, computes_on=reach.computes_on)
    reach = replace(reach, give_up=CHECK_SECONDS / 3600)
    with opened(url, reach, threading.Event()) as site:
        kept = site.kept
        training.ask = site.given(task)
        training.policy = site.policy
        welcome = site.look(training.look())
        secure = "" if url.startswith("https:") else ", without TLS"
        yield f"network: {url} responds, run {welcome.run}{secure}"
        who = "a client id is free" if welcome.client < 0 else f"client {welcome.client}"
        yield f"identity: {who}, of {welcome.clients}"
        strategy = decode_strategy(welcome.strategy, training.ask)
        reasons = site.refusals(welcome)
        yield f"policy: {'; '.join(reasons) or 'this run is allowed'}"
        if not reasons and (trust := site.trust(welcome)):
            yield f"trust: {trust}"
        check_data_asks(task, strategy, strategy.traits.kind)
        if isinstance(strategy, Split):
            yield from check_part(task, strategy, welcome, reach.part, training.computes_on)
            return
        if isinstance(strategy, VerticalSplit):
            device = training.computes_on
            yield from party_site.check_part(task, strategy, welcome, kept, reach.part, device)
            return
        training.begin(welcome, None)
        sent = training.would_send()
        free = shutil.disk_usage(kept.folder).free
        yield f"disk: {free:,} bytes are free, and at most {8 * sent:,} are needed"
        with deferred_compiler():
            seconds = training.one_step()
        yield f"training: one step took {seconds:.3f} s on {training.examples:,} examples"
        if training.holds:
            yield (
                f"this client would send: {sent:,} bytes per update, only inside a secure sum "
                "with other clients"
            )
            return
        metrics = ", and metrics on held-out data" if training.held_out else ""
        yield (
            f"this client would send: {sent:,} bytes per update, with the number of examples, "
            f"samples, steps and the mean loss{metrics}"
        )

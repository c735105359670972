"""Builders of privacy protections of a federated run: secure sums, noise, and accounts.

    server      sums of updates that nobody else sees; noise on the sums; privacy accounts
    clients     shares of updates for such sums; each client's own noise

The secrets of remote clients come from the operating system; a simulation derives them from the
seed (`dure.randomness.secret`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from dure.contracts.fresh_model import unused_copy
from dure.contracts.task import Task
from dure.data.partition import NaturalKey, Partition
from dure.errors import warn
from dure.federated.aggregate import Aggregator
from dure.federated.algorithm import Algorithm
from dure.federated.client.clients import ClientProtections
from dure.federated.client.jobs import LocalTraining, LocalWork
from dure.federated.privacy.example_level import ExampleAccount, check_own_noise
from dure.federated.privacy.exposure import exposure
from dure.federated.privacy.privacy_settings import NOTHING, Privacy
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.federated.privacy.user_level.build import contribution, noised_rounds
from dure.federated.server.poisson_sampling import poisson_sampler
from dure.federated.server.privacy_interfaces import PrivateAggregation
from dure.federated.server.sampling import Selection
from dure.federated.server.server import ServerProtections
from dure.privacy.padding import padding_rows
from dure.protocol.carrier import Carrier
from dure.protocol.server_context import ServerContext
from dure.randomness.secret import Secret
from dure.tasks.batch_norm import statistics
from dure.tensors.buffers import BufferNames

if TYPE_CHECKING:
    # These modules need the extra "privacy", which runs without secure aggregation do not have.
    from dure.federated.client.pending_updates import PendingUpdates
    from dure.federated.privacy.secure_aggregation.clipped_contribution import ContributionClipping
    from dure.federated.privacy.secure_aggregation.rounds import SecureRounds
    from dure.federated.privacy.secure_aggregation.spent_models import SpentModels
    from dure.federated.privacy.user_level.local import LocalNoise
    from dure.wire.signatures import Key

SIMULATED = "simulation"
"""Run id under which the clients of a simulation compute sums."""


class SecureClientContext(NamedTuple):
    """A remote client's knowledge of the run, for secure sums.

    run: run id. refuses: called with the reason when the client refuses a sum. key: the client's
    identity key. identities: public keys of all clients, by number, if their owner has signed them.
    smallest_cohort: fewest clients of a sum in which the client takes part. spent: models to whose
    sums the client contributes no more; None keeps the set in memory.
    """

    run: str
    refuses: Callable[[str], None]
    key: Key | None = None
    identities: Mapping[int, str] | None = None
    smallest_cohort: int = 1
    spent: SpentModels | None = None


class ProtectionSettings(Protocol):
    """Settings that protections need; `dure.federated.strategy.Federated` documents them."""

    name: ClassVar[str]

    @property
    def batch_size(self) -> int | None: ...
    @property
    def fraction(self) -> float: ...
    @property
    def selection(self) -> Selection: ...
    @property
    def privacy(self) -> Privacy: ...
    @property
    def epsilon(self) -> float | None: ...
    @property
    def delta(self) -> float: ...
    @property
    def partition(self) -> Partition: ...

    def algorithm_for(self, task: Task, model: nn.Module, clients: int) -> Algorithm: ...
    def rule(self) -> Aggregator: ...
    def work(self) -> LocalWork: ...


def check_served(strategy: ProtectionSettings) -> None:
    """Raise ValueError for a protection that does not work for remote clients."""
    privacy = strategy.privacy
    check_own_noise(privacy)
    if privacy.secure is not None and strategy.selection.by_size:
        raise ValueError(
            f"the selection {strategy.selection} chooses clients by their number of examples, "
            "which secure aggregation over a network hides from the server: use uniform"
        )
    if privacy.secure is not None and privacy.example is not None:
        raise ValueError(
            "the accountant of dp-sgd needs each client's number of examples, which secure "
            "aggregation over a network hides from the server: leave one of the two out"
        )


# The server


def server_protections_of(
    strategy: ProtectionSettings,
    task: Task,
    model: nn.Module,
    context: ServerContext,
    carrier: Carrier,
    seed: int,
) -> ServerProtections:
    """Return the protections on the server's side.

    Args:
        strategy: the strategy of the run.
        task: the task of the run.
        model: the run's model, which stays unchanged.
        context: context of the server.
        carrier: gives the clients' sizes, and stores draws.
        seed: of the run.
    """
    simulated = context.network is None
    # A simulation is reproducible; secrets that protect remote clients must not be.
    secret = Secret.simulated(seed) if simulated else Secret.system()
    sizes = carrier.join().sizes
    secure, rule = _secure_rounds_of(strategy, task, model, context, len(sizes), secret)
    return ServerProtections(
        rule=rule,
        secure=secure,
        private=_private_rounds_of(strategy, task, model, context, carrier, secret, seed),
        examples=_example_account_of(strategy, sizes, simulated),
        sample_clients=poisson_sampler(secret, carrier.once, strategy.fraction, len(sizes)),
        exposure=exposure(strategy.privacy, context.identities is not None),
        repeats=simulated or strategy.privacy == NOTHING,
    )


def _secure_rounds_of(
    strategy: ProtectionSettings,
    task: Task,
    model: nn.Module,
    context: ServerContext,
    clients: int,
    secret: Secret,
) -> tuple[SecureRounds | None, Aggregator]:
    """Return (server side of secure aggregation, rule for the sums).

    Without secure aggregation: (None, the strategy's rule).
    """
    rule = strategy.rule()
    settings = strategy.privacy.secure
    if settings is None:
        return None, rule
    from dure.federated.privacy.secure_aggregation.rounds import (
        SecureRounds,
        SecureSums,
        grouping_of,
    )

    algorithm = strategy.algorithm_for(task, model, clients)
    clips = _clipping(strategy, task, model, algorithm)
    run = SIMULATED if context.network is None else str(context.config.get("run", ""))
    groups, of_means = grouping_of(rule)
    settings = _weighed(settings, algorithm)
    return SecureRounds(
        SecureSums(settings, run, clips), groups, secret, context.identities
    ), of_means


def _private_rounds_of(
    strategy: ProtectionSettings,
    task: Task,
    model: nn.Module,
    context: ServerContext,
    carrier: Carrier,
    secret: Secret,
    seed: int,
) -> PrivateAggregation | None:
    """Return the server side of user-level differential privacy; None without it."""
    user = strategy.privacy.user
    if user is None:
        return None
    sizes = carrier.join().sizes
    if strategy.privacy.secure is not None and context.network is not None:
        sizes = [0] * len(sizes)  # sizes are hidden: all clients weigh 1
    copy = unused_copy(model, task, seed)
    return noised_rounds(
        user,
        strategy,
        model=copy,
        algorithm=strategy.algorithm_for(task, copy, len(sizes)),
        sizes=sizes,
        keyed=isinstance(strategy.partition, NaturalKey),
        once=carrier.once,
        secret=secret,
        folder=context.folder,
        padding=padding_rows(task, copy),
    )


def _example_account_of(
    strategy: ProtectionSettings, sizes: Sequence[int], simulated: bool
) -> ExampleAccount | None:
    """Return the privacy account of example-level protection; None without it."""
    example = strategy.privacy.example
    if example is None:
        return None
    work = strategy.work()
    steps = [work.steps_of(size) for size in sizes]
    return ExampleAccount(
        example,
        strategy.delta,
        sizes,
        steps,
        strategy.batch_size,
        simulated=simulated,
        beside=strategy.privacy.user is not None,
    )


# The clients


def client_protections_of(
    strategy: ProtectionSettings,
    task: Task,
    model: nn.Module,
    training: LocalTraining,
    secret: Secret,
    site: SecureClientContext | None,
) -> ClientProtections:
    """Return the protections on the clients' side.

    Args:
        strategy: the strategy of the run.
        task: the task of the run.
        model: the run's model, which stays unchanged.
        training: the clients' training, whose algorithm and examples count here.
        secret: source of keys and rounding.
        site: knowledge of a client that is alone in this process; None in a simulation.
    """
    return ClientProtections(
        secure=_pending_updates_of(strategy, task, model, training, secret, site),
        coins=None if strategy.privacy.example is None else secret,
        protect=_local_noise(strategy.privacy, task, model, training.algorithm, secret),
    )


def _pending_updates_of(
    strategy: ProtectionSettings,
    task: Task,
    model: nn.Module,
    training: LocalTraining,
    secret: Secret,
    site: SecureClientContext | None,
) -> PendingUpdates | None:
    """Return the client side of secure aggregation; None without it."""
    settings = strategy.privacy.secure
    if settings is None:
        return None
    from dure.federated.client.pending_updates import PendingUpdates
    from dure.federated.privacy.secure_aggregation.rounds import SecureSums

    algorithm = training.algorithm
    settings = _weighed(settings, algorithm)
    if strategy.privacy.user is None and not algorithm.alike:
        _tell_large(settings, training.data.sizes)
    clipping = _clipping(strategy, task, model, algorithm)
    if site is None:
        sums = SecureSums(settings, SIMULATED, clipping)
        return PendingUpdates(sums, algorithm, secret)
    return PendingUpdates(
        SecureSums(settings, site.run, clipping),
        algorithm,
        secret,
        identity=site.key if site.identities is not None else None,
        roster=site.identities,
        minimum=site.smallest_cohort,
        spent=site.spent,
        refuses=lambda client, reason: site.refuses(reason),
    )


def _tell_large(settings: SecureAggregation, sizes: Sequence[int]) -> None:
    """Warn if some clients weigh less in a sum than their examples would."""
    larger = [size for size in sizes if size > settings.most_examples]
    if larger:
        warn(
            f"{settings.name}: {len(larger)} of {len(sizes)} clients have more than "
            f"{settings.most_examples} examples (up to {max(larger)}), and are weighted as if "
            "they had that many: give a larger most_examples to weight them by all examples"
        )


def _local_noise(
    privacy: Privacy, task: Task, model: nn.Module, algorithm: Algorithm, secret: Secret
) -> LocalNoise | None:
    """Return the noise that each client adds to its update before sending; None without it."""
    user = privacy.user
    if user is None or user.where != "local":
        return None
    from dure.federated.privacy.user_level.local import LocalNoise

    _, pieces, places = _contribution(task, model, algorithm)
    return LocalNoise(user, pieces, places, secret)


def _weighed(settings: SecureAggregation, algorithm: Algorithm) -> SecureAggregation:
    """Return the settings for the algorithm's weights.

    If all updates weigh the same, no digits of a sum are reserved for weights.
    """
    return replace(settings, most_examples=1) if algorithm.alike else settings


def _clipping(
    strategy: ProtectionSettings, task: Task, model: nn.Module, algorithm: Algorithm
) -> ContributionClipping | None:
    """Return the clipping of clients under user-level privacy with secure sums; None without it."""
    user = strategy.privacy.user
    if user is None:
        return None
    from dure.federated.privacy.secure_aggregation.clipped_contribution import ContributionClipping

    work = strategy.work()
    passes = work.epochs if work.steps is None else 1
    return ContributionClipping(user, *_contribution(task, model, algorithm), passes)


def _contribution(
    task: Task, model: nn.Module, algorithm: Algorithm
) -> tuple[list[Tensor], list[list[int]], list[int]]:
    """Return (tensors like a client's contribution, pieces of each tensor, statistics' places).

    The places are the indices of batch norm's statistics among the buffers.
    """
    copy = unused_copy(model, task, 0)
    like, pieces = contribution(copy, algorithm)
    return like, pieces, list(statistics(copy, BufferNames(copy).names))

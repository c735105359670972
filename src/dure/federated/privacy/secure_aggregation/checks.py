"""Checks of settings next to secure aggregation, before any work."""

from __future__ import annotations

import math

from dure.federated.aggregate import Aggregator
from dure.federated.privacy.secure_aggregation.settings import SecureAggregation
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.pacing import Pacing
from dure.fleet.conditions import Conditions


def check_rule(settings: SecureAggregation, rule: Aggregator) -> None:
    """Check that the rule needs no single updates; raises ValueError if it does."""
    if rule.of_groups() is None:
        raise ValueError(
            f"{rule} needs single updates, which {settings.name} hides from the server: use mean, "
            "or a rule on means of groups, such as bucketing:10/median or "
            "geometric-median-of-means:5"
        )


def check_user(settings: SecureAggregation, user: UserLevel | None) -> None:
    """Check that the noise works with sums; raises ValueError if not."""
    if user is None:
        return
    if user.where == "local":
        raise ValueError(
            f"user-level: where=local protects each update separately, but {settings.name} sums "
            "them: use distributed, where the sum has the noise of all clients, or server"
        )
    if math.isinf(user.clip):
        raise ValueError(
            f"user-level: clip is inf, but {settings.name} needs a finite range of numbers, which "
            "is clip: give a finite clip"
        )
    if user.clipping == "adaptive":
        raise ValueError(
            "user-level: adaptive clipping needs single updates on the server, which "
            f"{settings.name} hides: use flat or layers"
        )


def check_pacing(settings: SecureAggregation, pacing: Pacing, name: str) -> None:
    """Check that the system has rounds; raises ValueError if not."""
    if not pacing.synchronous:
        raise ValueError(
            f"{name} combines updates of different times, but {settings.name} sums those of one "
            "round: use a system with rounds, such as fed-avg"
        )


def check_groups(
    settings: SecureAggregation, rule: Aggregator, pacing: Pacing, clients: int
) -> None:
    """Check that rounds and groups have at least `minimum` clients; raises ValueError if not."""
    updates = pacing.updates(clients)
    least = rule.smallest_group(updates)
    if least < settings.minimum:
        of = "a round" if least == updates else f"the smallest group of {rule}"
        raise ValueError(
            f"{of} has {least} clients, but a sum needs at least {settings.minimum}, so that it "
            "does not reveal single updates: select more clients, or lower minimum"
        )


def check_measuring(settings: SecureAggregation, held_out: float, fine_tune: int) -> None:
    """Check that clients report no measurements of their own data; raises ValueError if so."""
    if held_out or fine_tune:
        raise ValueError(
            f"held_out makes each client report its own metrics, but {settings.name} allows only "
            "sums: leave held_out and fine_tune out"
        )


def check_conditions(settings: SecureAggregation, conditions: Conditions) -> None:
    """Check the fleet's conditions; raises ValueError for reports outside of sums."""
    if not conditions.arrival.is_static:
        raise ValueError(
            f"with an arrival each client reports its own metrics, but {settings.name} allows "
            "only sums: leave arrival out"
        )
    if conditions.transfer_budget is not None:
        raise ValueError(
            f"transfer_budget counts an update before it is sent, but {settings.name} sends it in "
            "several steps: leave it out"
        )

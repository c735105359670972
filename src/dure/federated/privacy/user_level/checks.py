"""Checks of settings next to user-level privacy, before any work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from dure.federated.aggregate import Aggregator, Mean
from dure.federated.privacy.user_level import distributed
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.sampling import PerClientPoisson, Selection
from dure.privacy.accountant import Relation, Releases, check_epsilon, epsilon, noise_for


class PrivateRoundsStrategy(Protocol):
    """Attributes of a strategy that user-level privacy needs."""

    name: ClassVar[str]

    @property
    def fraction(self) -> float: ...
    @property
    def selection(self) -> Selection: ...
    @property
    def epsilon(self) -> float | None: ...
    @property
    def delta(self) -> float: ...

    def rule(self) -> Aggregator: ...


def check_user_level(
    user: UserLevel, strategy: PrivateRoundsStrategy, synchronous: bool, secure: bool
) -> None:
    """Check that the settings permit user-level privacy; raises ValueError if not.

    `synchronous`: whether the strategy has rounds. `secure`: whether the server sees only sums.
    """
    if not synchronous:
        raise ValueError(
            f"user-level privacy counts rounds, but {strategy.name} has none: use fed-avg or "
            "another system with rounds"
        )
    if not isinstance(strategy.selection, PerClientPoisson):
        raise ValueError(
            "user-level privacy needs an independent draw for each client, but the selection "
            f"{strategy.selection} replaces absent clients by others: leave it out, or write coins"
        )
    if strategy.rule() != Mean():
        raise ValueError(
            "user-level privacy bounds a client's contribution to a mean, but the rule "
            f"{strategy.rule()} is not a mean: leave it out"
        )
    if user.where == "distributed" and not secure:
        raise ValueError(
            "user-level: where=distributed adds little noise to each update, which is sufficient "
            "only in a secure sum: write secure-aggregation/ before it, or leave it out and let "
            "the server add the noise"
        )
    _check_clipping(user)
    if strategy.epsilon is not None:
        check_epsilon(strategy.epsilon)


def check_budget(user: UserLevel, strategy: PrivateRoundsStrategy, clients: int) -> None:
    """Check that at least a single round fits the budget, and delta; raises ValueError if not."""
    if clients * strategy.delta >= 1:
        raise ValueError(
            f"delta is {strategy.delta}, but it has to be well below 1/{clients} for {clients} "
            f"clients, because 1/{clients} would allow publishing one client's data: choose a "
            f"smaller one, such as {0.01 / clients:.0e}"
        )
    if strategy.epsilon is not None:
        told = epsilon_account(user, strategy, clients)([one_round(user, strategy)])
        if told > strategy.epsilon:
            raise ValueError(
                f"one round alone costs an epsilon of {told:.4g}, but the budget is "
                f"{strategy.epsilon}: give more noise than {user.noise}, or leave the noise out "
                "to choose it automatically"
            )


def _check_clipping(user: UserLevel) -> None:
    if math.isinf(user.clip) and (user.noise or user.clipping != "flat"):
        raise ValueError(
            "user-level: clip is inf, but noise and clipping need a finite norm: give a clip, "
            "such as 1"
        )
    if user.clipping == "adaptive" and user.where != "server":
        raise ValueError(
            "user-level: adaptive clipping needs noise of the server, but the noise is "
            f"{user.where}: use flat or layers"
        )


def relation_of(user: UserLevel) -> Relation:
    """Return the relation of neighbouring data sets.

    "replace" for noise of the clients themselves.
    """
    return "replace" if user.where == "local" else "add-or-remove"


def one_round(user: UserLevel, strategy: PrivateRoundsStrategy) -> Releases:
    """Return a round as a release for the accountant."""
    return Releases(1.0 if user.where == "local" else strategy.fraction, user.noise)


def epsilon_account(
    user: UserLevel, strategy: PrivateRoundsStrategy, clients: int
) -> Callable[[Sequence[Releases]], float]:
    """Return the account of `clients` clients: a function from releases to epsilon."""
    if user.where == "distributed":
        plan = distributed.account_plan(user.clip, user.noise, clients)
        return lambda spent: distributed.composed_epsilon(plan, spent, strategy.delta)
    return lambda spent: epsilon(spent, strategy.delta, relation_of(user))


def chosen_noise(
    user: UserLevel, strategy: PrivateRoundsStrategy, rounds: int | None, clients: int
) -> float:
    """Return the least noise multiplier with which the rounds fit the budget.

    Raises ValueError if `rounds` is None.
    """
    assert strategy.epsilon is not None
    if rounds is None:
        raise ValueError(
            f"to choose the noise for epsilon {strategy.epsilon}, dure needs the number of "
            "rounds: give --rounds (Stop(rounds=...)), or a noise, such as "
            f"user-level:{user.clip:g}:1.1"
        )
    rate = one_round(user, strategy).rate
    if user.where == "distributed":
        return distributed.noise_for(strategy.epsilon, strategy.delta, rate, rounds, clients)
    return noise_for(strategy.epsilon, strategy.delta, rate, rounds, relation_of(user))

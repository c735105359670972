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
            f"user-level privacy counts rounds, and {strategy.name} has none: take fed-avg, or "
            f"another with rounds"
        )
    if not isinstance(strategy.selection, PerClientPoisson):
        raise ValueError(
            f"user-level privacy counts on a coin of its own for each client, and the selection "
            f"{strategy.selection} asks others in place of those who are away: leave it out, or "
            f"write coins"
        )
    if strategy.rule() != Mean():
        raise ValueError(
            f"user-level privacy bounds what a client says in a mean, and the rule "
            f"{strategy.rule()} is none: leave it out"
        )
    if user.where == "distributed" and not secure:
        raise ValueError(
            "user-level: where=distributed has little noise in each update, which only a sum hides:"
            " write secure-aggregation/ before it, or leave it out for noise of the server"
        )
    _check_clipping(user)
    if strategy.epsilon is not None:
        check_epsilon(strategy.epsilon)


def check_budget(user: UserLevel, strategy: PrivateRoundsStrategy, clients: int) -> None:
    """Check that at least a single round fits the budget, and delta; raises ValueError if not."""
    if clients * strategy.delta >= 1:
        raise ValueError(
            f"delta is {strategy.delta}, and with {clients} clients 1/{clients} would allow to "
            f"publish one of them: take well below, such as {0.01 / clients:.0e}"
        )
    if strategy.epsilon is not None:
        told = epsilon_account(user, strategy, clients)([one_round(user, strategy)])
        if told > strategy.epsilon:
            raise ValueError(
                f"one round alone tells an epsilon of {told:.4g}, and the budget is "
                f"{strategy.epsilon}: take more noise than {user.noise}, or leave the noise out "
                f"for the one that fits"
            )


def _check_clipping(user: UserLevel) -> None:
    if math.isinf(user.clip) and (user.noise or user.clipping != "flat"):
        raise ValueError(
            "user-level: clip is inf, and noise and clipping follow a largest norm: give a clip, "
            "such as 1"
        )
    if user.clipping == "adaptive" and user.where != "server":
        raise ValueError(
            f"user-level: adaptive clipping has the server count, and noise is {user.where}: take "
            f"flat or layers"
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
            f"epsilon {strategy.epsilon} chooses the noise for a number of rounds: give --rounds "
            f"(Stop(rounds=...)), or a noise, such as user-level:{user.clip:g}:1.1"
        )
    rate = one_round(user, strategy).rate
    if user.where == "distributed":
        return distributed.noise_for(strategy.epsilon, strategy.delta, rate, rounds, clients)
    return noise_for(strategy.epsilon, strategy.delta, rate, rounds, relation_of(user))

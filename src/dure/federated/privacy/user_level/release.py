"""Rounds with differential privacy of clients, on the server: coins, contributions, noise, account.

    round N:    coins of all clients                       `dure.federated.server.tossing`
                contributions, clipped and summed          `estimator`
                N is charged                               `dure.privacy.ledger`
                the mean with noise                        once, and written down, then shown

`once` is the carrier's: a server that goes on from an earlier state gets the same noised mean
again, and no second noise is ever drawn for a round. Keys are drawn for one purpose and round each
(`dure.randomness.secret`), in a deployment from the system.

What is promised, and to whom, is in `dure.privacy.promise`. With `where=local` and
`where=distributed` the noise is in what comes already (`local`, `distributed`): a round is then
charged before anybody is asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dure.federated.privacy.user_level.distributed import account_plan, against_server
from dure.federated.privacy.user_level.estimator import Estimator
from dure.federated.privacy.user_level.settings import UserLevel
from dure.federated.server.tossing import Once
from dure.privacy.accountant import Releases, renyi_epsilon
from dure.privacy.ledger import Ledger
from dure.privacy.promise import Promise
from dure.randomness.secret import Secret


class NoisedRounds:
    """User-level privacy at work on the server.

    estimator: of the run. settings: the run's; where clients add noise the estimator has none.
    like: what a contribution looks like. promise: in words. ledger: what is spent. budget: the
    largest epsilon; None is no limit. secret: where keys come from. once: the carrier's.
    untrained: masks of numbers that nobody trains, which stay as they are; empty for none.
    """

    def __init__(
        self,
        *,
        estimator: Estimator,
        settings: UserLevel,
        like: Sequence[Tensor],
        promise: Promise,
        ledger: Ledger,
        budget: float | None,
        secret: Secret,
        once: Once,
        untrained: Sequence[Tensor] = (),
    ) -> None:
        self.estimator = estimator
        self.settings = settings
        self.like = like
        self.promise = promise
        self.ledger = ledger
        self.budget = budget
        self.secret = secret
        self.once = once
        self.untrained = untrained
        self._taken: Counter[int] = Counter()
        """How often each client was asked."""
        self._next = 0
        """The number of the next round."""

    @property
    def expected(self) -> float:
        return self.estimator.roster.expected

    @property
    def repeats(self) -> bool:
        return self.secret.repeats

    # A round

    def asks(self, number: int, clients: Sequence[int]) -> None:
        before = max(self._taken.values(), default=0)
        self._taken.update(clients)
        most = max(self._taken.values(), default=0)
        where = self.settings.where
        # What clients say themselves is seen one by one: it is paid for as of the one that was
        # asked most often. What they add to a sum is paid for before anybody adds it.
        if where == "distributed" or (where == "local" and most > before):
            self.once(f"paid {number}", lambda: self._pay(number))
            self._note(number)

    def _pay(self, number: int) -> dict[str, Any]:
        self.ledger.charge(number + 1, self._one())
        return {}

    def _note(self, number: int) -> None:
        """A round that was made before was paid for before, by whoever goes through it again."""
        if not self.ledger.has(number + 1):
            self.ledger.charge(number + 1, self._one())

    def fold(self, contribution: Sequence[Tensor], examples: int) -> None:
        self.estimator.fold(contribution, examples)

    def add(self, total: Sequence[Tensor]) -> None:
        self.estimator.add(total, 1.0)

    def forget(self) -> None:
        self.estimator.forget()

    def release(self, number: int) -> list[Tensor]:
        def make() -> dict[str, Any]:
            if self.settings.where == "server":
                self.ledger.charge(number + 1, self._one())
            key = self.secret.key("noise", number)
            count_key = self.secret.key("noise of the count", number)
            mean = self.estimator.noised(self.like, key, count_key)
            # Whoever added the noise: what is 0 for all data tells nothing.
            for one, mask in zip(mean, self.untrained, strict=False):
                one.masked_fill_(mask, 0.0)
            return {"mean": mean, "bound": self.estimator.bound}

        made = self.once(f"model {number}", make)
        if self.settings.where == "server":
            self._note(number)
        # Not drawn again where it was made before.
        self.estimator.bound = made["bound"]
        self.estimator.forget()
        self._next = number + 1
        mean: list[Tensor] = made["mean"]
        return mean

    def _one(self) -> Releases:
        """What a round is, for the accountant."""
        rate = 1.0 if self.settings.where == "local" else self.estimator.roster.rate
        return Releases(rate, self.settings.noise)

    # The account

    def exhausted(self) -> str | None:
        if self.budget is None or self.ledger.paid(self._next + 1):
            return None
        return "epsilon" if self.ledger.epsilon(self._one()) > self.budget else None

    def numbers(self) -> dict[str, float]:
        told = {"epsilon": self.ledger.epsilon()}
        if self.settings.where == "distributed":
            told["epsilon_server"] = self._against_server()
        if self.estimator.adaptive:
            told["clip"] = self.estimator.bound
        return told

    def _against_server(self) -> float:
        """Epsilon against the server, which knows who was asked: of the one asked most often."""
        settings = self.settings
        plan = account_plan(settings.clip, settings.noise, self.estimator.roster.clients)
        most = max(self._taken.values(), default=0)
        return against_server(plan, most, self.ledger.delta) if most else 0.0

    def facts(self) -> dict[str, Any]:
        promises = [{**self.promise.facts(_finite(self.ledger.epsilon())), **self._settings()}]
        if self.settings.where == "distributed":
            server = replace(
                self.promise, sampling="all", against="the server, which knows who was asked"
            )
            promises.append(server.facts(_finite(self._against_server())))
        return {"promises": promises}

    def _settings(self) -> dict[str, Any]:
        settings = self.settings
        roster = self.estimator.roster
        bound = self.estimator.bound if self.estimator.adaptive else settings.clip
        told = {
            "budget": self.budget,
            "where": settings.where,
            "noise": settings.noise,
            "clip": _finite(bound),
            "clipping": settings.clipping,
            "rate": roster.rate,
            "roster": roster.clients,
            "weight": roster.weight,
        }
        if settings.where == "server":
            # Beside the tighter bound, as papers print it.
            renyi = renyi_epsilon(self.ledger.spent, self.ledger.delta)
            told["epsilon_renyi"] = _finite(renyi)
        return told

    # Checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.state(),
            "bound": self.estimator.bound,
            "taken": dict(sorted(self._taken.items())),
            "next": self._next,
            "weight": self.estimator.roster.weight,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.ledger.restore(state["ledger"])
        self.estimator.bound = state["bound"]
        self._taken = Counter(state["taken"])
        self._next = state["next"]
        # As at the beginning of the run: clients may have other sizes by now.
        self.estimator.roster = self.estimator.roster._replace(weight=state["weight"])

    def close(self) -> None:
        self.ledger.close()


def _finite(number: float) -> float | None:
    """None for infinity, which JSON has not."""
    return number if math.isfinite(number) else None

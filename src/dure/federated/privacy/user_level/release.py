"""Rounds with user-level privacy on the server: sampling, contributions, noise and account.

    round N:    Poisson sample of the clients              `dure.federated.server.poisson_sampling`
                contributions, clipped and summed          `estimator`
                charge for N                               `dure.privacy.ledger`
                the mean with noise                        drawn once, recorded, then published

`once` belongs to the carrier: a server that resumes from an earlier state gets the same noisy mean
again, and never draws a second noise for a round. Each key serves a single purpose and round
(`dure.randomness.secret`); deployments draw keys from the operating system.

`dure.privacy.guarantee` describes the guarantee and its recipients. With `where=local` and
`where=distributed` contributions arrive with noise (`local`, `distributed`): a round is then
charged before clients are asked.
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
from dure.federated.server.poisson_sampling import CarrierOnce
from dure.privacy.accountant import Releases, renyi_epsilon
from dure.privacy.guarantee import PrivacyGuarantee
from dure.privacy.ledger import Ledger
from dure.randomness.secret import Secret


class NoisedRounds:
    """User-level privacy of a run on the server.

    Args:
        estimator: sum of the contributions; without noise if clients add the noise.
        settings: settings of the run.
        like: tensors of a contribution's shapes.
        promise: the guarantee, in words.
        ledger: account of the releases.
        budget: largest epsilon; None is no limit.
        secret: source of the keys.
        once: the carrier's `CarrierOnce`.
        untrained: masks of numbers that no client trains, which stay unchanged; may be empty.
    """

    def __init__(
        self,
        *,
        estimator: Estimator,
        settings: UserLevel,
        like: Sequence[Tensor],
        promise: PrivacyGuarantee,
        ledger: Ledger,
        budget: float | None,
        secret: Secret,
        once: CarrierOnce,
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
        """Number of assignments by client."""
        self._next = 0
        """Number of the next round."""

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
        # Local noise: each message is visible, so the account is that of the client with the most
        # assignments. Distributed noise: the round is charged before any client contributes.
        if where == "distributed" or (where == "local" and most > before):
            self.once(f"paid {number}", lambda: self._pay(number))
            self._note(number)

    def _pay(self, number: int) -> dict[str, Any]:
        self.ledger.charge(number + 1, self._one())
        return {}

    def _note(self, number: int) -> None:
        """Charge a repeated round to this ledger if the ledger lacks it."""
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
            # Numbers that are 0 for all data reveal nothing, so they need no noise.
            for one, mask in zip(mean, self.untrained, strict=False):
                one.masked_fill_(mask, 0.0)
            return {"mean": mean, "bound": self.estimator.bound}

        made = self.once(f"model {number}", make)
        if self.settings.where == "server":
            self._note(number)
        # A repeated round takes the recorded bound.
        self.estimator.bound = made["bound"]
        self.estimator.forget()
        self._next = number + 1
        mean: list[Tensor] = made["mean"]
        return mean

    def _one(self) -> Releases:
        """Return a round as a release for the accountant."""
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
        """Return the largest epsilon of a client against the server, which knows the selection."""
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
            # Reported next to the tighter bound, for comparison with papers.
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
        # The weight of the beginning of the run: sizes may have changed.
        self.estimator.roster = self.estimator.roster._replace(weight=state["weight"])

    def close(self) -> None:
        self.ledger.close()


def _finite(number: float) -> float | None:
    """Return None for infinity, which JSON cannot represent."""
    return number if math.isfinite(number) else None

"""FedAsync: no rounds; every update makes a new global model, with less weight the staler it is.

    client:  gets (x_τ, τ), trains on f(x; z) + ρ/2·|x - x_τ|², sends x_new
    server:  x_t <- (1 - α_t)·x_{t-1} + α_t·x_new,        α_t = α·s(t - τ)

    s constant     1
    s polynomial   (staleness + 1)^-a
    s hinge        1 if staleness <= b, else 1 / (a·(staleness - b) + 1)

α itself never changes. A "round" is a single update; C·K clients work at any time.

Cost of an update: d elements down and d up, as FedAvg's.

Source: C. Xie, S. Koyejo, I. Gupta, "Asynchronous Federated Optimization", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import ClassVar, Literal, get_args

from dure.arguments import at_least, between
from dure.contracts.task import Task
from dure.federated.algorithm import Algorithm, AlgorithmInputs
from dure.federated.algorithms.fed_prox import Proximal
from dure.federated.server.pacing import Pacing, asynchronous
from dure.federated.server.sampling import Uniform, clients_per_round
from dure.federated.strategy import Federated
from dure.protocol.messages import Update
from dure.settings import suggestion

Weighting = Literal["constant", "polynomial", "hinge"]


@dataclass(frozen=True)
class FedAsync(Federated):
    """The server mixes in each update at once, stale updates with a lower weight.

    Args:
        alpha: α, the share of an up-to-date client's model in the new model, in [0, 1].
        weighting: s, the function of staleness: constant, polynomial or hinge.
        a: of polynomial and hinge.
        b: of hinge: largest staleness without a penalty.
        rho: ρ, strength of the pull of clients towards the received model.
        stale: experiments only: one client at a time, which gets a model 0 to `stale` versions old,
            at random.
    """

    fraction: float = 0.1
    alpha: float = field(default=0.6, metadata=between(0, 1))
    weighting: Weighting = "polynomial"
    a: float = field(default=0.5, metadata=at_least(0, finite=True))
    b: float = field(default=4.0, metadata=at_least(0, finite=True))
    rho: float = field(default=0.005, metadata=at_least(0, finite=True))
    stale: int | None = field(default=None, metadata=at_least(0))

    name: ClassVar[str] = "fed-async"
    title: ClassVar[str] = "FedAsync"

    def check_task(self, task: Task) -> None:
        if self.weighting not in get_args(Weighting):
            raise ValueError(
                f"there is no weighting "
                f"{self.weighting!r}{suggestion(self.weighting, get_args(Weighting))}"
            )
        check_no_rounds(self)

    def pacing(self, clients: int) -> Pacing:
        return asynchronous(clients_per_round(clients, self.fraction), self.stale)

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return ModelMixing(
            alpha=self.alpha, weighting=self.weighting, a=self.a, b=self.b, rho=self.rho
        )


def check_no_rounds(strategy: Federated) -> None:
    """Raise ValueError for settings of rounds in a system without rounds."""
    if strategy.selection != Uniform():
        raise ValueError(
            f"the selection {strategy.selection} is for rounds, but {strategy.name} has no "
            "rounds: leave it out"
        )


POWERS = Context(prec=28)
"""Decimal context with the default digits of `decimal`, which a program may change globally."""


def staleness_weight(weighting: Weighting, staleness: int, a: float, b: float) -> float:
    """Return s(staleness): 1 at 0, and never rising."""
    if weighting == "polynomial":
        # Not the C library's power, whose last bit depends on the processor: 28 digits, rounded.
        return float(POWERS.power(staleness + 1, POWERS.minus(Decimal(a))))
    if weighting == "hinge" and staleness > b:
        return 1 / (a * (staleness - b) + 1)
    return 1.0


class ModelMixing(Proximal):
    """Algorithm whose model is a moving average of the clients' models."""

    mixes_models = True

    def __init__(self, alpha: float, weighting: Weighting, a: float, b: float, rho: float) -> None:
        super().__init__(rho)
        self.alpha = alpha
        self.weighting = weighting
        self.a = a
        self.b = b

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        # The scale is α_t; the weight has no effect in the mean of a single update.
        return self.alpha * staleness_weight(self.weighting, staleness, self.a, self.b), 1.0

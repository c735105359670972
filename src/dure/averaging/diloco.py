"""DiLoCo: local SGD whose mean difference is a gradient for an outer optimizer.

    x_i <- H steps of the task's optimizer (AdamW in the paper) from x, on rank i's part of the
    joint batches
    D   <- sum over i of w_i·(x - x_i)                          the outer gradient
    v   <- m·v + D
    x   <- x - lr·(D + m·v)       Nesterov;      x <- x - lr·v       without

w_i is rank i's share of the round's examples, or of the loss's denominator: 1/N if the parts are
equal. The inner optimizers' states stay on their ranks, as in the paper, which found no gain in an
exchange. lr = 1 and m = 0 is local SGD.

As in local SGD, one message a round is sent; v is equal on every rank and is never sent.

Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models";
there lr is 0.7, m is 0.9, and H = 500.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dure.arguments import at_least, between, check_ranges
from dure.averaging.local_sgd import LocalSGD, LocalSGDLearner
from dure.averaging.synchronisation import Momentum
from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression import Compression, NoCompression
from dure.collectives.compression import parse as parse_compression
from dure.contracts.learner import Learner
from dure.contracts.strategy import Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import RankContext, World
from dure.data.sampling import JOINT_SAMPLING
from dure.machine.devices import to_device
from dure.memory.formula import WHOLE, MemoryShares
from dure.settings import parse_fields


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Ranks train separately for many steps; an outer optimizer moves the common weights.

    The outer gradient is the mean of the ranks' changes, with the opposite sign.

    Args:
        batch_size: examples of a step over all workers together; None is all the data.
        period: H, the steps of a round.
        outer_lr: learning rate of the outer optimizer; 1 without momentum is plain averaging.
        outer_momentum: of the outer optimizer, in [0, 1).
        nesterov: whether that momentum is Nesterov's.
        momentum: effect of a synchronisation on the inner optimizer's state: keep, average, or
            reset.
        all_reduce: how differences are summed: ring, master, one_shot, tree, halving_doubling,
            hierarchical, native or auto.
        compression: of the differences that are exchanged: none, cast:bfloat16, …
        accumulate: number of micro-batches in which a worker computes a batch.
    """

    batch_size: int | None = 64
    period: int = 50
    outer_lr: float = field(default=0.7, metadata=at_least(0, finite=True))
    outer_momentum: float = field(default=0.9, metadata=between(0, 1, "[)"))
    nesterov: bool = True
    momentum: Momentum = "keep"
    all_reduce: Algorithm = "ring"
    compression: Compression = field(default_factory=NoCompression)
    accumulate: int = 1

    name: ClassVar[str] = "diloco"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="round",
        trains_with=ALL,
        samples=JOINT_SAMPLING,
        own_data=True,
    )

    def __post_init__(self) -> None:
        parse_fields(self, {"compression": parse_compression})

    @property
    def label(self) -> str:
        default = DiLoCo()
        shown = {
            "outer lr": "outer_lr",
            "m": "outer_momentum",
            "momentum": "momentum",
            "compression": "compression",
        }
        parts = [
            f"{word}={getattr(self, name)}"
            for word, name in shown.items()
            if getattr(self, name) != getattr(default, name)
        ]
        return " ".join([f"DiLoCo H={self.period}", *parts])

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        self.rounds().check_model(task, model, world)

    def shares(self, workers: int | None) -> MemoryShares | None:
        return WHOLE

    def batches_of_step(self, task: Task, workers: int | None) -> Fraction | None:
        return Fraction(1, workers or 1)

    def check(self, task: Task, world: World) -> None:
        self.rounds().check(task, world)
        check_ranges(self)

    def rounds(self) -> LocalSGD:
        """Return the strategy of the rounds without the outer optimizer."""
        return LocalSGD(
            batch_size=self.batch_size,
            period=self.period,
            momentum=self.momentum,
            all_reduce=self.all_reduce,
            compression=self.compression,
            accumulate=self.accumulate,
        )

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return DiLoCoLearner(task, context, seed, self)


class DiLoCoLearner(LocalSGDLearner):
    """Local SGD with an outer optimizer, which is equal on every rank."""

    def __init__(self, task: Task, context: RankContext, seed: int, strategy: DiLoCo) -> None:
        # Rounds of local SGD; only `move` differs.
        super().__init__(task, context, seed, strategy.rounds())
        self.outer = strategy
        # v of the outer optimizer: computed from sums that all ranks have, so it is never sent
        self.velocity = [torch.zeros_like(common) for common in self.common]

    def move(self, differences: Sequence[Tensor]) -> None:
        """Make a step of the outer optimizer with the mean of the ranks' changes."""
        lr = self.outer.outer_lr
        momentum = self.outer.outer_momentum
        for common, velocity, difference in zip(
            self.common, self.velocity, differences, strict=True
        ):
            velocity.mul_(momentum).sub_(difference)  # the outer gradient is -difference
            if self.outer.nesterov:
                # x - lr·(D + m·v), with D = -difference
                common.add_(difference, alpha=lr).sub_(velocity, alpha=lr * momentum)
            else:
                common.sub_(velocity, alpha=lr)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "velocity": self.velocity}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        super().restore(weights, state)
        # equal on all ranks, and therefore part of the common state
        self.velocity = to_device(list(state["velocity"]), self.replica.device)

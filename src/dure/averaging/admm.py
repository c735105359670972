"""Consensus ADMM: ranks minimise their own losses near a common point; duals make them agree.

With f_i the mean loss of rank i's n_i of n examples, weighted by N·n_i/n (1 if the parts are equal;
n_i and n are denominators of the loss, `dure.tasks.loss_shares`), in scaled form:

    x_i <- argmin f_i(x) + rho/2·|x - z + u_i|^2    H steps of the task's optimizer from its own x_i
    z   <- mean of x_i + u_i
    u_i <- u_i + x_i - z

The sum of f_i is N times the loss of all data. For a convex loss z therefore converges to the
minimum of the loss of all data, for any rho. Initially z and all x_i are the common initial
weights, and u_i = 0. The consensus z is evaluated and returned. With `duals=False` u_i stays 0:
FedProx's local loss with mu = rho, whose ranks never agree.

Two residuals are recorded in every round, both 0 if the ranks agree on a minimum (N ranks):

    primal   r = root of the sum over i of |x_i - z|^2
    dual     s = rho · root of N · |z - z before|

The sum of the u_i is 0. The sum of |x_i - z|^2 is therefore the sum of |x_i - z before|^2 less
N·|z - z before|^2: a single number from each rank suffices, to the precision of the message (in
float32 an r below 0.0003·s/rho is rounding). Adaptive rho: r > 10·s doubles rho and halves all u_i;
s > 10·r halves rho and doubles all u_i.

Each rank sends x_i + u_i as a vector, through a selectable all-reduce: one message of d elements a
round (`dure.averaging.synchronisation`). u_i and the optimizer's state stay on their rank.

Source: Boyd et al. 2011, "Distributed Optimization and Statistical Learning via the Alternating
Direction Method of Multipliers", sections 3.3, 3.4.1 and 7.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dure.arguments import above, at_least, check_ranges
from dure.averaging.replica import AveragedReplica, check_partition, copy_model, shards_of
from dure.averaging.synchronisation import Momentum, RoundSynchronisation, check_exchange
from dure.collectives.all_reduce import Algorithm
from dure.contracts.fresh_model import unused_copy
from dure.contracts.learner import Learner, StepResult
from dure.contracts.strategy import Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import RankContext, World
from dure.data import partition
from dure.data.batches import check_joint_batch
from dure.data.partition import IID, Partition
from dure.machine.devices import to_device
from dure.memory.formula import WHOLE, MemoryShares
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_own_batches
from dure.tasks.evaluation import evaluate
from dure.tasks.loss_shares import mean_over
from dure.tensors.buffers import (
    copy_buffers,
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)
from dure.tensors.flat import FlatParameters, check_no_shared_memory, trainable_by_name

BALANCE = 10.0
FACTOR = 2.0
"""Factor by which rho changes if a residual is more than `BALANCE` times the other."""


@dataclass(frozen=True)
class ADMM(Strategy):
    """Consensus ADMM whose local problems are solved by some steps of the task's optimizer.

    Args:
        batch_size: examples of a step over all workers together; None is all of a worker's data.
        rho: weight of the pull of workers to the consensus.
        adaptive: whether rho is doubled or halved while the residuals differ by more than ten
            times.
        local_epochs: passes of a worker over its data in a round.
        local_steps: steps of a worker in a round instead of epochs.
        duals: whether the duals are updated; without them it is FedProx's local loss.
        partition: how examples are divided over workers: iid, label-shards:2, dirichlet:0.5,
            quantity-skew:1, feature-skew:0.8 or blocks:2.
        momentum: effect of a synchronisation on the optimizer's state: keep, average, or reset.
        all_reduce: how the consensus is summed: ring, master, one_shot, tree, halving_doubling,
            hierarchical, native or auto.
        accumulate: number of micro-batches in which a worker computes a batch.
    """

    batch_size: int | None = 64
    rho: float = field(default=1.0, metadata=above(0, finite=True))
    adaptive: bool = True
    local_epochs: int = field(default=1, metadata=at_least(1))
    local_steps: int | None = field(default=None, metadata=at_least(1))
    duals: bool = True
    partition: Partition = field(default_factory=IID)
    momentum: Momentum = "keep"
    all_reduce: Algorithm = "ring"
    accumulate: int = field(default=1, metadata=at_least(1))

    name: ClassVar[str] = "admm"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="round",
        trains_with=ALL,
        own_data=True,
    )

    def __post_init__(self) -> None:
        parse_fields(self, {"partition": partition.parse})

    @property
    def label(self) -> str:
        default = ADMM()
        shown = {
            "E": "local_epochs",
            "steps": "local_steps",
            "partition": "partition",
            "momentum": "momentum",
        }
        parts = [
            f"{word}={getattr(self, name)}"
            for word, name in shown.items()
            if getattr(self, name) != getattr(default, name)
        ]
        rho = f"rho={self.rho:g}{' adaptive' if self.adaptive else ''}"
        return " ".join(["ADMM" if self.duals else "ADMM without duals", rho, *parts])

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check that the model can train on batches of this size and that no tensors overlap.

        Raises ValueError otherwise.
        """
        check_no_shared_memory(model)
        check_own_batches(task, model, self.batch_size, world.workers, self.accumulate)

    def shares(self, workers: int | None) -> MemoryShares | None:
        return WHOLE

    def batches_of_step(self, task: Task, workers: int | None) -> Fraction | None:
        return Fraction(1, workers or 1)

    def check(self, task: Task, world: World) -> None:
        check_joint_batch(self.batch_size, len(task.train), world.workers)
        check_ranges(self)
        check_exchange(self.all_reduce, self.momentum)
        check_partition(self.partition, task, world.workers)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return ADMMLearner(task, context, seed, self)


class ADMMLearner(Learner):
    """ADMM on a rank: x in the replica, z in `consensus`, u in `duals`."""

    rank_state_differs = True
    units_per_epoch = 1

    def __init__(self, task: Task, context: RankContext, seed: int, strategy: ADMM) -> None:
        self.task = task
        self.group = context.group
        self.strategy = strategy
        self.replica = AveragedReplica(task, context, seed, strategy.accumulate)
        self.shards = shards_of(self.replica, strategy.partition, strategy.batch_size)
        self.shard = self.shards[self.group.rank]
        self.consensus = unused_copy(self.replica.model, task, seed)
        self.z = FlatParameters(self.consensus)
        copy_model(self.replica.model, self.consensus)
        self.duals = [torch.zeros_like(buffer) for buffer in self.z.buffers]
        self.losses = self.replica.losses
        self.weight = self._weight()
        # further numbers: |x_i - z|^2, for the residuals; and the loss's denominator, if it does
        # not follow from the number of examples
        numbers = 1 if self.losses.is_alike else 2
        self.synchronisation = RoundSynchronisation(
            self.replica, context, strategy.all_reduce, strategy.momentum, numbers=numbers
        )
        self.rho = strategy.rho
        self.where = f"rank {self.group.rank}"
        self.round = 0

    def _weight(self) -> float:
        """Return N times this rank's share of the loss's total denominator."""
        counts = [self.losses.expected(shard.indices) for shard in self.shards]
        if self.losses.is_late:
            mine = self.replica.loss_count_of(self.shard.indices)
            rows = self.group.all_gather_values([mine], "what the loss counts")
            counts = [row[0] for row in rows]
        return self.group.size * counts[self.group.rank] / sum(counts) if any(counts) else 1.0

    def flops_per_step(self) -> float:
        return self.replica.flops_per_step(self.shard.batches.batch_size)

    def advance(self, control_flags: int) -> StepResult:
        """Run a round: the local problem, the consensus, the duals."""
        ranks = self.group.size
        round = self.round + 1
        asked = self.strategy
        # of every rank, because shards may have different lengths
        steps = [
            asked.local_steps or asked.local_epochs * shard.steps_per_pass for shard in self.shards
        ]
        counts = [
            shard.examples(self.round * own, own)
            for shard, own in zip(self.shards, steps, strict=True)
        ]
        own = steps[self.group.rank]
        steps_of_round = self.shard.steps(self.round * own, own)
        trained = self.replica.train(steps_of_round, self.weight, self._pull())
        numbers = [self._put_bodies()]
        if self.losses.is_alike:
            # this rank's share of the mean over all examples of the round
            loss = trained.loss * counts[self.group.rank] / sum(counts)
        else:
            loss = trained.total
            numbers.append(trained.counted)
        met = self.synchronisation.meet(1 / ranks, loss, control_flags, round, numbers=numbers)
        # the bodies are now sums over the ranks
        went = self._agree()
        # Rounding may leave the difference a little below zero.
        primal = math.sqrt(max(0.0, met.numbers[0] - ranks * went))
        # with the rho of this round; it is adapted afterwards
        dual = self.rho * math.sqrt(ranks * went)
        residuals = {"primal_residual": primal, "dual_residual": dual, "rho": self.rho}
        self._adapt(primal, dual)
        self.round = round
        mean = met.loss if self.losses.is_alike else mean_over(met.loss, met.numbers[1])
        return StepResult(mean, sum(counts), met.control_flags, residuals)

    def _pull(self) -> Callable[[Sequence[Tensor]], None]:
        """Return a function that adds the gradient of rho/2·|x - z + u|^2 to the gradients."""
        rho = self.rho
        # z - u is the same for all steps of the round: the pull is rho·(x - (z - u)).
        points = self.replica.views(
            [z - u for z, u in zip(self.z.buffers, self.duals, strict=True)]
        )

        def pull(parameters: Sequence[Tensor]) -> None:
            for parameter, point in zip(parameters, points, strict=True):
                # a new tensor, which may become the gradient
                away = (parameter.detach() - point).mul_(rho)
                gradient = parameter.grad
                parameter.grad = away if gradient is None else away.add_(gradient)

        return pull

    def _put_bodies(self) -> float:
        """Write (x + u - z)/N to the message; return |x - z|^2."""
        moved = 0.0
        weights = self.replica.flat.buffers
        for body, x, z, u in zip(
            self.synchronisation.bodies, weights, self.z.buffers, self.duals, strict=True
        ):
            torch.sub(x, z, out=body)
            # abs, because parameters may be complex
            moved += float(body.abs().square().sum())
            # z moves by the mean over ranks of x + u - z.
            body.add_(u).div_(self.group.size)
        return moved

    @torch.no_grad()
    def _agree(self) -> float:
        """Update z and the duals; return |z - z before|^2."""
        went = 0.0
        weights = self.replica.flat.buffers
        for body, x, z, u in zip(
            self.synchronisation.bodies, weights, self.z.buffers, self.duals, strict=True
        ):
            z.add_(body)
            went += float(body.abs().square().sum())
            if self.strategy.duals:
                u.add_(x).sub_(z)
        # After `meet` the buffers are equal on all ranks.
        copy_buffers(self.replica.model, self.consensus)
        return went

    def _adapt(self, primal: float, dual: float) -> None:
        if not self.strategy.adaptive:
            return
        # ranks disagree: pull harder; or the consensus moves too much: pull less
        if primal > BALANCE * dual:
            factor = FACTOR
        elif dual > BALANCE * primal:
            factor = 1 / FACTOR
        else:
            factor = 1.0
        self.rho *= factor
        for u in self.duals:  # the duals are scaled by 1/rho
            u.div_(factor)

    def evaluate(self) -> dict[str, float]:
        return evaluate(
            self.task,
            self.consensus,
            self.replica.test_examples,
            group=self.group,
            step=self.round,
        )

    def averaged_tensors(self) -> Mapping[str, Tensor]:
        return trainable_by_name(self.consensus)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.consensus.state_dict())

    def state(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "rho": self.rho,
            "buffers": non_persistent_buffers_of(self.consensus),
        }

    def part(self) -> dict[str, Any]:
        """Return this rank's weights, duals and optimizer state."""
        return {**self.replica.state(), "duals": self.duals}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.consensus, weights)
        load_non_persistent_buffers(self.consensus, state["buffers"])
        part = state["parts"][self.group.rank]
        self.replica.restore(weights, part)
        self.duals = to_device(list(part["duals"]), self.replica.device)
        # without compressors; the meeting records the loaded buffers
        self.synchronisation.restore([])
        self.round = state["round"]
        self.rho = state["rho"]

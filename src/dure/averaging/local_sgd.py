"""Local SGD: every rank makes H steps alone, then all continue from the mean of their weights.

    x_i <- x_i - step_i(gradient over rank i's part of the joint batch)    H times
    x_i <- x + sum over j of w_j·(x_j - x)        x: the weights at the beginning of the round

w_j is rank j's share of the round's examples, or of the loss's denominator
(`dure.tasks.loss_shares`): 1/N if the parts are equal. H = 1 without momentum is data parallelism.
*Post-local* SGD begins with H = 1 and uses longer rounds only from step `local_from` on, for
example after the first decay of the learning rate. Batch norm's statistics are averaged like the
weights; dropout is drawn from (seed, step, rank).

One message a round is sent (`dure.averaging.synchronisation`), through a selectable all-reduce: 1/H
of the messages of data parallelism. The optimizer's state stays on its rank, is averaged as well,
or is reset: `momentum`.

Sources: Stich 2019, "Local SGD Converges Fast and Communicates Little"; Lin et al. 2020, "Don't Use
Large Mini-Batches, Use Local SGD".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dure.arguments import at_least, check_ranges
from dure.averaging.replica import AveragedReplica
from dure.averaging.synchronisation import Momentum, RoundSynchronisation, check_exchange
from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression import Compression, NoCompression
from dure.collectives.compression import parse as parse_compression
from dure.contracts.learner import Learner, StepResult
from dure.contracts.strategy import Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import RankContext, World
from dure.data.batches import Batches, check_joint_batch
from dure.data.sampling import JOINT_SAMPLING
from dure.memory.formula import WHOLE, MemoryShares
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_pieces, check_rank_pieces
from dure.tasks.evaluation import evaluate
from dure.tasks.loss_shares import scale_of
from dure.tensors.buffers import (
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)
from dure.tensors.flat import check_no_shared_memory, trainable_by_name
from dure.tensors.optimizer_state import load_optimizer


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Ranks train separately for some steps, then average their weights.

    Args:
        batch_size: examples of a step over all workers together; None is all the data.
        period: H, the steps of a round.
        local_from: the step from which rounds have `period` steps; earlier rounds have a single
            step (post-local SGD).
        momentum: effect of a synchronisation on the optimizer's state: keep, average, or reset.
        all_reduce: how differences are summed: ring, master, one_shot, tree, halving_doubling,
            hierarchical, native or auto.
        compression: of the differences that are exchanged: none, cast:bfloat16, …
        accumulate: number of micro-batches in which a worker computes a batch.
    """

    batch_size: int | None = 64
    period: int = field(default=16, metadata=at_least(1))
    local_from: int = field(default=0, metadata=at_least(0))
    momentum: Momentum = "keep"
    all_reduce: Algorithm = "ring"
    compression: Compression = field(default_factory=NoCompression)
    accumulate: int = field(default=1, metadata=at_least(1))

    name: ClassVar[str] = "local-sgd"
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
        parts = [f"{'post-' if self.local_from else ''}local SGD H={self.period}"]
        parts += [f"momentum {self.momentum}"] if self.momentum != "keep" else []
        parts += [str(self.compression)] if self.compression.compresses else []
        return " ".join(parts)

    def shares(self, workers: int | None) -> MemoryShares | None:
        return WHOLE

    def batches_of_step(self, task: Task, workers: int | None) -> Fraction | None:
        return Fraction(1, workers or 1)

    def check(self, task: Task, world: World) -> None:
        check_joint_batch(self.batch_size, len(task.train), world.workers)
        check_ranges(self)
        check_exchange(self.all_reduce, self.momentum)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check that the model can train on batches of this size and that no tensors overlap.

        Raises ValueError otherwise.
        """
        check_no_shared_memory(model)
        check_pieces(task, model, self.batch_size, world.workers, self.accumulate)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return LocalSGDLearner(task, context, seed, self)

    def steps_of_round_at(self, step: int) -> int:
        """Return the number of steps of the round that begins at `step`."""
        return self.period if step >= self.local_from else 1


class LocalSGDLearner(Learner):
    """Local SGD on a rank.

    DiLoCo overrides `move`, which applies the mean difference.
    """

    rank_state_differs = True
    resizes = True  # an additional rank takes the optimizer state of a rank of the checkpoint

    def __init__(self, task: Task, context: RankContext, seed: int, strategy: LocalSGD) -> None:
        self.task = task
        self.group = context.group
        self.strategy = strategy
        self.replica = AveragedReplica(task, context, seed, strategy.accumulate)
        self.model = self.replica.model
        self.losses = self.replica.losses
        check_rank_pieces(
            self.model, self.replica.train_examples, strategy.batch_size, strategy.accumulate
        )
        self.batches = Batches(
            len(self.replica.train_examples),
            strategy.batch_size,
            seed,
            order=self.replica.train_examples.order(),
            drop_last=self.replica.train_examples.sampling.drop_last,
        )
        self.examples = self.batches.visited
        self.synchronisation = RoundSynchronisation(
            self.replica,
            context,
            strategy.all_reduce,
            strategy.momentum,
            compression=strategy.compression,
            numbers=int(self.losses.is_late),
        )
        # weights at the beginning of the round, bit-identical on all ranks
        self.common = self.replica.flat.copy()
        self.where = f"rank {self.group.rank}"
        self.step = self.round = 0

    @property
    def units_per_epoch(self) -> int:  # type: ignore[override]
        # from the present length of rounds, which grows with post-local SGD
        return max(1, self.batches.steps_per_epoch // self.strategy.steps_of_round_at(self.step))

    def flops_per_step(self) -> float:
        return self.replica.flops_per_step(-(-self.batches.batch_size // self.group.size))

    def advance(self, control_flags: int) -> StepResult:
        """Run a round: separate steps, then the mean."""
        steps = range(self.step, self.step + self.strategy.steps_of_round_at(self.step))
        # A generator: each batch is read only when its step comes.
        trained = self.replica.train(self._parts(steps))
        batches = [self.batches.at(step) for step in steps]
        # Of all ranks: each weighs by its denominator, also if the last batch of an epoch cannot be
        # divided evenly.
        expected = sum(map(self.losses.expected, batches))
        weight = trained.counted / expected if expected else 0.0
        # into the message itself: `bodies` are views of it
        for body, mine, common in zip(
            self.synchronisation.bodies, self.replica.flat.buffers, self.common, strict=True
        ):
            # Differences are small numbers of similar size: their sum is more precise than a sum of
            # weights.
            torch.sub(mine, common, out=body).mul_(weight)
        # If a loss only returns its denominator when computed, the total is known after `meet`.
        counted = [trained.counted] if self.losses.is_late else []
        met = self.synchronisation.meet(
            weight,
            weight * trained.loss,
            control_flags,
            self.round + 1,
            numbers=counted,
            scale=lambda heard: scale_of(expected, heard[0]) if counted else 1.0,
        )
        self.move(self.synchronisation.bodies)
        # All ranks have added the same sums to the same weights.
        self.replica.flat.load(self.common)
        self.step = steps.stop
        self.round = self.round + 1
        something = met.numbers[0] if counted else expected
        return StepResult(
            met.loss if something else None, sum(map(len, batches)), met.control_flags
        )

    def _parts(self, steps: range) -> Iterator[tuple[int, Tensor]]:
        """Yield each step with this rank's part of its joint batch."""
        for step in steps:
            batch = self.batches.at(step)
            yield step, self.replica.train_examples.part(batch, self.group.rank, self.group.size)

    def move(self, differences: Sequence[Tensor]) -> None:
        """Update the common weights after a round.

        Differences: weighted means of the ranks' changes.
        """
        for common, difference in zip(self.common, differences, strict=True):
            common.add_(difference)

    def evaluate(self) -> dict[str, float]:
        return evaluate(
            self.task, self.model, self.replica.test_examples, group=self.group, step=self.round
        )

    def averaged_tensors(self) -> Mapping[str, Tensor]:
        return trainable_by_name(self.model)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "round": self.round,
            "buffers": non_persistent_buffers_of(self.model),
        }

    def part(self) -> dict[str, Any]:
        """Return this rank's optimizer state and the residuals of its compressors."""
        return {
            "optimizer": self.replica.optimizer.state_dict(),
            "compressors": self.synchronisation.state(),
            **self.replica.scaling.state(),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self.common = self.replica.flat.copy()
        self.step = state["step"]
        self.round = state["round"]
        # The world may have grown: a new rank takes the optimizer state of an existing rank.
        part = state["parts"][self.group.rank % len(state["parts"])]
        load_optimizer(self.replica.optimizer, part["optimizer"])
        self.synchronisation.restore(part["compressors"])
        self.replica.scaling.restore(part)

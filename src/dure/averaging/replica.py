"""A rank's own model and optimizer, and its separate steps between two synchronisations.

The data can be divided in two ways. *Joint batches*: step t of all ranks together has a batch that
is a function of (seed, t) alone, of which every rank takes its part, as in data parallelism; the
ranks therefore use the same examples as one worker. *Shards*: the data are divided once, and every
rank makes passes over its own part, in its own order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for
from dure.contracts.lr_schedule import ScheduledRates
from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.data.batches import Batches
from dure.data.block_shuffling import Order
from dure.data.examples import Examples, reader_on
from dure.data.partition import IID, Partition
from dure.parallel.weight_broadcast import share_weights
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.record.meter import device_spans, step_clock
from dure.tasks.batch_norm import needs_two
from dure.tasks.flops import flops_per_step
from dure.tasks.gradient_accumulation import accumulate_gradient
from dure.tasks.gradient_transforms import GradientTransforms, forward_context
from dure.tasks.loss_scaling import loss_scaling_of
from dure.tasks.loss_shares import CountedLoss, loss_and_count
from dure.tensors.buffers import BufferNames, copy_buffers, load_weights
from dure.tensors.flat import FlatParameters, by_dtype, trainable_parameters, views_of
from dure.tensors.optimizer_state import load_optimizer


class LocalSteps(NamedTuple):
    """Result of a rank's separate steps.

    loss: mean over its denominator; not finite if a loss or the weights were not. counted: the
    loss's denominator (`dure.tasks.loss_shares`), usually the number of examples.
    """

    loss: float
    counted: float

    @property
    def total(self) -> float:
        """Loss times its denominator: totals and denominators of ranks can be added."""
        return self.loss * self.counted if self.counted else self.loss


class AveragedReplica:
    """A rank's model, in a flat buffer for each dtype, and its optimizer.

    Initially both are equal on every rank.
    """

    def __init__(self, task: Task, context: RankContext, seed: int, accumulate: int = 1) -> None:
        self.device = context.device
        self.task = task = task.on(self.device)
        self.accumulate = accumulate
        self.group = context.group
        self.seed = seed
        self.spans = device_spans(self.group.meter, self.device)
        self.model = context.model(task, seed).train()
        # Before the optimizer is created and weights are broadcast: parameters become views of the
        # flat buffers here.
        self.flat = FlatParameters(self.model)
        self.buffers = BufferNames(self.model)
        # in the order of the flat buffers
        groups = by_dtype(trainable_parameters(self.model)).values()
        self.trained = [parameter for group in groups for parameter in group]
        self.optimizer = task.optimizer(self.model.parameters())
        self.rates = ScheduledRates(self.optimizer, task.lr_schedule)
        self.scaling = loss_scaling_of(task, f"rank {self.group.rank}", self.device)
        self.trimming = GradientTransforms(task, self.model.named_parameters())
        share_weights(self.model, self.group)
        # the initial state of the optimizer, which is usually empty
        self._fresh = copy.deepcopy(self.optimizer.state_dict())
        train, self.test_examples = examples_for(task)
        self.hold(train)

    def hold(self, examples: Examples) -> None:
        """Train on these examples from now on; indices refer to them."""
        self.train_examples = examples
        self.read = reader_on(examples, self.device)
        self.losses = CountedLoss(self.task.loss, examples)

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return views of vectors like `flat.buffers`, in the shapes of trained parameters."""
        groups = by_dtype(self.trained).values()
        views: list[Tensor] = []
        for buffer, group in zip(buffers, groups, strict=True):
            views += views_of(buffer, group)
        return views

    def flops_per_step(self, batch: float) -> float:
        return flops_per_step(self.model, self.train_examples, batch)

    def train(
        self,
        batches: Iterable[tuple[int, Tensor]],
        share: float = 1.0,
        adjust: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> LocalSteps:
        """Make a step of the optimizer on each of `batches`; an empty batch makes no step.

        batches: pairs of the step's number and the examples' indices. share: factor of the loss's
        gradient. adjust: changes the gradients before the optimizer sees them. Ends early at a loss
        that is not finite.
        """
        total = 0.0
        counted = 0.0
        for step, indices in batches:
            if len(indices) == 0:
                continue
            loss, count = self._step(step, indices, share, adjust)
            counted += count
            # Further steps would only cost time; the other ranks learn of the loss in `meet`.
            if not math.isfinite(loss):
                return LocalSteps(loss, counted)
            total += loss * count
        if not self._is_finite():
            return LocalSteps(math.nan, counted)
        return LocalSteps(total / counted if counted else 0.0, counted)

    def _step(
        self,
        step: int,
        indices: Tensor,
        share: float,
        adjust: Callable[[Sequence[Tensor]], None] | None,
    ) -> tuple[float, float]:
        """Run forward, backward and update.

        Return the mean loss before the update, and its denominator.
        """
        seed_generators(
            self.seed, "step", step, self.group.rank, everything=self.train_examples.draws
        )
        clock = step_clock(self.group.meter, self.spans, step + 1)
        self.optimizer.zero_grad(set_to_none=True)

        def backward(loss: Tensor) -> None:
            clock.did("forward")
            weighted = loss if share == 1.0 else loss * share
            self.scaling.scaled(weighted).backward()  # type: ignore[no-untyped-call]
            clock.did("backward")

        learned = accumulate_gradient(
            self.losses,
            indices,
            self.accumulate,
            read=self.read,
            forward=self.model,
            computing=lambda *given: forward_context(self.task, self.device),
            backward=backward,
            parameters=self.trained,
        )
        clock.read()
        self.scaling.unscale(self.trained)
        if adjust is not None:
            adjust(self.trained)
        # After `adjust`: the pull to a common point is clipped too.
        self.trimming.at(step)
        self.rates.at(step)
        self.scaling.step(self.optimizer)
        clock.did("update")
        return learned.loss, learned.counted

    @torch.no_grad()
    def loss_count_of(self, indices: Tensor) -> float:
        """Return the loss's denominator for these examples, if it needs a forward pass."""
        before = generators_state()
        self.model.eval()
        counted = 0.0
        for part in torch.split(indices, self.task.eval_batch_size):
            inputs, targets = self.read(part)
            outputs = self.model(inputs)
            counted += loss_and_count(self.task.loss, outputs, targets, len(part))[1]
        self.model.train()
        restore_generators(before)
        return counted

    def reset_optimizer(self) -> None:
        """Reset the optimizer's state, such as momentum, and step-dependent settings of its groups.

        A schedule sets the learning rates again before the next step.
        """
        self.optimizer.load_state_dict(copy.deepcopy(self._fresh))

    def state(self) -> dict[str, Any]:
        """Return the weights, buffers and optimizer state of this rank."""
        return {
            "weights": self.flat.buffers,
            "buffers": self.buffers.of(self.model),
            "optimizer": self.optimizer.state_dict(),
            **self.scaling.state(),
        }

    @torch.no_grad()
    def restore(self, common: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore a `state`. common: a state_dict with the parameters that are not trained."""
        # First the common weights, then this rank's own.
        load_weights(self.model, common)
        self.flat.load(state["weights"])
        self.buffers.load(self.model, state["buffers"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.scaling.restore(state)

    def _is_finite(self) -> bool:
        """Return whether the weights are finite, which the last step's loss does not show."""
        return all(
            # A sum is cheap, and finite unless an element is not, or the sum overflows: only then
            # all elements are tested.
            bool(buffer.sum().isfinite()) or bool(buffer.isfinite().all())
            for buffer in self.flat.buffers
        )


class DataShard:
    """A rank's own examples.

    Args:
        indices: Indices of the examples, int64 of shape (n,).
        batch_size: Examples of a step of this rank; None is all of them.
        seed: Seed of the order.
        rank: The rank, whose order differs from the order of other ranks.
        joins: As in `batches_per_epoch`.
        order: As in `Batches`.
    """

    def __init__(
        self,
        indices: Tensor,
        batch_size: int | None,
        seed: int,
        rank: int,
        joins: bool = False,
        order: Order | None = None,
    ) -> None:
        self.indices = indices
        self.n = len(indices)
        self.batches = Batches(len(indices), batch_size, seed, rank, joins, order)
        self.steps_per_pass = self.batches.steps_per_epoch

    def steps(self, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (number, indices of examples) of `count` steps from number `first` on.

        After the last batch of a pass comes the first batch of the next pass.
        """
        for step in range(first, first + count):
            yield step, self.indices[self.batches.at(step)]

    def examples(self, first: int, count: int) -> int:
        """Return the number of examples in `count` steps from number `first` on."""
        return self._until(first + count) - self._until(first)

    def _until(self, step: int) -> int:
        passes, steps = divmod(step, self.steps_per_pass)
        # A pass has all n examples, though its last batch may be smaller.
        return passes * self.n + min(steps * self.batches.batch_size, self.n)


def shards_of(
    replica: AveragedReplica, partition: Partition, batch_size: int | None
) -> list[DataShard]:
    """Return the shards of all ranks, which every rank computes alike.

    batch_size: of all ranks together; a rank has the N-th part, rounded up.
    """
    train = replica.train_examples
    ranks = replica.group.size
    parts = train.parts()
    if parts is None:
        parts = partition.divide(ranks, train, replica.seed)
    return shards_from(replica, parts, batch_size)


def shards_from(
    replica: AveragedReplica, parts: Iterable[Tensor], batch_size: int | None
) -> list[DataShard]:
    """Return the shards of given parts: for each rank, the indices of its examples."""
    train = replica.train_examples
    seed = replica.seed
    own = None if batch_size is None else -(-batch_size // replica.group.size)
    joins = needs_two(replica.model, train, train.first)
    return [
        DataShard(part, own, seed, rank, joins, train.order(part))
        for rank, part in enumerate(parts)
    ]


def check_partition(partition: Partition, task: Task, workers: int | None) -> None:
    """Check that the training data can be divided over the workers in this way.

    Raises ValueError otherwise.
    """
    if task.train.rank_counts is not None:
        if partition != IID():
            raise ValueError(
                f"each rank has its own training data, so {partition} has nothing to divide: "
                "leave the partition out"
            )
    elif workers is not None:
        partition.divide(workers, task.train)


@torch.no_grad()
def copy_model(source: nn.Module, target: nn.Module) -> None:
    """Copy the source's parameters and buffers to the target."""
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(theirs)
    copy_buffers(source, target)

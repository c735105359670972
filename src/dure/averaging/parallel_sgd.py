"""Parallel SGD: shuffle, divide, train separately, combine the models once, or repeatedly.

    the examples are divided over the ranks once, at random: rank i has n_i of n
    x_i <- P passes over its own examples, by the task's optimizer   all from the same x
    x   <- sum over i of (n_i/n)·x_i                          combine="average"
    x   <- the x_i with the least loss on all training data   combine="best"

n_i and n are the denominators of the loss in a pass (`dure.tasks.loss_shares`), usually the number
of examples. For convex losses the average has about 1/N of the variance of a single x_i. The loss
of a deep network is not convex: from common initial weights the average is often better than each
x_i, from different initial weights it is worse than any x_i.

*Once* (combine_every=None): P is all the passes of the run. A round is a pass, in steps
of `batch_size`/N examples, rounded up. The ranks combine when the run ends. Evaluations and
checkpoints during the run combine too, without an effect on the training.

*Repeated* (combine_every=P): a round is P passes and ends with the combination, from which all
ranks continue, with a reset optimizer. With the average this is FedAvg in which all clients take
part in every round (C = 1, E = P).

*Shuffle*: the algorithm assumes that each rank's examples represent all the data. If the data
are divided in another way (`partition`), examples are exchanged in the first round:
`dure.averaging.shuffle`.

A combination sends d elements: through an all-reduce for the average; for the best model, a loss
from each rank and a broadcast of the model. In a run that combines once, combinations before the
end are part of the measurement, so only the first combination is counted. Ranks also exchange a few
numbers a round, for common stops, checkpoints and losses, which are not counted. The bytes and
seconds of the shuffle are counted once: a resumed run repeats it, uncounted.

Sources: Zinkevich et al. 2010, "Parallelized Stochastic Gradient Descent" (SimuParallelSGD);
McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(repeated).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dure.arguments import at_least, check_ranges
from dure.averaging.replica import (
    AveragedReplica,
    DataShard,
    check_partition,
    copy_model,
    shards_from,
    shards_of,
)
from dure.averaging.shuffle import check_movable, shuffle_counts, shuffle_examples
from dure.averaging.synchronisation import check_exchange, difference, pack_message
from dure.collectives.all_gather import all_gather
from dure.collectives.all_reduce import Algorithm, all_reduce
from dure.collectives.group import Group
from dure.contracts.fresh_model import unused_copy
from dure.contracts.learner import Learner, StepResult
from dure.contracts.metric import ratio
from dure.contracts.strategy import Feature, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import Kind, RankContext, World
from dure.data import partition
from dure.data.batches import check_joint_batch
from dure.data.examples import reader_on
from dure.data.partition import IID, Partition
from dure.data.sampling import SEPARATE_SAMPLING
from dure.errors import LossNotFiniteError
from dure.memory.formula import WHOLE, MemoryShares
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_own_batches
from dure.tasks.evaluation import evaluate
from dure.tasks.loss_shares import loss_and_count
from dure.tasks.modes import in_mode
from dure.tensors.buffers import (
    BufferNames,
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
    write,
)
from dure.tensors.flat import FlatParameters, check_no_shared_memory, trainable_by_name

Combination = Literal["average", "best"]


@dataclass(frozen=True)
class ParallelSGD(Strategy):
    """Ranks train separately, each on its own part of the data, and combine their models.

    Args:
        batch_size: examples of a step over all workers together; None is all of a worker's data.
        combine: average of the weights, or best: the model with the least loss on all training
            data.
        partition: how examples are divided over workers: iid, label-shards:2, dirichlet:0.5,
            quantity-skew:1, feature-skew:0.8 or blocks:2.
        all_reduce: how the average is summed: ring, master, one_shot, tree, halving_doubling,
            hierarchical, native or auto.
        shuffle: whether examples are exchanged at first, so that each worker has a sample of all.
        combine_every: passes after which the models are combined, and all workers continue from the
            result; None combines once, at the end.
        accumulate: number of micro-batches in which a worker computes a batch.
    """

    batch_size: int | None = 64
    combine: Combination = "average"
    partition: Partition = field(default_factory=IID)
    all_reduce: Algorithm = "ring"
    shuffle: bool = False
    combine_every: int | None = field(default=None, metadata=at_least(1))
    accumulate: int = field(default=1, metadata=at_least(1))

    name: ClassVar[str] = "parallel-sgd"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="round",
        trains_with=ALL,
        samples=SEPARATE_SAMPLING,
        own_data=True,
    )

    def __post_init__(self) -> None:
        parse_fields(self, {"partition": partition.parse})

    @property
    def label(self) -> str:
        parts = ["parallel SGD", self.combine]
        parts += [] if self.combine_every is None else [f"every {self.combine_every}"]
        parts += [] if self.partition == IID() else [str(self.partition)]
        parts += ["shuffled"] if self.shuffle else []
        return " ".join(parts)

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
        check_exchange(self.all_reduce, "keep")
        check_partition(self.partition, task, world.workers)
        if self.combine not in get_args(Combination):
            raise ValueError(
                f"combine is {self.combine!r}; choose one of {', '.join(get_args(Combination))}"
            )
        if self.shuffle:
            check_movable(task.train)
            for way in sorted(task.train.sampling.asks):
                raise ValueError(
                    f"shuffle moves examples between ranks, but {way} depends on their original "
                    "places: leave one of the two out"
                )
        if self.combine == "best" and task.train.rank_counts is not None:
            raise ValueError(
                "combine=best chooses the model with the least loss on all training data, but "
                "each rank has only its own data: use combine=average"
            )

    def parts(self, task: Task, seed: int, workers: int | None) -> Sequence[Tensor]:
        """Return the shards of all ranks; empty if the ranks have data of their own."""
        if task.train.rank_counts is not None or workers is None:
            return ()
        return self.partition.divide(workers, task.train, seed)

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "ema" and self.combine_every is None:
            return (
                "its models are combined only once, at the end, so there is nothing to average: "
                "give combine_every"
            )
        return super().cannot(feature, kind)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return ParallelSGDLearner(task, context, seed, self)


class _Told(NamedTuple):
    """Numbers that a rank sends to the others at the end of a pass.

    total: sum of the loss over its denominator `counted`. arrival: seconds on rank 0's clock.
    """

    total: float
    counted: float
    control_flags: float
    arrival: float


class ParallelSGDLearner(Learner):
    """Parallel SGD on a rank. `combined` is the model that is evaluated and returned."""

    rank_state_differs = True
    units_per_epoch = 1

    def __init__(self, task: Task, context: RankContext, seed: int, strategy: ParallelSGD) -> None:
        self.task = task
        self.group = context.group
        self.strategy = strategy
        self.replica = AveragedReplica(task, context, seed, strategy.accumulate)
        self.all_examples = self.replica.train_examples
        self.initial_shards = shards_of(self.replica, strategy.partition, strategy.batch_size)
        self.shards = self.initial_shards
        self.is_mixed = not strategy.shuffle
        self.passes = strategy.combine_every or 1
        self.combined = unused_copy(self.replica.model, task, seed)
        self.flat = FlatParameters(self.combined)
        copy_model(self.replica.model, self.combined)
        self.buffers = BufferNames(self.combined)
        self._note_buffers()
        # the loss's denominator on each rank in the last pass
        self.passed = [float(shard.n) for shard in self.shards]
        self.clock_offset = context.clock_offset
        self.where = f"rank {self.group.rank}"
        self.round = self.combined_at = 0
        self.counted = False

    @property
    def shard(self) -> DataShard:
        """This rank's own examples, in the present division."""
        return self.shards[self.group.rank]

    def _note_buffers(self) -> None:
        """Store copies of the common buffers: averages are taken over changes since then."""
        buffers = self.buffers.of(self.combined)
        self.first = [buffer.clone() for buffer in buffers if buffer.is_floating_point()]

    def flops_per_step(self) -> float:
        return self.replica.flops_per_step(self.shard.batches.batch_size)

    def advance(self, control_flags: int) -> StepResult:
        """Run passes of every rank over its own examples, and combine if that is repeated."""
        if not self.is_mixed:
            self._shuffle()
        # Shards may have different lengths: a pass has as many steps as its shard needs.
        steps = self.passes * self.shard.steps_per_pass
        trained = self.replica.train(self.shard.steps(self.round * steps, steps))
        entered = time.perf_counter()
        told = _Told(
            trained.total, trained.counted, float(control_flags), entered + self.clock_offset
        )
        # Passes of unequal shards end at different times: all ranks wait for the last here.
        rows = self.group.all_gather_values(list(told), "the end of a pass")
        heard = [_Told(*row) for row in rows]
        arrival = max(one.arrival for one in heard) - self.clock_offset
        self.group.meter.communication(
            "end of a pass", entered, time.perf_counter(), self.round + 1, arrival=arrival
        )
        for rank, one in enumerate(heard):
            if not math.isfinite(one.total):
                raise LossNotFiniteError(
                    one.total, f"rank {rank}", f"round {self.round + 1}", intact=False
                )
        self.round += 1
        self.passed = [one.counted for one in heard]
        counted = sum(self.passed)
        mean = sum(one.total for one in heard) / counted if counted else None
        if self.strategy.combine_every is not None:
            self._go_on_from_combined()
        return StepResult(mean, self.passes * len(self.all_examples), int(heard[0].control_flags))

    def _shuffle(self) -> None:
        """Exchange examples, and report the exchange to the meter."""
        started = time.perf_counter()
        before = self.group.meter.counters.bytes_sent
        self._exchange(self.group)
        ended = time.perf_counter()
        sent = self.group.meter.counters.bytes_sent - before
        self.group.meter.communication("shuffle", started, ended, self.round + 1)
        self.group.meter.shuffled(sent, ended - started)

    def _exchange(self, group: Group) -> None:
        """Exchange examples, so that each rank has the examples that it trains on."""
        seed = self.replica.seed
        counts = [shard.n for shard in self.initial_shards]
        own = self.initial_shards[group.rank].indices
        self.replica.hold(shuffle_examples(self.all_examples, own, counts, seed, group))
        # Of other ranks only the number of examples is known, which is enough.
        sizes = map(sum, zip(*shuffle_counts(counts), strict=True))
        parts = map(torch.arange, sizes)
        self.shards = shards_from(self.replica, parts, self.strategy.batch_size)
        self.is_mixed = True

    @torch.no_grad()
    def _go_on_from_combined(self) -> None:
        """Load the combined model on all ranks, and reset the optimizers."""
        copy_model(self.combine(), self.replica.model)
        self.replica.reset_optimizer()
        self._note_buffers()

    @torch.no_grad()
    def combine(self) -> nn.Module:
        """Return the present combined model; all ranks call this method together.

        The meter counts combinations that end a round; in a run that combines once, only the first.
        """
        # Evaluation and saving in the same round share a combination.
        if self.combined_at == self.round:
            return self.combined
        # Combinations without an effect on training are part of the measurement, except the first.
        is_counted = self.strategy.combine_every is not None or not self.counted
        group = self.group if is_counted else self.group.unmetered()
        started = time.perf_counter()
        # The rank's own model stays unchanged: a copy is combined.
        copy_model(self.replica.model, self.combined)
        (self._average if self.strategy.combine == "average" else self._best)(group)
        if is_counted:
            self.group.meter.communication("combination", started, time.perf_counter(), self.round)
        self.counted = True
        self.combined_at = self.round
        return self.combined

    def _average(self, group: Group) -> None:
        """Average weights and floating-point buffers with weights.

        Take other buffers from rank 0.
        """
        buffers = self.buffers.of(self.combined)
        means = [buffer for buffer in buffers if buffer.is_floating_point()]
        changes = [difference(now, first) for now, first in zip(means, self.first, strict=True)]
        # without a trailer: the ranks exchanged their numbers at the end of the pass
        message, views, _ = pack_message([*self.flat.buffers, *changes], 0, group)
        share = self._share()
        for view, content in zip(views, [*self.flat.buffers, *changes], strict=True):
            torch.mul(content, share, out=view)
        for buffer in message:
            all_reduce(buffer, group, self.strategy.all_reduce)
        weights = len(self.flat.buffers)
        self.flat.load(views[:weights])
        for mean, first, change in zip(means, self.first, views[weights:], strict=True):
            write(mean, first + change)
        group.broadcast_values([buffer for buffer in buffers if not buffer.is_floating_point()])

    def _share(self) -> float:
        """Return this rank's weight in the average."""
        # If the denominator is 0 on all ranks, nothing was learned: weigh by examples.
        sizes = self.passed if any(self.passed) else [shard.n for shard in self.shards]
        return sizes[self.group.rank] / sum(sizes)

    def _best(self, group: Group) -> None:
        """Load the model of the rank with the least loss on all training data.

        The first of equals.
        """
        mine = torch.tensor([self._loss()], dtype=torch.float64)
        losses = all_gather(mine, group).flatten().tolist()
        # nan sorts last: a diverged model is only the best if all have diverged
        best = min(range(group.size), key=lambda rank: (math.isnan(losses[rank]), losses[rank]))
        group.broadcast_values([*self.flat.buffers, *self.buffers.of(self.combined)], root=best)

    def _loss(self) -> float:
        """Return the loss of this rank's model on all training data."""
        total = 0.0
        counted = 0.0
        examples = self.all_examples
        read = reader_on(examples, self.replica.device)
        # Without dropout, and without changes to buffers.
        with in_mode(self.combined, training=False):
            for indices in torch.split(torch.arange(len(examples)), self.task.eval_batch_size):
                inputs, targets = read(indices)
                loss, count = loss_and_count(
                    self.task.loss, self.combined(inputs), targets, len(indices)
                )
                total += loss
                counted += count
        return ratio(total, counted)

    def evaluate(self) -> dict[str, float]:
        return evaluate(
            self.task,
            self.combine(),
            self.replica.test_examples,
            group=self.group,
            step=self.round,
        )

    def averaged_tensors(self) -> Mapping[str, Tensor]:
        return trainable_by_name(self.combined)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.combine().state_dict())

    def state(self) -> dict[str, Any]:
        buffers = non_persistent_buffers_of(self.combine())
        return {"round": self.round, "counted": self.counted, "buffers": buffers}

    def part(self) -> dict[str, Any]:
        """Return this rank's model and optimizer state."""
        return self.replica.state()

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.combined, weights)
        load_non_persistent_buffers(self.combined, state["buffers"])
        # the rank's own model, which differs from the combined model
        self.replica.restore(weights, state["parts"][self.group.rank])
        # the loaded weights are the combination of that round
        self.round = self.combined_at = state["round"]
        self.counted = state["counted"]
        if self.strategy.combine_every is not None:
            self._note_buffers()
        # Received examples are in no checkpoint: they are exchanged again.
        if self.strategy.shuffle:
            self._exchange(self.group.unmetered())

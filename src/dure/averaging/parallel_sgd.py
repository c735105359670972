"""Parallel SGD: shuffle, divide, train apart to the end, combine the models once; or repeat that.

    the examples are divided over the ranks once, at random: rank i has n_i of n
    x_i <- P passes over its own examples, by the task's optimizer   all from the same x
    x   <- sum over i of (n_i/n)·x_i                          combine="average"
    x   <- the x_i with the least loss on all training data   combine="best"

n_i and n are what the loss counts in a pass (`dure.tasks.loss_shares`), the examples where each
counts one. For convex losses the average has about 1/N of the variance of a single x_i. The loss of
a deep network is not convex: from common first weights the average is often better than its parts,
from different ones it is worse than any.

*Once* (combine_every=None): P is all the passes of the run. A round is one of them, in steps of
`batch_size`/N examples, rounded up. The ranks combine when the run ends. If the model is evaluated
or written down on the way, it is combined for that as well, which changes nothing in the training.

*Repeated* (combine_every=P): a round is P passes and ends with the combination, from which all
ranks go on, with an optimizer that has forgotten its state. With the average that is FedAvg in
which all clients take part in every round (C = 1, E = P).

*Shuffle*: the rule wants ranks of which each represents the whole. Where the data were born
otherwise (`partition`), their examples travel in the first round: `dure.averaging.shuffle`.

What travels: d elements a combination: through an all-reduce for the average, for the best one loss
a rank and a broadcast by its rank. Of a run that combines once, a combination on the way belongs to
the measurement, so only the first one is counted. That ranks end and write checkpoints together,
and know one another's losses, takes a few numbers a round, which are not counted either. The
shuffle's bytes and seconds are counted, once: a run that is resumed does it again, uncounted.

Sources: Zinkevich et al. 2010, "Parallelized Stochastic Gradient Descent" (SimuParallelSGD);
McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(repeated).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dure.averaging.meeting import check_exchange, difference, packed
from dure.averaging.replica import (
    Replica,
    Shard,
    check_partition,
    copy_model,
    shards_from,
    shards_of,
)
from dure.averaging.shuffle import check_movable, dealt, shuffled
from dure.collectives.all_gather import all_gather
from dure.collectives.all_reduce import Algorithm, all_reduce
from dure.collectives.group import Group
from dure.contracts.learning import ALL, Part
from dure.contracts.metric import ratio
from dure.contracts.strategy import Kind, Learner, Place, Progress, Strategy, another
from dure.contracts.task import Task
from dure.data import partition
from dure.data.batches import check_joint_batch
from dure.data.partition import IID, Partition
from dure.data.sampling import APART, Way
from dure.errors import LossNotFiniteError
from dure.memory.formula import WHOLE, Shares
from dure.record.meter import Meter
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_own_batches
from dure.tasks.evaluation import evaluate
from dure.tasks.loss_shares import loss_and_count
from dure.tasks.modes import in_mode
from dure.tasks.pieces import check_accumulate
from dure.tensors.buffers import Buffers, load_passing_buffers, load_weights, passing_buffers, write
from dure.tensors.flat import FlatParameters, check_apart, trained_in

Combination = Literal["average", "best"]


@dataclass(frozen=True)
class ParallelSGD(Strategy):
    """Ranks train apart, each on its own part of the data, and combine their models.

    Args:
        batch_size: examples of a step over all workers together; None is all of a worker's data.
        combine: average of the weights, or best: the model with the least loss on all training
            data.
        partition: how examples are divided over workers: iid, label-shards:2, dirichlet:0.5,
            quantity-skew:1, feature-skew:0.8 or blocks:2.
        all_reduce: how the average is summed: ring, master, one_shot, tree, halving_doubling,
            hierarchical, native or auto.
        shuffle: whether the parts' examples are exchanged at first, so that each worker has a
            sample of all.
        combine_every: passes after which the models are combined, and all workers go on from that;
            None combines once, at the end.
        accumulate: pieces in which a worker computes a batch, one after another.
    """

    batch_size: int | None = 64
    combine: Combination = "average"
    partition: Partition = field(default_factory=IID)
    all_reduce: Algorithm = "ring"
    shuffle: bool = False
    combine_every: int | None = None
    accumulate: int = 1

    name: ClassVar[str] = "parallel-sgd"
    kind: ClassVar[Kind] = "ranks"
    unit: ClassVar[str] = "round"
    own_data: ClassVar[bool] = True
    trains_with: ClassVar[frozenset[Part]] = ALL
    samples: ClassVar[frozenset[Way]] = APART

    def __post_init__(self) -> None:
        parse_fields(self, {"partition": partition.parse})

    @property
    def label(self) -> str:
        parts = ["parallel SGD", self.combine]
        parts += [] if self.combine_every is None else [f"every {self.combine_every}"]
        parts += [] if self.partition == IID() else [str(self.partition)]
        parts += ["shuffled"] if self.shuffle else []
        return " ".join(parts)

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Raises ValueError for batches that the model cannot train on, or shared memory."""
        check_apart(model)
        check_own_batches(task, model, self.batch_size, workers, self.accumulate)

    def shares(self, workers: int | None) -> Shares | None:
        return WHOLE

    def check(self, task: Task, workers: int | None) -> None:
        check_joint_batch(self.batch_size, len(task.train), workers)
        check_accumulate(self.accumulate)
        check_exchange(self.all_reduce, "keep")
        check_partition(self.partition, task, workers)
        if self.combine not in get_args(Combination):
            raise ValueError(
                f"combine is {self.combine!r}; choose one of {', '.join(get_args(Combination))}"
            )
        if self.combine_every is not None and self.combine_every < 1:
            raise ValueError(
                f"combine_every is {self.combine_every}, but models are combined after at least "
                f"one pass"
            )
        if self.shuffle:
            check_movable(task.train)
            for way in sorted(task.train.sampling.asks):
                raise ValueError(
                    f"shuffle moves examples between ranks, and {way} is about where they lay: "
                    f"leave out one of the two"
                )
        if self.combine == "best" and task.train.lies is not None:
            raise ValueError(
                "the best model is the one with the least loss on all training data, and these lie "
                "with the ranks, each its own: take combine=average"
            )

    def parts(self, task: Task, seed: int, workers: int | None) -> Sequence[Tensor]:
        """The shards of all ranks, where these do not have data of their own."""
        if task.train.lies is not None or workers is None:
            return ()
        return self.partition.divide(workers, task.train, seed)

    def cannot(self, part: Part, kind: Kind) -> str | None:
        if part == "ema" and self.combine_every is None:
            return (
                "its models are combined once, at the end, and there is no average of one: take "
                "combine_every"
            )
        return super().cannot(part, kind)

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return ParallelSGDLearner(task, place, seed, self)


class _Told(NamedTuple):
    """What a rank tells the others at the end of a pass.

    total: of the loss, over what it has counted. arrival: seconds on rank 0's clock.
    """

    total: float
    counted: float
    wish: float
    arrival: float


class ParallelSGDLearner(Learner):
    """Parallel SGD at work on one rank. `combined` is the model that is evaluated and returned."""

    unit = "round"
    parted = True
    units_per_epoch = 1

    def __init__(self, task: Task, place: Place, seed: int, strategy: ParallelSGD) -> None:
        self.task = task
        self.group = place.group
        self.strategy = strategy
        self.replica = Replica(task, place, seed, strategy.accumulate)
        self.all_examples = self.replica.train_examples
        self.born = shards_of(self.replica, strategy.partition, strategy.batch_size)
        self.shards = self.born
        self.is_mixed = not strategy.shuffle
        self.passes = strategy.combine_every or 1
        self.combined = another(self.replica.model, task, seed)
        self.flat = FlatParameters(self.combined)
        copy_model(self.replica.model, self.combined)
        self.buffers = Buffers(self.combined)
        self._note_buffers()
        # what the loss has counted on each rank in the last pass
        self.passed = [float(shard.n) for shard in self.shards]
        self.clock_offset = place.clock_offset
        self.where = f"rank {self.group.rank}"
        self.round = self.combined_at = 0
        self.counted = False

    @property
    def shard(self) -> Shard:
        """This rank's own examples, as they are divided now."""
        return self.shards[self.group.rank]

    def _note_buffers(self) -> None:
        """Remembers buffers that all ranks have: what is averaged are changes since then."""
        buffers = self.buffers.of(self.combined)
        self.first = [buffer.clone() for buffer in buffers if buffer.is_floating_point()]

    def flops_per_step(self) -> float:
        return self.replica.flops_per_step(self.shard.batches.batch_size)

    def advance(self, wish: int) -> Progress:
        """Passes of every rank over its own examples; where it is repeated, the combination."""
        if not self.is_mixed:
            self._shuffle()
        # Shards may be of unequal length: a pass has as many steps as it takes.
        steps = self.passes * self.shard.steps_per_pass
        trained = self.replica.train(self.shard.steps(self.round * steps, steps))
        entered = time.perf_counter()
        told = _Told(trained.total, trained.counted, float(wish), entered + self.clock_offset)
        # Passes of unequal shards end at different times: here all wait for the last.
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
        return Progress(mean, self.passes * len(self.all_examples), int(heard[0].wish))

    def _shuffle(self) -> None:
        """The exchange of examples, on the meter."""
        started = time.perf_counter()
        before = self.group.meter.counters.bytes_sent
        self._exchange(self.group)
        ended = time.perf_counter()
        sent = self.group.meter.counters.bytes_sent - before
        self.group.meter.communication("shuffle", started, ended, self.round + 1)
        self.group.meter.shuffled(sent, ended - started)

    def _exchange(self, group: Group) -> None:
        """Examples from where they were born to who trains on them."""
        seed = self.replica.seed
        counts = [shard.n for shard in self.born]
        own = self.born[group.rank].indices
        self.replica.hold(shuffled(self.all_examples, own, counts, seed, group))
        # Of the others only how many they have is known, and wanted.
        sizes = map(sum, zip(*dealt(counts), strict=True))
        parts = map(torch.arange, sizes)
        self.shards = shards_from(self.replica, parts, self.strategy.batch_size)
        self.is_mixed = True

    @torch.no_grad()
    def _go_on_from_combined(self) -> None:
        """All ranks take over the combined model, each with an optimizer as it was at first."""
        copy_model(self.combine(), self.replica.model)
        self.replica.reset_optimizer()
        self._note_buffers()

    @torch.no_grad()
    def combine(self) -> nn.Module:
        """The combined model as it is now; all ranks call it together.

        Counted by the meter is the one that ends a round; of a run that combines once, the first.
        """
        # Evaluating and saving in one round combine once.
        if self.combined_at == self.round:
            return self.combined
        # Where nobody goes on from them, combinations after the first belong to the measurement.
        is_counted = self.strategy.combine_every is not None or not self.counted
        group = self.group if is_counted else self.group.unmetered()
        started = time.perf_counter()
        # The rank's own model goes on untouched: what is combined is a copy.
        copy_model(self.replica.model, self.combined)
        (self._average if self.strategy.combine == "average" else self._best)(group)
        if is_counted:
            self.group.meter.communication("combination", started, time.perf_counter(), self.round)
        self.counted = True
        self.combined_at = self.round
        return self.combined

    def _average(self, group: Group) -> None:
        """The weighted mean of weights and floating-point buffers; other buffers are rank 0's."""
        buffers = self.buffers.of(self.combined)
        means = [buffer for buffer in buffers if buffer.is_floating_point()]
        changes = [difference(now, first) for now, first in zip(means, self.first, strict=True)]
        # no tail: what ranks have to agree on was told at the end of the pass
        message, views, _ = packed([*self.flat.buffers, *changes], 0, group)
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
        """This rank's in the average."""
        # Where nothing has counted, nothing was learned either: by examples.
        sizes = self.passed if any(self.passed) else [shard.n for shard in self.shards]
        return sizes[self.group.rank] / sum(sizes)

    def _best(self, group: Group) -> None:
        """The model of the rank with the least loss on all training data; of several, the first."""
        mine = torch.tensor([self._loss()], dtype=torch.float64)
        losses = all_gather(mine, group).flatten().tolist()
        # nan sorts last: a model that has diverged is never the best while another has not
        best = min(range(group.size), key=lambda rank: (math.isnan(losses[rank]), losses[rank]))
        group.broadcast_values([*self.flat.buffers, *self.buffers.of(self.combined)], root=best)

    def _loss(self) -> float:
        """This rank's model on all training data."""
        total = 0.0
        counted = 0.0
        examples = self.all_examples
        # Dropout off, and the buffers as they are.
        with in_mode(self.combined, training=False):
            for indices in torch.split(torch.arange(len(examples)), self.task.eval_batch_size):
                inputs, targets = examples.batch(indices)
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

    def averages(self) -> Mapping[str, Tensor]:
        return trained_in(self.combined)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.combine().state_dict())

    def state(self) -> dict[str, Any]:
        buffers = passing_buffers(self.combine())
        return {"round": self.round, "counted": self.counted, "buffers": buffers}

    def part(self) -> dict[str, Any]:
        """This rank's own model and optimizer."""
        return self.replica.state()

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.combined, weights)
        load_passing_buffers(self.combined, state["buffers"])
        # the rank's own model, which the combined one does not tell
        self.replica.restore(weights, state["parts"][self.group.rank])
        # what was loaded is the combination of that round
        self.round = self.combined_at = state["round"]
        self.counted = state["counted"]
        if self.strategy.combine_every is not None:
            self._note_buffers()
        # What was received is in no checkpoint: it is fetched again from where it was born.
        if self.strategy.shuffle:
            self._exchange(self.group.unmetered())

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter]

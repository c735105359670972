"""ZeRO for `dure.train`: data parallelism whose ranks divide their replicated memory.

The joint batch is divided as in data parallelism (`dure.parallel.data.strategy`), so N ranks
compute the same weights as one worker. Values that all ranks have to agree on travel in the trailer
of a step's last message (`dure.collectives.trailer`, `dure.parallel.zero.gradient_reduction`):

    control_flags   of rank 0        control flags: stop, or write a checkpoint
    loss            of each rank     its share of the mean loss
    count           of all ranks     the loss's denominator, if known only after forward
    arrival         of each rank     the time of its last message; earlier ranks are idle
    changed         for each buffer  whether rank 0's forward pass has changed it; a broadcast
                    follows

Evaluations gather units as a forward pass does. For checkpoints rank 0 collects the shares of all
ranks in a file, a few million bytes at a time. The meter counts neither.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dure.arguments import at_least, check_ranges
from dure.collectives.arguments import check_algorithm
from dure.collectives.trailer import Numbers, common_start, per_rank_field, summed_field, time_field
from dure.contracts.learner import Learner, Proof, StepResult
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL, trained_from
from dure.contracts.world import Kind, RankContext, World
from dure.data.batches import check_joint_batch, largest_piece
from dure.data.sampling import JOINT_SAMPLING
from dure.errors import LossNotFiniteError
from dure.machine.devices import to_cpu, to_device
from dure.machine.memory import trim_heap
from dure.memory.file_backed_init import move_to_memory
from dure.memory.formula import MemoryShares, divided_shares
from dure.memory.offload.offload_setting import Offload, parse_offload
from dure.memory.recompute_setting import Recompute, as_recompute
from dure.memory.spill_store import SpillStore
from dure.parallel.buffer_broadcast import buffer_sync_of, check_forward_keeps_weights
from dure.parallel.learner_offloading import NO_OFFLOAD, LearnerOffloading, check_offload
from dure.parallel.learner_recomputation import (
    NO_RECOMPUTE,
    RecomputeRequest,
    check_recompute,
    prove_recompute,
)
from dure.parallel.single_worker import SingleLearner
from dure.parallel.zero.checks import check_settings
from dure.parallel.zero.chunk_collectives import ALGORITHMS, Algorithm
from dure.parallel.zero.gradient_reduction import PiggybackFields
from dure.parallel.zero.partition_layout import Stage
from dure.parallel.zero.redundancy import ZeroRedundancy
from dure.record.meter import StepClock
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_pieces, check_rank_pieces
from dure.tasks.evaluation import evaluate
from dure.tasks.gradient_accumulation import read_losses, unread_loss
from dure.tasks.loss_shares import NOTHING, LossShare
from dure.tensors.buffers import load_non_persistent_buffers, non_persistent_buffers_of
from dure.tensors.flat import check_no_shared_memory, trainable_by_name


@dataclass(frozen=True)
class ZeRO(Strategy):
    """Ranks divide each batch, and the memory that data parallelism would replicate.

    Args:
        stage: 1 divides the optimizer's state, 2 the gradients too, 3 the parameters too.
        batch_size: examples of a step over all workers together; None is all the data.
        algorithm: how sums and parameters travel: native (the backend's own), ring or one_shot.
        accumulate: number of micro-batches in which a worker computes its part of a batch. From
            stage 2 on each is reduced at once, so that memory does not grow.
        unit_size: elements that are gathered at once in stage 3; by default a million.
        prefetch: units gathered ahead in stage 3, during the computation; by default 1, or 0 on
            busy cores.
        overlap_gather: in stages 1 and 2 updated parameters arrive during the next forward pass, if
            every rank has a host of its own and the backend is dure (`ZeroRedundancy`); elsewhere
            it has no effect.
        offload: parts in files while they are not needed, such as optimizer,activations: of
            optimizer, parameters and activations, as far as this rank has them.
        offload_folder: of these files, on a disk; by default the first usual folder on a disk, for
            a GPU the CPU's memory.
        recompute: modules that are recomputed in backward, and store only their inputs, such as
            layers.*; or all, the choice with the smallest peak memory of a step; none by default.
        memory: limit of a worker's memory in a step, such as 2GB: its parts of weights, gradients
            and optimizer state, and activations. As few modules are recomputed as this limit needs.
    """

    stage: Stage = 2
    batch_size: int | None = 64
    algorithm: Algorithm = "native"
    accumulate: int = field(default=1, metadata=at_least(1))
    unit_size: int | None = field(default=None, metadata=at_least(1))
    prefetch: int | None = None
    overlap_gather: bool = False
    offload: Offload = NO_OFFLOAD
    offload_folder: str | None = None
    recompute: Recompute = NO_RECOMPUTE
    memory: str | None = None

    name: ClassVar[str] = "zero"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="step",
        trains_with=ALL - {"compile"},
        samples=JOINT_SAMPLING,
        moves=frozenset({"offload", "offload_folder", "recompute", "memory"}),
        own_data=True,
    )

    def __post_init__(self) -> None:
        parse_fields(self, {"offload": parse_offload})
        object.__setattr__(self, "recompute", as_recompute(self.recompute))

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(spares_memory=bool(self.offload))

    @property
    def label(self) -> str:
        return f"ZeRO {self.stage}"

    def holds_parts(self, workers: int | None) -> bool:
        return self.stage == 3 and workers != 1

    def shares(self, workers: int | None) -> MemoryShares | None:
        return divided_shares(1, self.stage, workers or 1)

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "compile":
            return "its hooks gather and reduce while the layers of the model are called one by one"
        return super().cannot(feature, kind)

    def check(self, task: Task, world: World) -> None:
        check_joint_batch(self.batch_size, len(task.train), world.workers)
        check_settings(self.stage, task.precision, self.prefetch, self.overlap_gather)
        check_algorithm("way to send", self.algorithm, ALGORITHMS)
        check_ranges(self)
        check_offload(
            self.offload,
            self.offload_folder,
            ("optimizer", "parameters", "activations"),
            self.name,
            why="which keeps messages in memory",
        )
        check_recompute(self.recompute, self.memory, self.name)

    def _again(self, task: Task, workers: int | None) -> RecomputeRequest:
        part = largest_piece(self.batch_size, len(task.train), workers, self.accumulate)
        return RecomputeRequest(
            self.recompute, self.memory, part, divided_shares(1, self.stage, workers or 1)
        )

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check that replicas can train the model and that no tensors overlap.

        Raises ValueError if not.
        """
        check_no_shared_memory(model)
        check_forward_keeps_weights(model, world.workers)
        check_pieces(task, model, self.batch_size, world.workers, self.accumulate)

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Compare passes with and without recomputation, if recomputation is asked for."""
        self.check_model(task, model, world)
        return prove_recompute(self._again(task, world.workers), task, model)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return ZeROLearner(task, context, seed, self)


class ZeROLearner(SingleLearner):
    """SGD over a divided model.

    `self.model` and `self.optimizer` are the task's own, divided in place.
    """

    by_parts = True
    averaged_tensors_are_parts = True
    # The next step's sums wait for it.
    waits_for_update = False

    def __init__(self, task: Task, context: RankContext, seed: int, strategy: ZeRO) -> None:
        super().__init__(
            task,
            context,
            seed,
            strategy.batch_size,
            offloaded=LearnerOffloading(
                strategy.offload,
                strategy.offload_folder,
                context,
                context.devices[0],
                divided=True,
            ),
            again=strategy._again(task, context.group.size),
        )
        # The host waits for sums within forward and backward, so its clock counts.
        self.spans = None
        self.strategy = strategy
        self.folder = context.folder
        check_rank_pieces(self.model, self.train_examples, strategy.batch_size, strategy.accumulate)
        self._trained_from = trained_from(task, trainable_by_name(self.model))
        # Computed before the model is divided: afterwards its parameters have no elements.
        self._flops = super().flops_per_step()
        # gradients are summed, not averaged, because each is multiplied by its share of the batch
        self.zero = ZeroRedundancy(
            self.model,
            self.optimizer,
            strategy.stage,
            self.group,
            reduce="sum",
            precision=task.precision,
            units=strategy.unit_size,
            prefetch=strategy.prefetch,
            algorithm=strategy.algorithm,
            overlap_gather=strategy.overlap_gather,
            memory=self.offloaded.memory,
            rider=PiggybackFields(
                [
                    summed_field("control_flags"),
                    per_rank_field("loss"),
                    summed_field("count", int(self.losses.is_late)),
                    time_field("arrival"),
                    summed_field("changed", len(list(self.model.buffers()))),
                ],
                self._say,
            ),
        )
        # Its ranks agree on the steps to skip: each has other parts of the gradient.
        self.scaling = self.zero.loss_scaling
        # Parameters have become shares; the buffers of a file-backed model move to memory.
        move_to_memory(self.model.buffers())
        # Memory that the division needed must not count in training.
        trim_heap()
        self._watch_passes()
        self.buffer_sync = buffer_sync_of(self.model)
        self.started = common_start(self.group, context.clock_offset)
        self._control_flags = 0
        self._losses: list[float | Tensor] = []
        self._counted = 0.0

    def _watch_passes(self) -> None:
        """Start offloading for the divided model."""
        if self.strategy.stage < 3:
            self.offloaded.watch_parameters(self.model)
        self.offloaded.keep_activations(self.zero.resident)
        if self.offloaded.activations is not None:
            self.zero.keep_activations(self.offloaded.activations)

    def flops_per_step(self) -> float:
        return self._flops

    def gradients(self, indices: Tensor, control_flags: int) -> StepResult:
        """Compute this rank's part of the joint batch's gradient, for the optimizer's pieces.

        Raises LossNotFiniteError, on all ranks, if the loss of any rank is not finite.
        """
        self._control_flags = control_flags
        self._losses = []
        self._counted = 0.0
        self.zero.zero_grad()
        part = self.train_examples.part(indices, self.group.rank, self.group.size)
        # Empty micro-batches too: every rank runs equally many passes.
        for piece in part.tensor_split(self.strategy.accumulate):
            if len(piece):
                self.backward(piece, self.losses.share(piece, indices))
            elif self.strategy.stage == 3:
                # all gather the same units in the same order, whatever the model does
                self.backward(torch.tensor([self.train_examples.first]), NOTHING)
            else:
                self.zero.take_part()
        started = time.perf_counter()
        self.zero.reduce()
        self.group.meter.compute("reduce", started, time.perf_counter(), self.step + 1)
        heard = self.zero.reducing.trailer_sums
        # Until the last rank arrived, this rank was idle and not sending.
        self._account(self.started + max(heard["arrival"]))
        for rank, loss in enumerate(heard["loss"]):
            if not math.isfinite(loss):  # no rank can save the last good state alone
                raise LossNotFiniteError(
                    loss, f"rank {rank}", f"step {self.step + 1}", intact=False
                )
        if any(heard["changed"]):
            self._take_buffers(heard["changed"])
        gradients = (part.grad for part in self.zero.parts() if part.grad is not None)
        mean = self.losses.settle(sum(heard["loss"]), indices, sum(heard["count"]), gradients)
        return StepResult(mean, len(indices), int(heard["control_flags"][0]))

    def own_parameters(self) -> Iterable[Tensor]:
        return self.zero.parts()

    def trim(self) -> None:
        for name, part in self.zero.parts_by_name():
            # A frozen parameter's pieces on this rank are frozen.
            if self.step < self._trained_from.get(name, 0):
                part.grad = None
        if self.task.clip_norm is not None:
            self.zero.clip_grad_norm_(self.task.clip_norm)

    def backward(self, piece: Tensor, share: LossShare) -> None:
        """Run forward and backward over a piece of the joint batch, weighted by its share.

        The trailer of the last message has the loss, which is therefore known before backward ends.
        """
        inputs, targets = self.read(piece)
        clock = StepClock(self.group.meter, self.step + 1)
        # summed over pieces and ranks: the loss of the joint batch, and its gradient
        with self.offloaded.saving(inputs, targets):
            loss, count = self.losses.part(self.model(inputs), targets, len(piece), share)
        self._losses.append(unread_loss(loss))
        self._counted += count
        clock.did("forward")
        self.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
        clock.did("backward")

    def _say(self) -> Numbers:
        """Return this rank's numbers for the trailer."""
        said: dict[str, Sequence[float]] = {
            "loss": [sum(read_losses(self._losses), 0.0)],
            "arrival": [time.perf_counter() - self.started],
        }
        if self.losses.is_late:
            said["count"] = [self._counted]
        # The other ranks send zeros, so that the sum is rank 0's number.
        if self.group.rank == 0:
            said["control_flags"] = [float(self._control_flags)]
            if self.buffer_sync is not None:
                said["changed"] = self.buffer_sync.changed()
        return said

    def _take_buffers(self, changed: Sequence[float]) -> None:
        """Take the buffers that rank 0's forward pass has changed."""
        assert self.buffer_sync is not None
        started = time.perf_counter()
        self.buffer_sync.take(self.group, [ranks > 0 for ranks in changed])
        self.group.meter.communication(
            "broadcast of buffers", started, time.perf_counter(), self.step + 1
        )

    def _account(self, arrival: float | None = None) -> None:
        """Subtract the time of waiting from the computing time."""
        self.group.meter.counters.compute_seconds -= self.zero.wire.account(self.step + 1, arrival)

    def advance(self, control_flags: int) -> StepResult:
        progress = super().advance(control_flags)
        self._account()
        return progress

    def evaluate(self) -> dict[str, float]:
        def idle() -> None:
            """Gather the units that other ranks gather, on a rank without a batch."""
            # In stages 1 and 2 a forward pass sends nothing.
            if self.strategy.stage == 3 and self.test_examples is not None:
                first = torch.zeros(1, dtype=torch.int64)
                inputs, _ = self.test_examples.batch(first)
                self.model(to_device(inputs, self.device))

        with self.zero.uncounted():
            return evaluate(
                self.task,
                self.model,
                self.test_examples,
                group=self.group,
                step=self.step,
                idle=idle,
            )

    def averaged_tensors(self) -> Mapping[str, Tensor]:
        return dict(self.zero.parts_by_name())

    @contextmanager
    def changing_averaged_tensors(self) -> Iterator[None]:
        # The messages are not part of training.
        with self.zero.uncounted(), self.zero.parts_changed():
            yield

    def weights(self) -> Mapping[str, Tensor]:
        return self.zero.weights(SpillStore(self.folder))

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "optimizer": to_cpu(self.zero.optimizer_state_dict(SpillStore(self.folder))),
            "buffers": to_cpu(non_persistent_buffers_of(self.model)),
            "order": self.zero.passes.orders.state(),
            **self.scaling.state(),
        }

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.zero.load_state_dict(weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        self.zero.load_optimizer_state_dict(state["optimizer"])
        self.offloaded.restored()
        self.zero.passes.restore_order(state["order"])
        # A new instance: all ranks now have the loaded buffers.
        self.buffer_sync = buffer_sync_of(self.model)
        self.step = state["step"]
        self.scaling.restore(state)

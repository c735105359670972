"""Data parallelism: every rank has the whole model and computes on its part of the joint batch.

Rank r of N computes the gradient g_r of the mean loss over its b_r of the B examples; all ranks
apply the sum of (b_r/B)·g_r, which is the gradient of the joint batch. N ranks therefore compute
the same weights as one worker. b_r and B are the denominators of the loss
(`dure.tasks.loss_shares`).

The d gradients travel in buckets during backward (`dure.parallel.data.reducer`), by a selectable
all-reduce. The last bucket carries a trailer (`dure.collectives.trailer`), so that a step has no
other message. The trailer has the numbers that all ranks have to agree on:

    control_flags   of rank 0           control flags: stop, or write a checkpoint
    loss            of each rank        its share of the mean loss
    count           of all ranks        the loss's denominator, if known only after forward
    arrival         of each rank        the time of its last message; earlier ranks are idle
    before          of each rank        seconds from its start of each earlier message to that time
    changed         for each buffer     whether rank 0's forward pass has changed it
    used            for each parameter  how many ranks have a gradient of it

With `accumulate` = k each rank computes its part in k micro-batches and sums once: less memory, the
same gradient. Clipping (`Task.clip_norm`) uses the norm of the joint gradient, which all ranks
have.

Buffers such as batch-norm statistics are rank 0's, as in torch's DistributedDataParallel: buffers
that rank 0's forward pass has changed are broadcast after backward. Batch norm sees the rank's own
part, or micro-batch, of the batch.

With `privacy` the gradient is that of DP-SGD (`dure.privacy.example_level`): all ranks draw the
same batch; each rank clips the gradients of its part and sends their sum, and all ranks add the
same noise to the total. N ranks compute the same weights as one worker here too.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dure.arguments import at_least, check_ranges
from dure.collectives.all_reduce import Algorithm
from dure.collectives.compression import Compression
from dure.collectives.compression import parse as parse_compression
from dure.collectives.trailer import (
    Numbers,
    TrailerField,
    common_start,
    per_rank_field,
    summed_field,
    time_field,
)
from dure.contracts.learner import Learner, Proof, StepResult
from dure.contracts.stop import Stop
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import Kind, RankContext, World
from dure.data.batches import check_joint_batch, largest_piece
from dure.data.sampling import JOINT_SAMPLING
from dure.errors import LossNotFiniteError
from dure.machine.devices import seconds_between
from dure.memory.formula import WHOLE, MemoryShares
from dure.memory.offload.offload_setting import Offload, parse_offload
from dure.memory.recompute_setting import Recompute, as_recompute
from dure.parallel.buffer_broadcast import buffer_sync_of, check_forward_keeps_weights
from dure.parallel.data.reducer import Reducer
from dure.parallel.data.reduction_settings import NO_COMPRESSION, Overlap, ReductionSettings
from dure.parallel.learner_offloading import (
    NO_OFFLOAD,
    LearnerOffloading,
    check_offload,
    check_optimizer,
)
from dure.parallel.learner_recomputation import (
    NO_RECOMPUTE,
    RecomputeRequest,
    check_recompute,
    prove_recompute,
)
from dure.parallel.replica_consistency import ReplicaCheck
from dure.parallel.single_worker import SingleLearner, check_private
from dure.parallel.threads.replicas import COMPILES_ALONE, ReplicasLearner
from dure.parallel.weight_broadcast import share_weights
from dure.privacy import example_level
from dure.privacy.dp_sgd import DPSGD, parse_dp_sgd
from dure.privacy.example_level import ExampleLevel, PrivacyBudget, PrivacyRequest
from dure.privacy.per_example.unsupported_layers import check_layers
from dure.randomness.seeds import derive
from dure.record.meter import DeviceSpans, step_clock
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_pieces, check_rank_pieces
from dure.tasks.gradient_accumulation import unread_loss
from dure.tensors.backward import backward_from

if TYPE_CHECKING:
    from typing_extensions import Self

OFFLOADED = ("optimizer", "parameters", "activations")
"""Parts that ranks which send gradients can offload; gradients are sent from buffers in memory."""


@dataclass(frozen=True)
class DataParallel(Strategy):
    """Every rank trains the same model on its part of each batch.

    Args:
        batch_size: examples of a step over all workers together; None is all the data.
        all_reduce: how gradients are summed: ring, master (through rank 0), one_shot, tree,
            halving_doubling, hierarchical, native (the backend's own), or auto, which chooses by
            size, ranks and hosts. In a world of threads the master adds them
            (`dure.parallel.threads.replicas`).
        bucket_bytes: bytes of gradients that share a message; by default dure chooses.
        overlap: all-reduces run beside backward, on a thread, start in backward and end after it
            (split-phase), or run after it; auto chooses.
        compression: compression of the gradients that are sent, such as top-k:0.01 or power-sgd:2.
        accumulate: number of micro-batches in which a worker computes its part of a batch.
        privacy: differential privacy of examples, such as dp-sgd:1:1.1: the largest norm of an
            example's gradient, and the noise multiplier; none by default.
        epsilon: the budget of differential privacy, at which the run ends. If privacy has no noise
            multiplier, the least noise is used that keeps the whole run within the budget.
        delta: the probability that the epsilon does not hold; well below 1 / examples.
        offload: parts in files while they are not needed, such as optimizer,activations: of
            optimizer, parameters and activations.
        offload_folder: of these files, on a disk; by default the first usual folder on a disk, for
            a GPU the CPU's memory.
        recompute: modules that are recomputed in backward, and store only their inputs, such as
            layers.*; or all, the choice with the smallest peak memory of a step; none by default.
        memory: limit of a worker's memory in a step, such as 2GB: weights, gradients, optimizer
            state and activations. As few modules are recomputed as this limit needs.
    """

    batch_size: int | None = 64
    all_reduce: Algorithm = "ring"
    bucket_bytes: int | None = None
    overlap: Overlap = "auto"
    compression: Compression = NO_COMPRESSION
    accumulate: int = field(default=1, metadata=at_least(1))
    privacy: DPSGD | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    offload: Offload = NO_OFFLOAD
    offload_folder: str | None = None
    recompute: Recompute = NO_RECOMPUTE
    memory: str | None = None

    name: ClassVar[str] = "data-parallel"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="step",
        additional_worlds={"threads": "data parallel in threads"},
        trains_with=ALL,
        samples=JOINT_SAMPLING,
        moves=frozenset({"offload", "offload_folder", "recompute", "memory"}),
        can_offload=OFFLOADED,
        own_data=True,
    )

    def __post_init__(self) -> None:
        readers = {
            "compression": parse_compression,
            "privacy": parse_dp_sgd,
            "offload": parse_offload,
        }
        parse_fields(self, readers)
        object.__setattr__(self, "recompute", as_recompute(self.recompute))

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(
            deterministic=self.privacy is None or self.privacy.draws == "seed",
            protects=self.privacy is not None,
            uses_poisson_sampling=self.privacy is not None,
            spares_memory=bool(self.offload),
            offloaded=self.offload.parts,
        )

    @property
    def label(self) -> str:
        way = self.compression if self.compression.compresses else self.all_reduce
        return example_level.label_with_privacy(self._wanted, f"data parallel {way}")

    def shares(self, workers: int | None) -> MemoryShares | None:
        return WHOLE

    def holds_parts(self, workers: int | None) -> bool:
        """Return whether parameters are offloaded, which then need no memory either."""
        return "parameters" in self.offload

    @property
    def _wanted(self) -> PrivacyRequest | None:
        return example_level.privacy_request(self.privacy, self.epsilon, self.delta)

    def planned(self, task: Task, stop: Stop) -> Self:
        """Return the strategy with the noise that its epsilon requires for this run."""
        budget = PrivacyBudget(self.epsilon, self.delta)
        examples = len(task.train)
        privacy = example_level.planned(self.privacy, budget, stop, examples, self.batch_size)
        return replace(self, privacy=privacy)

    def how(self, seed: int = 0) -> ReductionSettings:
        """Return the settings of the sum of gradients.

        Raises ValueError for unsupported settings.
        """
        return ReductionSettings(
            algorithm=self.all_reduce,
            op="sum",
            bucket_bytes=self.bucket_bytes,
            overlap=self.overlap,
            compression=self.compression,
            seed=derive(seed, "compression"),
        )

    def check(self, task: Task, world: World) -> None:
        check_joint_batch(self.batch_size, len(task.train), world.workers)
        self.how()
        check_ranges(self)
        if task.precision == "fp16" and self.compression.remembers:
            raise ValueError(
                f"compression is {self.compression}, which adds what it left out to the next "
                "gradient, but with precision='fp16' gradients have another scale then, or the "
                "step is skipped: use precision='bf16', or cast:float16"
            )
        if self.privacy is not None:
            self._check_private(task)
        check_offload(
            self.offload,
            self.offload_folder,
            OFFLOADED if self.privacy is None else ("optimizer", "parameters"),
            self.name,
            why="which keeps messages in memory, and dp-sgd computes gradients differently",
        )
        check_recompute(self.recompute, self.memory, self.name, self.privacy is not None)
        # Settings at their defaults were not requested, and may stay unused.
        default = DataParallel()
        if world.kind == "threads" and self.privacy is not None:
            raise ValueError(
                "dp-sgd: in threads the master has only the loss of the whole batch, not "
                "per-example gradients: use Processes"
            )
        of_ranks = (
            *("all_reduce", "bucket_bytes", "overlap", "compression", "accumulate"),
            *("offload", "recompute", "memory"),
        )
        for name in of_ranks:
            if world.kind == "threads" and getattr(self, name) != getattr(default, name):
                raise ValueError(
                    f"in threads DataParallel cannot use {name}, because nothing is sent: use "
                    "Processes"
                )

    def _again(self, task: Task, workers: int | None) -> RecomputeRequest:
        part = largest_piece(self.batch_size, len(task.train), workers, self.accumulate)
        return RecomputeRequest(
            self.recompute, self.memory, part, WHOLE.without(self.offload.parts)
        )

    def _check_private(self, task: Task) -> None:
        if task.train.rank_counts is not None:
            raise ValueError(
                "dp-sgd: when each rank has its own data, the number of examples is not known "
                "before the run, which dp-sgd needs: give the same examples to all ranks"
            )
        if self.compression.compresses:
            raise ValueError(
                f"dp-sgd: the compression {self.compression} happens before noise is added and "
                "its effect on a sum is not bounded: leave it out"
            )
        check_private(task)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check that replicas can train the model. Raises ValueError otherwise."""
        check_forward_keeps_weights(model, world.workers)
        if self.privacy is not None:
            check_layers(model)
        check_optimizer(self.offload, task, model)
        check_pieces(task, model, self.batch_size, world.workers, self.accumulate)

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Try per-example clipping or recomputation on a few examples, if the strategy uses it."""
        self.check_model(task, model, world)
        if self.privacy is not None:
            return example_level.proven(task, model)
        return prove_recompute(self._again(task, world.workers), task, model)

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "compile" and kind == "threads":
            return COMPILES_ALONE
        if feature == "own_loss" and kind == "threads":
            return (
                "in threads a master joins the workers' outputs example by example, but the "
                "model's own loss is one number for all: use dure.Processes, or give a loss"
            )
        return super().cannot(feature, kind)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        if context.kind == "threads":
            return ReplicasLearner(task, context, seed, self.batch_size)
        return DataParallelLearner(task, context, seed, self)


def elements_in_step(
    parameters: int,
    trainable_tensors: int,
    ranks: int,
    buffers: int = 0,
    messages: int = 1,
    counts: int = 0,
) -> int:
    """Return the elements of all messages of a step: the gradients and the trailer.

    The trailer has 1 + 3N numbers, N for each message except the last, and a flag for each
    parameter tensor and each buffer.

    Args:
        parameters: Elements of the trained parameters.
        trainable_tensors: Trained parameter tensors.
        ranks: N.
        buffers: Buffers of the model.
        messages: Messages of a step.
        counts: 1 if the loss only returns its denominator when computed, as user-defined functions
            may; otherwise 0.
    """
    tail = 1 + counts + 3 * ranks + ranks * (messages - 1) + trainable_tensors + buffers
    return parameters + tail


class DataParallelLearner(SingleLearner):
    """SGD whose gradient is summed over the ranks of a group."""

    announces = True

    def __init__(self, task: Task, context: RankContext, seed: int, strategy: DataParallel) -> None:
        super().__init__(
            task,
            context,
            seed,
            strategy.batch_size,
            wanted=strategy._wanted,
            offloaded=LearnerOffloading(
                strategy.offload, strategy.offload_folder, context, context.devices[0]
            ),
            again=strategy._again(task, context.group.size),
        )
        self.strategy = strategy
        check_rank_pieces(self.model, self.train_examples, strategy.batch_size, strategy.accumulate)
        share_weights(self.model, self.group)
        self.buffer_sync = buffer_sync_of(self.model)
        how = strategy.how(seed)
        self.reducer = Reducer(list(self.model.parameters()), self.group, how, self)
        self.alike = ReplicaCheck(self.model.named_parameters(), self.group)
        # Compressors have residuals, which differ between ranks: a checkpoint then has a part for
        # each rank.
        self.rank_state_differs = how.compresses
        self.started = common_start(self.group, context.clock_offset)
        self._loss: float | Tensor = 0.0
        self._counted = 0.0
        self._asked = 0
        self._computed: torch.Event | None = None

    def gradients(self, indices: Tensor, control_flags: int) -> StepResult:
        """Compute the joint batch's gradient and store it in the parameters, equal on all ranks.

        Raises LossNotFiniteError, on all ranks, if the loss of any rank is not finite.
        """
        self._loss = 0.0
        self._counted = 0.0
        self._asked = control_flags
        self.optimizer.zero_grad(set_to_none=True)
        # In a small batch some ranks have no examples.
        part = self.train_examples.part(indices, self.group.rank, self.group.size)
        pieces = [piece for piece in part.tensor_split(self.strategy.accumulate) if len(piece)]
        for piece in pieces[:-1]:
            # Sums are linear: one all-reduce of the accumulated gradients serves all pieces.
            with self.reducer.paused():
                self.backward(piece, indices)
        if pieces:
            self.backward(pieces[-1], indices)
        else:
            # The other ranks wait for equally many messages from this rank.
            self.reducer.take_part()
        if self.spans is not None:
            self._account_device(self.spans)
        heard = self.reducer.trailer_sums
        self.reducer.account(self.step + 1, self._last_arrivals(heard))
        # All ranks have all losses, so all of them raise in the same step, before any update.
        for rank, loss in enumerate(heard["loss"]):
            if not math.isfinite(loss):
                raise LossNotFiniteError(loss, f"rank {rank}", f"step {self.step + 1}")
        self.alike.passed()
        if any(heard["changed"]):
            self._take_buffers(heard["changed"])
        if self.private is not None:
            return self._noised(
                self.private, sum(heard["loss"]), indices, int(heard["control_flags"][0])
            )
        gradients = (one.grad for one in self.model.parameters() if one.grad is not None)
        mean = self.losses.settle(sum(heard["loss"]), indices, sum(heard["count"]), gradients)
        return StepResult(mean, len(indices), int(heard["control_flags"][0]))

    def _account_device(self, spans: DeviceSpans) -> None:
        """Count the computations on the accelerator, whose end the trailer has waited for."""
        reading, now = self.reducer.reading, self.reducer.read_at
        assert reading is not None
        spans.passed(reading, now)
        if self._computed is not None:
            self.reducer.computed_until(now - seconds_between(self._computed, reading))
            self._computed = None

    def backward(self, piece: Tensor, batch: Tensor) -> None:
        """Run forward and backward over a piece of the joint batch, weighted by its share.

        Gradients are sent during backward, unless the reducer is paused because more pieces follow.
        """
        inputs, targets = self.read(piece)
        clock = step_clock(self.group.meter, self.spans, self.step + 1)
        if self.private is not None:
            self._clipped_backward(self.private, inputs, targets)
            return
        share = self.losses.share(piece, batch)
        with self.computing(), self.offloaded.saving(inputs, targets):
            loss, count = self.losses.part(self.model(inputs), targets, len(piece), share)
        # On an accelerator the trailer takes the loss from there, and the host does not wait.
        self._loss = self._loss + unread_loss(loss)
        self._counted += count
        clock.did("forward")
        self.reducer.look_at([loss])
        sums = self.reducer.enabled
        if sums:
            self.reducer.begin()
        self.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
        if self.spans is not None:
            clock.did("backward")
            self._computed = self.spans.mark() if sums else None
        if sums:
            self.reducer.finish()
        if self.spans is None:
            clock.did("backward", self.reducer.computed if sums else None)

    def _clipped_backward(self, private: ExampleLevel, inputs: Any, targets: Any) -> None:
        """Run `backward` with the sum of clipped gradients in place of the gradient."""
        started = time.perf_counter()
        sums, loss = private.clipped(inputs, targets)
        self._loss += loss
        sending = self.reducer.enabled
        if sending:
            self.reducer.begin()
        # As if a loss had these gradients: they are accumulated and sent as usual.
        backward_from(zip(private.parameters, sums, strict=True))
        if sending:
            self.reducer.finish()
        computed = self.reducer.computed if sending else time.perf_counter()
        self.group.meter.compute("clipped", started, computed, self.step + 1)

    def _noised(
        self, private: ExampleLevel, loss: float, indices: Tensor, control_flags: int
    ) -> StepResult:
        """Store the noised gradient of the joint batch, the sum of whose losses is `loss`."""
        none = private.nothing()
        sums = [
            zeros if parameter.grad is None else parameter.grad
            for parameter, zeros in zip(private.parameters, none, strict=True)
        ]
        return self.noised(private, sums, loss, indices, control_flags)

    def part(self) -> dict[str, Any]:
        """Return the residuals of the compressors on this rank."""
        return {"compressors": self.reducer.state()["compressors"]}

    def tail_fields(self, messages: int) -> list[TrailerField]:
        """Return all fields of the module's docstring except `used`, which the reducer adds."""
        return [
            summed_field("control_flags"),
            per_rank_field("loss"),
            summed_field("count", int(self.losses.is_late)),
            time_field("arrival"),
            per_rank_field("before", messages - 1),
            summed_field("changed", 0 if self.buffer_sync is None else len(self.buffer_sync)),
        ]

    def tail_numbers(self, entered: Sequence[float]) -> Numbers:
        """Return this rank's numbers for these fields, when its last message is sent."""
        now = time.perf_counter()
        said: dict[str, Sequence[float | Tensor]] = {
            "loss": [self._loss],
            "arrival": [now - self.started],
            # Differences of the same clock: small numbers, precise in float32. 0 stands for an
            # all-reduce that has not started.
            "before": [now - at if at else 0.0 for at in entered[:-1]],
        }
        if self.losses.is_late:
            said["count"] = [self._counted]
        # The other ranks send zeros, so that the sum is rank 0's number.
        if self.group.rank == 0:
            said["control_flags"] = [float(self._asked)]
            if self.buffer_sync is not None:
                said["changed"] = self.buffer_sync.changed()
        return said

    def _last_arrivals(self, heard: Numbers) -> list[float]:
        """Return when the last rank started each message, in seconds of `time.perf_counter`."""
        arrivals = heard["arrival"]
        before = heard["before"]
        earlier = len(before) // len(arrivals)
        last = []
        for message in range(earlier):
            # `before` is ordered by rank, with a number for each earlier message.
            came = map(operator.sub, arrivals, before[message::earlier])
            last.append(self.started + max(came))
        last.append(self.started + max(arrivals))
        return last

    def _take_buffers(self, changed: Sequence[float]) -> None:
        """Take the buffers that rank 0's forward pass has changed."""
        assert self.buffer_sync is not None
        started = time.perf_counter()
        self.buffer_sync.take(self.group, [bool(one) for one in changed])
        self.group.meter.communication(
            "broadcast of buffers", started, time.perf_counter(), self.step + 1
        )

    def backward_begins(self) -> None:
        """Begin a backward pass; `backward` usually announces it already."""
        self.reducer.begin()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "order": self.reducer.order}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        super().restore(weights, state)
        # A checkpoint of a run without compression has no parts.
        own = state["parts"][self.group.rank] if "parts" in state else {}
        self.reducer.restore(
            {"order": state.get("order"), "compressors": own.get("compressors", [])}
        )

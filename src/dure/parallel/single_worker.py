"""A single worker: stochastic gradient descent; with a full batch, gradient descent.

It is the baseline of all systems:

    w <- w - step(mean gradient over the batch)        by the task's optimizer

Nothing is sent. The worker computes on the CPU or on one GPU. Loaders may read batches ahead, so
that all cores supply data (`dure.data.prefetch`); the results are the same, bit for bit.

With `privacy` the gradient is that of DP-SGD (`dure.privacy.example_level`). With `offload` memory
that a step needs only at times is in files (`dure.memory.offload`). With `recompute` or `memory`
modules are recomputed in backward (`dure.parallel.learner_recomputation`). Neither changes a bit of
the results.

Source: Robbins and Monro 1951 (SGD); Cauchy 1847 (gradient descent).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dure.arguments import at_least, check_ranges
from dure.contracts.fresh_model import examples_for
from dure.contracts.learner import Learner, Proof, StepResult
from dure.contracts.lr_schedule import ScheduledRates
from dure.contracts.stop import Stop
from dure.contracts.strategy import RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import RankContext, World
from dure.data.batches import Batches, check_batch_size, largest_piece
from dure.data.prefetch import Prefetch, prefetch
from dure.data.sampling import JOINT_SAMPLING
from dure.errors import LossNotFiniteError
from dure.machine.devices import device_of, synchronize, to_cpu, to_device
from dure.memory.formula import WHOLE, MemoryShares
from dure.memory.offload.offload_setting import PARTS, Offload, parse_offload
from dure.memory.recompute_setting import Recompute, as_recompute
from dure.parallel.learner_offloading import (
    NO_OFFLOAD,
    LearnerOffloading,
    check_offload,
    check_optimizer,
)
from dure.parallel.learner_recomputation import (
    NO_RECOMPUTE,
    NO_RECOMPUTE_REQUEST,
    RecomputeRequest,
    check_recompute,
    install_recompute,
    prove_recompute,
)
from dure.privacy import example_level
from dure.privacy.dp_sgd import DPSGD, parse_dp_sgd
from dure.privacy.example_level import ExampleLevel, PrivacyBudget, PrivacyRequest
from dure.privacy.per_example.unsupported_layers import check_layers
from dure.privacy.poisson import PoissonBatches
from dure.randomness.seeds import seed_generators
from dure.record.meter import Meter, device_spans, step_clock
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_pieces
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.gradient_accumulation import accumulate_gradient
from dure.tasks.gradient_transforms import GradientTransforms, forward_context
from dure.tasks.loss_scaling import loss_scaling_of
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.buffers import (
    load_non_persistent_buffers,
    load_weights,
    non_persistent_buffers_of,
)
from dure.tensors.flat import trainable_by_name
from dure.tensors.optimizer_state import free_optimizer, load_optimizer

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class SingleWorker(Strategy):
    """A single worker trains without communication.

    Args:
        batch_size: examples of a step; None is all the data in every step (gradient descent).
        device: device of the computation: cpu, cuda, or cuda:1.
        loaders: number of threads that read batches ahead, or processes if the dataset has
            transforms; with 0 each batch is read when it is needed.
        accumulate: number of micro-batches in which a batch is computed: less memory, the same
            gradient.
        privacy: differential privacy of examples, such as dp-sgd:1:1.1: the largest norm of an
            example's gradient, and the noise multiplier; none by default.
        epsilon: the budget of differential privacy, at which the run ends. If privacy has no noise
            multiplier, the least noise is used that keeps the whole run within the budget.
        delta: the probability that the epsilon does not hold; well below 1 / examples.
        offload: parts in files while they are not needed, such as optimizer,activations: of
            optimizer, parameters, gradients and activations.
        offload_folder: of these files, on a disk; by default the first usual folder on a disk, for
            a GPU the CPU's memory.
        recompute: modules that are recomputed in backward, and store only their inputs, such as
            layers.*; or all, the choice with the smallest peak memory of a step; none by default.
        memory: limit of the memory in a step, such as 2GB: weights, gradients, optimizer state and
            activations. As few modules are recomputed as this limit needs.
    """

    batch_size: int | None = 64
    device: str = "cpu"
    loaders: int = field(default=0, metadata=at_least(0))
    accumulate: int = field(default=1, metadata=at_least(1))
    privacy: DPSGD | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    offload: Offload = NO_OFFLOAD
    offload_folder: str | None = None
    recompute: Recompute = NO_RECOMPUTE
    memory: str | None = None

    name: ClassVar[str] = "single-worker"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="step",
        trains_with=ALL,
        samples=JOINT_SAMPLING,
        moves=frozenset({"device", "offload", "offload_folder", "recompute", "memory"}),
        can_offload=PARTS,
        alone=True,
    )

    def __post_init__(self) -> None:
        parse_fields(self, {"privacy": parse_dp_sgd, "offload": parse_offload})
        object.__setattr__(self, "recompute", as_recompute(self.recompute))

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(
            ranks=1,
            deterministic=self.privacy is None or self.privacy.draws == "seed",
            protects=self.privacy is not None,
            uses_poisson_sampling=self.privacy is not None,
            spares_memory=bool(self.offload),
            offloaded=self.offload.parts,
            computes_on=(self.device,),
        )

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

    @property
    def label(self) -> str:
        label = "gradient descent" if self.batch_size is None else "single worker"
        if self.device != "cpu":
            label += f" on {self.device}"
        if self.loaders:
            label += f", {self.loaders} loader{'' if self.loaders == 1 else 's'}"
        return example_level.label_with_privacy(self._wanted, label)

    def check(self, task: Task, world: World) -> None:
        check_batch_size(self.batch_size)
        if world.workers != 1:
            raise ValueError(
                f"SingleWorker has one worker, but the world has {world.workers}; choose "
                "Processes(1)"
            )
        device_of(self.device)
        check_ranges(self)
        if self.accumulate > 1 and self.loaders:
            raise ValueError(
                "loaders read whole batches, but accumulate computes a batch in pieces: leave "
                "one of the two out"
            )
        if self.privacy is not None:
            check_private(task)
        able = PARTS if self.privacy is None else ("optimizer", "parameters")
        check_offload(
            self.offload,
            self.offload_folder,
            able,
            self.name,
            why="because dp-sgd computes gradients differently",
            device=device_of(self.device),
        )
        check_recompute(self.recompute, self.memory, self.name, self.privacy is not None)

    def _again(self, task: Task) -> RecomputeRequest:
        part = largest_piece(self.batch_size, len(task.train), 1, self.accumulate)
        return RecomputeRequest(
            self.recompute, self.memory, part, WHOLE.without(self.offload.parts)
        )

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check that the model can train on batches of this size. Raises ValueError otherwise."""
        if self.privacy is not None:
            check_layers(model)
        check_optimizer(self.offload, task, model)
        check_pieces(task, model, self.batch_size, world.workers, self.accumulate)

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Try per-example clipping or recomputation on a few examples, if the strategy uses it."""
        self.check_model(task, model, world)
        if self.privacy is not None:
            return example_level.proven(task, model)
        return prove_recompute(self._again(task), task, model)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        device = device_of(self.device)
        return SingleLearner(
            task,
            context,
            seed,
            self.batch_size,
            device=device,
            loaders=self.loaders,
            wanted=self._wanted,
            offloaded=LearnerOffloading(self.offload, self.offload_folder, context, device),
            again=self._again(task),
            accumulate=self.accumulate,
        )


def check_private(task: Task) -> None:
    """Check that the task's settings work with differential privacy of examples.

    Raises ValueError for reduced precision and for compilation.
    """
    if task.precision != "full":
        raise ValueError(
            f"dp-sgd: with the precision {task.precision} norms are too inexact to bound an "
            "example's gradient: use full"
        )
    if task.compile:
        raise ValueError(
            "dp-sgd: per-example gradients are computed layer by layer, but a compiled model has "
            "no layers: leave compile out"
        )


class SingleLearner(Learner):
    """Training loop of SGD on a rank.

    Ranks share this loop and override the computation of a step's gradient
    (`dure.parallel.data.strategy`).
    """

    waits_for_update: ClassVar[bool] = True
    """Whether a step without events ends with a wait for the accelerator."""

    def __init__(
        self,
        task: Task,
        context: RankContext,
        seed: int,
        batch_size: int | None,
        device: torch.device | None = None,
        loaders: int = 0,
        wanted: PrivacyRequest | None = None,
        offloaded: LearnerOffloading | None = None,
        again: RecomputeRequest = NO_RECOMPUTE_REQUEST,
        accumulate: int = 1,
    ) -> None:
        self.accumulate = accumulate
        self.group = context.group
        self.seed = seed
        self.device = context.devices[0] if device is None else device
        self.task = task = task.on(self.device)
        self.offloaded = offloaded or LearnerOffloading(NO_OFFLOAD, None, context, self.device)
        made = self.offloaded.model(lambda: context.model(task, seed).to(self.device))
        self.model = made.train()
        self.again = install_recompute(again, task, self.model, context.check)
        self.optimizer = self.offloaded.optimizer(task.optimizer(self.model.parameters()))
        self.rates = ScheduledRates(self.optimizer, task.lr_schedule) if task.lr_schedule else None
        self.trimming = GradientTransforms(task, self.model.named_parameters())
        self.train_examples, self.test_examples = examples_for(task)
        self.losses = CountedLoss(task.loss, self.train_examples)
        self.batches: Batches | PoissonBatches = Batches(
            len(self.train_examples),
            batch_size,
            seed,
            order=self.train_examples.order(),
            drop_last=self.train_examples.sampling.drop_last,
        )
        self.examples = self.batches.visited
        # The gradients of DP-SGD, and those of threads, are waited for.
        by_events = wanted is None and context.kind == "ranks"
        self.spans = device_spans(self.group.meter, self.device) if by_events else None
        self.private: ExampleLevel | None = None
        if wanted is not None:
            self.private = ExampleLevel(
                wanted,
                task,
                self.model,
                self.train_examples,
                batch_size=batch_size,
                seed=seed,
                group=self.group,
                folder=context.folder,
            )
            self.batches = self.private.batches
        self.units_per_epoch = self.batches.steps_per_epoch
        self.where = f"rank {self.group.rank}"
        self.scaling = loss_scaling_of(task, self.where, self.device)
        self.step = 0
        self.loaders = [
            Meter(f"loader {loader}", context.trace, is_worker=False) for loader in range(loaders)
        ]
        self.prefetch: Prefetch | None = None
        # Each batch is read under its step's seed, so that its draws do not depend on the loader or
        # the time.
        if loaders:
            self.prefetch = prefetch(
                self.train_examples,
                self.batches.at,
                loaders,
                device=self.device,
                seed=self._seed_step,
            )
            # Loaders end with the run, even after an error.
            context.ending.callback(self.prefetch.close)

    def flops_per_step(self) -> float:
        return flops_per_step(
            self.model, self.train_examples, -(-self.batches.batch_size // self.group.size)
        )

    def advance(self, control_flags: int) -> StepResult:
        """Make a step of the optimizer on the next joint batch."""
        self._seed_step(self.step)
        if self.private is not None:
            self.private.begin()
        indices = self.batches.at(self.step)
        progress = self.gradients(indices, control_flags)
        self.scaling.unscale(self.own_parameters())
        self.trim()
        clock = step_clock(self.group.meter, self.spans, self.step + 1)
        if self.rates is not None:
            self.rates.at(self.step)
        self.scaling.step(self.optimizer)
        if self.spans is None and self.waits_for_update:
            synchronize(self.device)  # so that the measured time includes the kernels
        clock.did("update")
        self.step += 1
        return progress

    def trim(self) -> None:
        """Clip and freeze gradients as the task requires, before the optimizer's step."""
        if self.trimming.asked:
            clock = step_clock(self.group.meter, self.spans, self.step + 1)
            # Ranks have the same sums, and so the same norm: nothing is sent.
            self.trimming.at(self.step)
            clock.did("clip")

    def _seed_step(self, step: int) -> None:
        seed_generators(
            self.seed, "step", step, self.group.rank, everything=self.train_examples.draws
        )

    def gradients(self, indices: Tensor, control_flags: int) -> StepResult:
        """Compute the mean gradient over the joint batch `indices`, stored in the parameters."""
        if self.private is not None:
            return self._private_gradients(self.private, indices, control_flags)
        self.optimizer.zero_grad(set_to_none=True)
        clock = step_clock(self.group.meter, self.spans, self.step + 1)

        def read(piece: Tensor) -> tuple[Any, Any]:
            batch = self.read(piece)
            clock.begin()
            return batch

        def backward(loss: Tensor) -> None:
            clock.did("forward")
            self.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
            clock.did("backward")

        found = accumulate_gradient(
            self.losses,
            indices,
            self.accumulate,
            read=read,
            forward=self.model,
            computing=self._computing,
            backward=backward,
            parameters=self.model.parameters(),
        )
        clock.read()
        if not math.isfinite(found.loss):
            raise LossNotFiniteError(found.loss, self.where, f"step {self.step + 1}")
        return StepResult(found.loss if found.counted else None, len(indices), control_flags)

    def own_parameters(self) -> Iterable[Tensor]:
        """Return the tensors whose gradients this rank's optimizer uses."""
        return self.model.parameters()

    def computing(self) -> AbstractContextManager[object]:
        """Return a context for forward and loss: the precision of the task."""
        return forward_context(self.task, self.device)

    @contextmanager
    def _computing(self, inputs: Any, targets: Any) -> Iterator[None]:
        with self.computing(), self.offloaded.saving(inputs, targets):
            yield

    def _private_gradients(
        self, private: ExampleLevel, indices: Tensor, control_flags: int
    ) -> StepResult:
        sums, loss = private.nothing(), 0.0
        for piece in indices.tensor_split(self.accumulate):
            if not len(piece):
                continue
            inputs, targets = self.read(piece)
            started = time.perf_counter()
            clipped, part = private.clipped(inputs, targets)
            sums = clipped if self.accumulate == 1 else list(map(torch.add, sums, clipped))
            loss += part
            self.group.meter.compute("clipped", started, time.perf_counter(), self.step + 1)
        return self.noised(private, sums, loss, indices, control_flags)

    def noised(
        self,
        private: ExampleLevel,
        sums: Sequence[Tensor],
        loss: float,
        indices: Tensor,
        control_flags: int,
    ) -> StepResult:
        """Store the noised gradient of a whole batch in the parameters.

        Args:
            private: DP-SGD.
            sums: Sums of the clipped per-example gradients.
            loss: Sum of the losses of the batch.
            indices: Examples of the batch.
            control_flags: Control flags for the returned progress.
        """
        if not math.isfinite(loss):
            raise LossNotFiniteError(loss, self.where, f"step {self.step + 1}")
        started = time.perf_counter()
        private.gradients(sums, self.step)
        self.group.meter.compute("noise", started, time.perf_counter(), self.step + 1)
        mean = loss / len(indices) if len(indices) else None
        # The actual number of examples is secret: only the expected number is reported.
        # The epsilon takes longer to compute than a small step: it is reported once an epoch and at
        # evaluations.
        done = self.step + 1
        numbers = self.numbers() if done % self.units_per_epoch == 0 else None
        return StepResult(mean, private.expected, control_flags, numbers)

    def numbers(self) -> dict[str, float]:
        # Rank 0 records the epsilon; the others need not compute it.
        if self.private is None or self.group.rank:
            return {}
        return {"epsilon": self.private.epsilon}

    def exhausted(self) -> str | None:
        return None if self.private is None else self.private.exhausted()

    def facts(self) -> dict[str, Any] | None:
        if self.again is not None:
            return self.again.facts()
        if self.private is None:
            return None
        return {"promises": [] if self.group.rank else [self.private.facts()]}

    def saved(self) -> None:
        if self.private is not None:
            self.private.count.settle()

    def read(self, indices: Tensor) -> tuple[Any, Any]:
        """Return the inputs and targets of a batch, on the model's device."""
        started = time.perf_counter()
        if self.prefetch is None:
            inputs, targets = self.train_examples.batch(indices)
            if self.device.type != "cpu":
                inputs, targets = to_device((inputs, targets), self.device)
            self.group.meter.compute("read", started, time.perf_counter(), self.step + 1)
            return inputs, targets
        loaded = self.prefetch.at(self.step)
        self.group.meter.idle("wait for a batch", started, time.perf_counter(), self.step + 1)
        # the time counts for the loader: this worker was idle while it waited
        self.loaders[loaded.loader].compute("read", loaded.start, loaded.end, self.step + 1)
        return loaded.batch

    def evaluate(self) -> dict[str, float]:
        return evaluate(self.task, self.model, self.test_examples, group=self.group, step=self.step)

    def averaged_tensors(self) -> Mapping[str, Tensor]:
        return trainable_by_name(self.model)

    def weights(self) -> Mapping[str, Tensor]:
        weights: dict[str, Tensor] = to_cpu(dict(self.model.state_dict()))
        return weights

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "optimizer": to_cpu(self.optimizer.state_dict()),
            "buffers": to_cpu(non_persistent_buffers_of(self.model)),
            **({} if self.private is None else {"privacy": self.private.state()}),
            **self.scaling.state(),
        }

    def rest(self) -> None:
        free_optimizer(self.optimizer)

    def non_persistent_buffers(self) -> Mapping[str, Tensor]:
        buffers: Mapping[str, Tensor] = to_cpu(non_persistent_buffers_of(self.model))
        return buffers

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        load_weights(self.model, weights)
        load_non_persistent_buffers(self.model, state["buffers"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.offloaded.restored()
        self.step = state["step"]
        if self.private is not None:
            self.private.restore(state["privacy"])
        self.scaling.restore(state)

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter, *self.loaders]

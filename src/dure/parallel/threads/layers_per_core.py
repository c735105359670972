"""Layers per core: a pipeline of threads in one process.

The layers of a chain l_L(… l_2(l_1(x)) …) are divided over S threads, a stage of neighbouring
layers each, and the batch into M micro-batches, which pass through the stages in order:

    all forward:   stage s computes micro-batch m while stage s-1 computes m+1
    the loss       of the joint batch, from the outputs of all micro-batches, in the last stage
    all backward:  stage s computes micro-batch m while stage s+1 computes m+1

Every step therefore ends with the gradient of the joint batch, for any loss, and the weights are
those of one worker. Stages are idle while the pipeline fills and empties: with S equal stages for a
share of (S-1)/(M+S-1) of the time. A larger M reduces this share, but makes micro-batches smaller,
and operators are less efficient on small ones.

Layers are divided to minimise the cost of the most expensive stage (`divided_layers`): by counted
operations, or by measured time; the results are the same. Dropout is drawn from (seed, step,
micro-batch), by generators that pass with the micro-batch from stage to stage. The results
therefore do not depend on the division either, if all stages are on one device. Batch norm sees a
micro-batch.

Transfers are counted as if memory were not shared: a stage sends its outputs forwards and the
gradients of its inputs backwards, each once for every example (`elements_between_stages`).

Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", here without recomputation, within a process.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dure.arguments import at_least, check_ranges
from dure.contracts.learner import Learner, StepResult
from dure.contracts.strategy import Feature, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import ALL
from dure.contracts.world import Kind, RankContext, World
from dure.data.batches import check_batch_size
from dure.errors import LossNotFiniteError
from dure.machine.devices import to_device
from dure.parallel.single_worker import SingleLearner
from dure.parallel.threads import batch_trees
from dure.parallel.threads.chain import (
    check_chain,
    copied,
    counted_costs,
    divided_layers,
    find_inplace_layers,
    layers_of,
    measured_costs,
    run_layers,
)
from dure.parallel.threads.replicas import COMPILES_ALONE
from dure.parallel.threads.thread_rng import ThreadDraws
from dure.parallel.threads.worker_threads import AbandonedError, WorkerTimeline, worker_threads_at
from dure.randomness.seeds import derive
from dure.record.meter import Meter
from dure.tasks.batch_norm import check_pieces
from dure.tasks.evaluation import evaluate
from dure.tasks.flops import flops_per_step
from dure.tasks.gradient_transforms import forward_context
from dure.tasks.loss_shares import CountedLoss

Value = TypeVar("Value")

DrawContextFactory = Callable[[int], AbstractContextManager[Any]]
DrawContext = AbstractContextManager[Any]


@dataclass(frozen=True)
class LayersPerCore(Strategy):
    """Layers are divided over threads, and micro-batches pass through them.

    Args:
        batch_size: examples of a step; None is all the data.
        microbatches: M, the parts of a batch that pass through the stages in order.
        balance: how layers are divided over stages: by counted operations, or by measured time.
    """

    batch_size: int | None = 64
    microbatches: int = field(default=4, metadata=at_least(1))
    balance: Literal["counted", "measured"] = "counted"

    name: ClassVar[str] = "layers-per-core"
    traits: ClassVar[Traits] = Traits(
        kind="threads",
        unit="step",
        trains_with=ALL - {"compile"},
    )

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        if feature == "own_loss":
            return "its layers are called one by one, and none of them returns a loss: give a loss"
        return COMPILES_ALONE if feature == "compile" else super().cannot(feature, kind)

    @property
    def label(self) -> str:
        return f"layers per core, {self.microbatches} micro-batches"

    def check(self, task: Task, world: World) -> None:
        check_batch_size(self.batch_size)
        check_ranges(self)
        if self.balance not in ("counted", "measured"):
            raise ValueError(f"there is no balance {self.balance!r}: choose counted or measured")

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        check_pieces(task, model, self.batch_size, 1, self.microbatches)
        check_chain(task, model, world.workers or 1)

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return LayersPerCoreLearner(task, context, seed, self)


_FAILED = object()
"""Item that a failed stage puts into all queues, so that no other stage waits for it."""


class StageSpan(NamedTuple):
    """Work of a stage from `start` to `end`, in seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


@dataclass
class StageWork:
    """Record of a stage's part of a step: timed work, and bytes sent forwards and backwards.

    loss: in the last stage, the loss of the joint batch; None if its denominator is 0.
    """

    spans: list[StageSpan] = field(default_factory=list)
    handed_on: int = 0
    handed_back: int = 0
    loss: float | None = None

    def timed(self, name: str, work: Callable[[], Value]) -> Value:
        """Run `work`, and record its start and end."""
        started = time.perf_counter()
        value = work()
        self.spans.append(StageSpan(name, started, time.perf_counter()))
        return value


class StageQueues:
    """Queues between the stages in a pass: outputs forwards, gradients backwards."""

    def __init__(self, stages: int) -> None:
        # Stage s takes from the queues s; micro-batches come in order.
        self.forwards: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(stages)]
        self.backwards: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(stages)]

    def taken(self, line: queue.SimpleQueue[Any]) -> Any:
        """Wait for the next item of a queue, and return it.

        Raises AbandonedError if a stage has failed.
        """
        # without a timeout: the previous stage may take any time
        item = line.get()
        if item is _FAILED:
            raise AbandonedError
        return item

    def stop(self) -> None:
        """Make all stages stop waiting after a stage has failed."""
        # All queues: each stage may be waiting for any of its queues.
        for line in (*self.forwards, *self.backwards):
            line.put(_FAILED)


class StageChain(nn.Module):
    """The stages in order, each on its device: the whole model for evaluation.

    writing: stages with layers that write into their inputs, which may be views of the stage's
    inputs.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[nn.Module]],
        devices: Sequence[torch.device],
        writing: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.writing = writing
        self.stages = nn.ModuleList(
            nn.ModuleList(stage).to(device) for stage, device in zip(stages, devices, strict=True)
        )
        self.devices = devices

    def forward(self, inputs: Any) -> Any:
        for number in range(len(self.stages)):
            inputs = self.stage(number, to_device(inputs, self.devices[number]))
        return inputs

    def stage(self, number: int, inputs: Any) -> Any:
        """Return the output of a stage's layers for `inputs`, which are on its device."""
        layers: Any = self.stages[number]
        return run_layers(layers, copied(inputs) if number in self.writing else inputs)


class LayersPerCoreLearner(SingleLearner):
    """SGD whose gradient is computed by threads, each with some of the layers."""

    def __init__(
        self, task: Task, context: RankContext, seed: int, strategy: LayersPerCore
    ) -> None:
        super().__init__(task, context, seed, strategy.batch_size)
        # The last stage has the outputs, and computes the loss.
        self.task = task.on(context.devices[-1])
        self.losses = CountedLoss(self.task.loss, self.train_examples)
        self.where = "master"
        self.microbatches = strategy.microbatches
        layers = layers_of(self.model)
        stages = len(context.devices)
        self.size = max(1, self.batches.batch_size // self.microbatches)
        if strategy.balance == "counted":
            costs = counted_costs(layers, self.train_examples)
        else:
            # on a micro-batch, because operators are less efficient on small batches
            costs = measured_costs(layers, self.train_examples, self.size)
        self.division = divided_layers(costs, stages)
        writes = find_inplace_layers(layers, self.train_examples)
        writing: set[int] = set()
        of_stages: list[list[nn.Module]] = []
        for stage, numbers in enumerate(self.division):
            own = slice(numbers.start, numbers.stop)
            of_stages.append(layers[own])
            # Such a stage gets copies; otherwise it would overwrite inputs that another thread
            # still needs.
            if any(writes[own]):
                writing.add(stage)
        # The model's own modules, so that the optimizer and checkpoints are independent of stages.
        self.chain = StageChain(of_stages, context.devices, writing)
        self.team = worker_threads_at(context, self.flops_per_step() / stages, "stage")
        self.sheets = [
            WorkerTimeline(Meter(stage_name(stage, numbers), context.trace), "the other stages")
            for stage, numbers in enumerate(self.division)
        ]
        self.draws = ThreadDraws(context.devices, [self.model])

    def flops_per_step(self) -> float:
        return flops_per_step(self.model, self.train_examples, self.batches.batch_size)

    def advance(self, control_flags: int) -> StepResult:
        started = time.perf_counter()
        for sheet in self.sheets:
            sheet.begin(started)
        progress = super().advance(control_flags)
        ended = time.perf_counter()
        for sheet in self.sheets:
            sheet.end(ended, self.step)
        return progress

    def gradients(self, indices: Tensor, control_flags: int) -> StepResult:
        """Compute the joint batch's gradient in the stages and store it in the parameters."""
        inputs, targets = self.read(indices)
        sizes = [len(part) for part in indices.tensor_split(self.microbatches) if len(part)]
        microbatches = batch_trees.split_examples(inputs, sizes)
        started = time.perf_counter()
        works = self.draws.run(lambda own: self._pass(microbatches, sizes, targets, own))
        self.group.meter.idle("wait for the stages", started, time.perf_counter(), self.step + 1)
        self._account(works)
        return StepResult(works[-1].loss, len(indices), control_flags)

    def _pass(
        self, microbatches: list[Any], sizes: list[int], targets: Any, own: DrawContextFactory
    ) -> list[StageWork]:
        """Run all micro-batches forward and backward, and store the gradients in the parameters."""
        # here, because a pass may run twice (`ThreadDraws.run`)
        self.optimizer.zero_grad(set_to_none=True)
        belt = StageQueues(len(self.division))
        # All micro-batches at once: the first stage never waits for the master.
        for microbatch in microbatches:
            belt.forwards[0].put(microbatch)
        draws = self._draws(len(sizes), own)
        done = self.team.each(
            lambda stage: self._stage(stage, belt, draws[stage], sizes=sizes, targets=targets),
            self.group.step,
        )
        return [one.value for one in done]

    def _draws(self, microbatches: int, own: DrawContextFactory) -> list[list[DrawContext]]:
        """Return generators for each stage and micro-batch.

        Stages on the same device share them.
        """
        of_device: dict[torch.device, list[DrawContext]] = {}
        for place, device in enumerate(dict.fromkeys(self.chain.devices)):
            # With the same seed two GPUs would draw equal numbers, so later GPUs add their index.
            own_place = (place,) if place else ()
            of_device[device] = []
            for number in range(microbatches):
                position = (self.step, number, *own_place)
                of_device[device].append(own(derive(self.seed, "step", *position)))
        return [of_device[device] for device in self.chain.devices]

    def _stage(
        self,
        stage: int,
        queues: StageQueues,
        draws: Sequence[DrawContext],
        sizes: list[int],
        targets: Any,
    ) -> StageWork:
        """Run a stage in a pass: all forward, the loss in the last stage, all backward."""
        try:
            work = StageWork()
            begun = []
            # All forward, then all backward, as in GPipe: the graphs of all micro-batches are
            # stored in between.
            for number, draw in enumerate(draws):
                begun.append(self._forward(stage, number, queues=queues, work=work, draw=draw))
            # The last stage has all outputs now; the loss may be any function of the joint batch.
            if stage + 1 == len(self.division):
                ends = [outputs for _, outputs in begun]
                grads = work.timed("loss", lambda: self._loss(ends, sizes, targets, work))
                for grad in grads:
                    queues.backwards[stage].put(grad)
            for number, graph in enumerate(begun):
                self._backward(stage, number, graph, queues=queues, work=work)
            return work
        except BaseException:
            # The other stages would wait for this stage forever.
            queues.stop()
            raise

    def _forward(
        self, stage: int, number: int, queues: StageQueues, work: StageWork, draw: DrawContext
    ) -> tuple[Any, Any]:
        """Run a micro-batch forward; return (inputs, where this stage's graph begins; outputs).

        Args:
            stage: Number of the stage.
            number: Number of the micro-batch.
            queues: Queues of the pass.
            work: Record of the stage.
            draw: Context of the micro-batch's generators, which continue from the previous stage.
        """
        # This stage's graph begins here: two threads must not run backward through the same graph.
        leaves = batch_trees.detached(queues.taken(queues.forwards[stage]))

        def compute() -> Any:
            with draw, forward_context(self.task, self.chain.devices[stage]):
                return self.chain.stage(stage, to_device(leaves, self.chain.devices[stage]))

        outputs = work.timed(f"forward of micro-batch {number}", compute)
        if stage + 1 < len(self.division):
            work.handed_on += batch_trees.nbytes(outputs)
            # with its graph; the next stage detaches the outputs and begins a new graph
            queues.forwards[stage + 1].put(outputs)
        return leaves, outputs

    def _loss(
        self, outputs: list[Any], sizes: list[int], targets: Any, work: StageWork
    ) -> list[Any]:
        """Compute the loss of the joint batch.

        Return the gradients of each micro-batch's outputs.
        """
        leaves = [batch_trees.detached(one) for one in outputs]
        device = self.chain.devices[-1]
        with forward_context(self.task, device):
            outcome = self.losses.mean(
                batch_trees.join_examples(leaves, sizes), to_device(targets, device), sum(sizes)
            )
        loss = float(outcome.loss.item())
        if not math.isfinite(loss):
            raise LossNotFiniteError(loss, self.where, f"step {self.step + 1}")
        work.loss = loss if outcome.counted else None
        self.scaling.scaled(outcome.loss).backward()  # type: ignore[no-untyped-call]
        return [batch_trees.gradients(leaf) for leaf in leaves]

    def _backward(
        self, stage: int, number: int, graph: tuple[Any, Any], queues: StageQueues, work: StageWork
    ) -> None:
        """Run a micro-batch backward. graph: the result of `_forward`."""
        leaves, outputs = graph
        grads = queues.taken(queues.backwards[stage])
        work.timed(
            f"backward of micro-batch {number}", lambda: batch_trees.backward(outputs, grads)
        )
        if stage > 0:
            back = batch_trees.gradients(leaves)
            work.handed_back += batch_trees.nbytes(back)
            queues.backwards[stage - 1].put(back)

    def _account(self, works: list[StageWork]) -> None:
        """Report the work and the transfers of the stages to the meters."""
        for stage, (sheet, work) in enumerate(zip(self.sheets, works, strict=True)):
            for name, start, end in work.spans:
                sheet.did(name, start, end, self.step + 1)
            for other, handed in ((stage + 1, work.handed_on), (stage - 1, work.handed_back)):
                if handed:
                    # as if memory were not shared
                    sheet.meter.sent(handed)
                    self.sheets[other].meter.received(handed)

    def evaluate(self) -> dict[str, float]:
        return evaluate(self.task, self.chain, self.test_examples, group=self.group, step=self.step)

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter, *(sheet.meter for sheet in self.sheets)]


def stage_name(stage: int, layers: range) -> str:
    """Return a stage's name in reports: "stage 1, layers 2-4"."""
    if len(layers) == 1:
        return f"stage {stage}, layer {layers[0]}"
    return f"stage {stage}, layers {layers[0]}-{layers[-1]}"


def elements_between_stages(widths: Sequence[int], examples: int) -> list[int]:
    """Return the elements that each stage sends in a step: outputs, and gradients of inputs.

    widths: elements of an example at each of the S-1 cuts.
    """
    return [examples * (on + back) for on, back in zip([*widths, 0], [0, *widths], strict=True)]

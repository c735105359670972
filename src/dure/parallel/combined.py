"""Data, pipeline and tensor parallelism at once, on a mesh of ranks.

    a batch is divided over the data groups; in each, its micro-batches pass through the stages of a pipeline;
    the layers of a stage are divided over the ranks of a tensor group

A step is: every pipeline computes its examples' gradients; parameters that several stages use sum theirs; data groups
sum what their ranks hold alike; every rank updates what it holds. So every degree may be one, and what is left is one
of the systems alone. All of them compute what one worker does on the joint batch.

Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM";
each system's own page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
from safetensors.torch import load
from torch import Tensor, nn

from dure.collectives.all_reduce import all_reduce
from dure.data.batches import Batches, check_joint_batch
from dure.data.partition import Description
from dure.devices import to_cpu, to_device
from dure.errors import LossNotFiniteError
from dure.evaluation import ratio
from dure.parallel.mesh import Mesh, groups_on
from dure.parallel.pipeline import validate
from dure.parallel.pipeline.apart import Remaining
from dure.parallel.pipeline.balance import Balance
from dure.parallel.pipeline.cut import CutModel, forget
from dure.parallel.pipeline.draws import Stream
from dure.parallel.pipeline.evaluation import totals_of
from dure.parallel.pipeline.runtime import Engine
from dure.parallel.pipeline.schedule import Schedule, in_order, make
from dure.parallel.pipeline.stage import Microbatch, Stage
from dure.parallel.single import check_gradient
from dure.randomness import derive, generators_state, restore_generators, seed_generators
from dure.record.checkpoint import weights_to_bytes
from dure.record.meter import Meter
from dure.strategy import Kind, Learner, Place, Progress, examples_for, seeded_model
from dure.task import Task
from dure.threads import flops_per_step

OWN = "F0.0"
"""What every list of actions has in it, and no name."""


@dataclass(frozen=True)
class Parallel:
    """Strategies combined on a mesh.

    Args:
        mesh: how many ranks lie along each axis.
        batch_size: examples of a step over all workers together; None is all the data.
        microbatches: M, the parts of a pipeline's batch that pass through the stages one behind the other.
        schedule: naive, gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-v; or a list of your own, as text.
        stages_per_rank: of the interleaved schedule; by default two.
        cut: names of the modules at which the stages behind the first begin; by default dure cuts in balance.
        balance: what is balanced: estimated or measured time, or memory.
        recompute: stages keep their inputs alone, and compute the rest again for backward.
        clip_norm: the largest norm that a step's gradient may have; by default any.
    """

    mesh: Mesh = Mesh()  # noqa: RUF009
    batch_size: int | None = 64
    microbatches: int = 4
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    cut: tuple[str, ...] | None = None
    balance: Balance = "estimated"
    recompute: bool = False
    clip_norm: float | None = None

    name: ClassVar[str] = "parallel"
    kind: ClassVar[Kind] = "ranks"
    unit: ClassVar[str] = "step"

    @property
    def label(self) -> str:
        return f"parallel {'x'.join(map(str, self.mesh.degrees))}"

    def list_for(self, microbatches: int) -> Schedule:
        """The schedule for so many micro-batches. Raises ValueError if there is none."""
        if OWN in self.schedule:
            own = Schedule.parse(self.schedule)
            if own.ranks != self.mesh.pipeline:
                raise ValueError(f"the schedule has lists for {own.ranks} ranks, but the pipeline {self.mesh.pipeline}")
            return own if own.microbatches == microbatches else in_order(own.home, microbatches)
        per_rank = self.stages_per_rank or (2 if self.schedule in ("interleaved", "zero-bubble-v") else 1)
        return make(self.schedule, self.mesh.pipeline, microbatches, per_rank)

    @property
    def most(self) -> int:
        """Micro-batches of a batch that is large enough."""
        if OWN in self.schedule:
            return Schedule.parse(self.schedule).microbatches
        return 1 if self.schedule == "naive" else self.microbatches

    def check(self, task: Task, workers: int | None) -> None:
        if workers is not None:
            self.mesh.check(workers)
        check_joint_batch(self.batch_size, len(task.train), self.mesh.data)
        check_gradient(1, self.clip_norm)
        if self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches}, but a batch is one micro-batch at least")
        schedule = self.list_for(self.most)
        validate.check(schedule)
        model = seeded_model(task, 0)
        train, _ = examples_for(model, task)
        cut = CutModel(model, lambda examples: train.batch(torch.arange(examples))[0], schedule.stages, 1)
        cut.decide(cut.choose(self.cut, "estimated"))

    def division(self, task: Task, seed: int) -> Description | None:
        return None

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return ParallelLearner(task, place, seed, self)


class ParallelLearner:
    """One rank of a mesh at work."""

    unit = "step"
    resizes = True

    def __init__(self, task: Task, place: Place, seed: int, strategy: Parallel) -> None:
        self.task, self.group, self.seed, self.strategy = task, place.group, seed, strategy
        self.device = place.devices[0]
        self.groups = groups_on(strategy.mesh, self.group)
        self.at = self.groups.at
        self.where = f"rank {self.group.rank}"
        self.step = 0
        self.model = seeded_model(task, seed).to(self.device).train()
        self.train_examples, self.test_examples = examples_for(self.model, task)
        self.batches = Batches(len(self.train_examples), strategy.batch_size, seed)
        self.units_per_epoch = self.batches.steps_per_epoch
        self._flops = flops_per_step(self.model, self.train_examples, self._share()) / strategy.mesh.pipeline
        self._first_name = first_names(self.model)
        self._cut()
        self.optimizer = task.optimizer(list(self.parameters.values())) if self.parameters else None

    def _share(self) -> int:
        """Examples of a step in this pipeline."""
        return -(-self.batches.batch_size // self.strategy.mesh.data)

    def flops_per_step(self) -> float:
        return self._flops

    # The cut.

    def _cut(self) -> None:
        strategy = self.strategy
        self.schedule = strategy.list_for(strategy.most)
        self.stream = Stream(derive(self.seed, "draws", self.at.data), carried=False)
        examples = -(-self._share() // strategy.most)
        self.cut = CutModel(self.model, self._sample, self.schedule.stages, examples)
        starts = self.cut.choose(strategy.cut, strategy.balance)
        packed = self.group.broadcast_bytes(msgspec.msgpack.encode(starts) if self.group.rank == 0 else None)
        self.cut.decide(msgspec.msgpack.decode(packed, type=list[int]))
        self.stream.carried = strategy.most == 1 and self.cut.draws
        apart = any(action.kind == "weight_gradient" for actions in self.schedule.actions for action in actions)
        self.remaining: Remaining | None = [] if apart else None
        self.own = self.schedule.stages_of(self.at.pipeline)
        self._hold()
        self.stages = {number: self._stage(number) for number in self.own}
        self._engines: dict[int, Engine] = {}

    def _hold(self) -> None:
        """Keeps what this rank's stages use, and lets go of the rest."""
        homes = {name: [self.schedule.home[stage] for stage in held] for name, held in self.cut.holders.items()}
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        known = {name for name, _ in tensors}
        self.keepers = {name: sorted(set(homes.get(name, [0]))) for name in known}
        mine = self.at.pipeline
        self.held = [name for name, _ in tensors if mine in self.keepers[name]]
        if self.strategy.mesh.pipeline > 1:
            forget(self.model, [name for name, _ in tensors if mine not in self.keepers[name]])
        held = set(self.held)
        self.parameters = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name in held and parameter.requires_grad
        }
        self.tied = [name for name in self.parameters if len(self.keepers[name]) > 1]

    def _sample(self, examples: int) -> Any:
        before = generators_state()
        inputs, _ = self.train_examples.batch(torch.arange(examples) % len(self.train_examples))
        restore_generators(before)
        return to_device(inputs, self.device)

    def _stage(self, number: int) -> Stage:
        return Stage(
            number,
            number == self.schedule.stages - 1,
            lambda examples: self.cut.program(number, examples, True, self.stream, self.remaining),
            lambda examples: self.cut.structure(examples, True),
            self.task.loss,
            self.stream,
            self.remaining,
            self.strategy.recompute,
        )

    # A step.

    def advance(self, wish: int) -> Progress:
        """One step of the optimizer on the next joint batch."""
        self.groups.at_step(self.group.step)
        seed_generators(self.seed, "step", self.step, self.at.data, everything=self.train_examples.draws)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        indices = self.batches.at(self.step)
        loss, wish = self._agree(self.gradients(indices), wish)
        if not math.isfinite(loss):
            raise LossNotFiniteError(loss, self.where, f"step {self.step + 1}", intact=False)
        started = time.perf_counter()
        if self.optimizer is not None:
            self.optimizer.step()
        self.group.meter.compute("update", started, time.perf_counter(), self.step + 1)
        self.step += 1
        return Progress(loss, len(indices), wish)

    def gradients(self, indices: Tensor) -> float:
        """Leaves the mean gradient over the joint batch in the parameters held here; returns this rank's loss."""
        part = indices.tensor_split(self.strategy.mesh.data)[self.at.data]
        pieces = part.tensor_split(min(self.strategy.most, len(part))) if len(part) else []
        batches = [self._microbatch(piece, number, len(indices)) for number, piece in enumerate(pieces)]
        if batches:
            self._engine(len(batches)).run(self.step, batches)
        self._sum_tied()
        self._sum_over_replicas()
        if self.strategy.clip_norm is not None:
            self._clip(self.strategy.clip_norm)
        last = self.stages.get(self.schedule.stages - 1)
        if last is None or not batches:
            return 0.0
        return sum(last.losses[number] * batch.share for number, batch in enumerate(batches))

    def _microbatch(self, indices: Tensor, number: int, of: int) -> Microbatch:
        def read() -> tuple[Any, Any]:
            if self.train_examples.draws:  # the first and the last stage read the same
                before = generators_state()
                seed_generators(self.seed, "read", self.step, self.at.data, number, everything=True)
            content: tuple[Any, Any] = to_device(self.train_examples.batch(indices), self.device)
            if self.train_examples.draws:
                restore_generators(before)
            return content

        return Microbatch(len(indices), len(indices) / of, read)

    def _engine(self, microbatches: int) -> Engine:
        if microbatches not in self._engines:
            schedule = self.strategy.list_for(microbatches)
            self._engines[microbatches] = Engine(self.groups.pipeline, schedule, self.stages, self.stream, self.device)
        return self._engines[microbatches]

    def _agree(self, loss: float, wish: int) -> tuple[float, int]:
        """The loss over the joint batch, and rank 0's wish."""
        counts = self.at.tensor == 0
        rows = self.group.all_gather_values([loss if counts else 0.0, float(wish)], "exchange of losses")
        return sum(row[0] for row in rows), int(rows[0][1])

    # What ranks hold alike.

    @torch.no_grad()
    def _sum_tied(self) -> None:
        """Parameters that several stages use: the gradient is the sum of theirs, in order of stages, on each."""
        group = self.groups.pipeline
        for name in self.tied:
            parameter, ranks = self.parameters[name], self.keepers[name]
            mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            others = [rank for rank in ranks if rank != group.rank]
            arrived = {rank: torch.empty_like(mine) for rank in others}
            end = group.begin_transfer(
                f"sum of the gradients of {name}",
                [(mine.contiguous(), rank) for rank in others],
                [(arrived[rank], rank) for rank in others],
            )
            end()
            parameter.grad = sum(
                (arrived.get(rank, mine) for rank in ranks[1:]), start=arrived.get(ranks[0], mine).clone()
            )

    @torch.no_grad()
    def _sum_over_replicas(self) -> None:
        group = self.groups.data
        if group.size == 1 or not self.parameters:
            return
        started = time.perf_counter()
        parameters = list(self.parameters.values())
        used = [float(parameter.grad is not None) for parameter in parameters]
        alike = [sum(column) for column in zip(*group.all_gather_values(used), strict=True)]
        summed = [parameter for parameter, count in zip(parameters, alike, strict=True) if count]
        for alike_type in {(parameter.dtype, parameter.device) for parameter in summed}:
            same = [parameter for parameter in summed if (parameter.dtype, parameter.device) == alike_type]
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in same]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            all_reduce(flat, algorithm="native", group=group)
            for parameter, piece in zip(same, torch.split(flat, [p.numel() for p in same]), strict=True):
                parameter.grad = piece.view(parameter.shape)
        self.group.meter.communication("all-reduce of gradients", started, time.perf_counter(), self.step + 1)

    def _clip(self, largest: float) -> None:
        """Scales the gradient so that its norm over the whole model is at most `largest`."""
        first = {name for name in self.parameters if self.keepers[name][0] == self.at.pipeline}
        squares = [
            float(parameter.grad.double().square().sum())
            for name, parameter in self.parameters.items()
            if name in first and parameter.grad is not None
        ]
        total = sum(row[0] for row in self.groups.pipeline.all_gather_values([sum(squares)]))
        scale = min(1.0, largest / (math.sqrt(total) + 1e-6))
        for parameter in self.parameters.values():
            if parameter.grad is not None and scale < 1:
                parameter.grad *= scale

    def evaluate(self) -> dict[str, float]:
        """The test examples, forward through the pipelines; each takes its share."""
        if self.test_examples is None:
            return {}
        started = time.perf_counter()
        self.groups.at_step(self.group.step)
        share = torch.arange(len(self.test_examples)).tensor_split(self.strategy.mesh.data)[self.at.data]
        self.model.eval()
        totals = totals_of(self.task, self.test_examples, share, self.cut, self.schedule.home, self.groups.pipeline)
        self.model.train()
        if self.at.tensor > 0:
            totals = [0.0] * len(totals)
        sums = [sum(column) for column in zip(*self.group.all_gather_values(totals), strict=True)]
        self.group.meter.mark("evaluation", "evaluation", started, time.perf_counter(), self.step)
        names = ["loss", *self.task.measures]
        return {f"test_{name}": ratio(sums[i], sums[len(names) + i]) for i, name in enumerate(names)}

    # What is kept.

    def weights(self) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        state = self.model.state_dict()
        mine = {name: state[name] for name in state if self._keeper(name) == self.at.pipeline}
        sends = self.at.data == 0 and self.at.tensor == 0
        content = weights_to_bytes(to_cpu(mine)) if sends else b""
        for part in self.group.gather_bytes(content):
            if part:
                whole |= load(part)
        return {name: whole[name] for name in state} if self.group.rank == 0 else {}

    def _keeper(self, name: str) -> int:
        """The stage's rank from which an entry of the state_dict is taken."""
        return self.keepers[self._first_name[name]][0]

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "buffers": {}}

    def part(self) -> dict[str, Any]:
        """The optimizer's state of what this rank holds, by name."""
        if self.optimizer is None:
            return {"groups": [], "state": {}}
        written = to_cpu(self.optimizer.state_dict())
        names = list(self.parameters)
        states = {names[index]: value for index, value in written["state"].items()}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in written["param_groups"]]
        return {"groups": groups, "state": states}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        own = self.model.state_dict(keep_vars=True)
        held = set(self.held)
        with torch.no_grad():
            for name, value in weights.items():
                if self._first_name[name] in held:
                    own[name].copy_(value)
        if self.optimizer is not None:
            states: dict[str, Any] = {}
            for part in state["parts"]:
                states |= {name: value for name, value in part["state"].items() if name in self.parameters}
            groups = next(part["groups"] for part in state["parts"] if part["groups"])
            names = list(self.parameters)
            self.optimizer.load_state_dict(
                {
                    "state": {index: states[name] for index, name in enumerate(names) if name in states},
                    "param_groups": [{**groups[0], "params": list(range(len(names)))}],
                }
            )
        self.step = state["step"]

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter]


def first_names(model: nn.Module) -> dict[str, str]:
    """Each name of the state_dict to the first name of its tensor, where several share it."""
    firsts = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return {name: firsts.get(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}

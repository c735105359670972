"""Data, pipeline and tensor parallelism at once, on a mesh of ranks.

    a batch is divided over the data groups; in each, its micro-batches pass through the stages of a
    pipeline; the layers of a stage are divided over the ranks of a tensor group

A step is: every pipeline computes its examples' gradients; parameters that several stages use sum
theirs; data groups sum what their ranks hold alike; every rank updates what it holds. So every
degree may be one, and what is left is one of the systems alone. All of them compute what one worker
does on the joint batch.

Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM"; each system's own page.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import msgspec
import torch
from torch import Tensor, nn

from dure.contracts.lr_schedule import Rates
from dure.contracts.strategy import (
    Kind,
    Learner,
    Place,
    Progress,
    Strategy,
    another,
    examples_for,
)
from dure.contracts.task import Task
from dure.data.batches import Batches, check_joint_batch
from dure.data.examples import Examples
from dure.errors import LossNotFiniteError
from dure.machine.devices import to_device
from dure.machine.threads import flops_per_step
from dure.parallel.divisible import check_element_wise, check_parameter_wise
from dure.parallel.local.single import check_gradient
from dure.parallel.mesh import checkpoint as mesh_checkpoint
from dure.parallel.mesh import gradients as mesh_gradients
from dure.parallel.mesh import zero as mesh_zero
from dure.parallel.mesh.facts import facts_of
from dure.parallel.mesh.mesh import Mesh, groups_on
from dure.parallel.pipeline import validate
from dure.parallel.pipeline.apart import Remaining, now
from dure.parallel.pipeline.balance import Balance
from dure.parallel.pipeline.builders import in_order, make
from dure.parallel.pipeline.cut import CutModel, UncutModel, forget
from dure.parallel.pipeline.draws import Stream
from dure.parallel.pipeline.evaluation import chunks_of, totals_of
from dure.parallel.pipeline.runtime import Engine
from dure.parallel.pipeline.schedule import Schedule
from dure.parallel.pipeline.stage import Microbatch, Stage
from dure.parallel.speaker import Speaker
from dure.parallel.tensor import parallelize
from dure.parallel.tensor.dividing import check_lengths, check_plan
from dure.parallel.tensor.draws import Draws, modules_on_shards
from dure.parallel.tensor.layers import Divided
from dure.parallel.tensor.plan import divides_sequences
from dure.parallel.tensor.ready import plan_of
from dure.parallel.tensor.written_plan import TensorPlan
from dure.parallel.zero.redundancy import ZeroRedundancy
from dure.randomness.seeds import derive, generators_state, restore_generators, seed_generators
from dure.record.meter import Meter
from dure.tasks.evaluation import ratio
from dure.tasks.loss_shares import Shares

OWN = ":"
"""What every schedule as text has in it, and no name."""


@dataclasses.dataclass(frozen=True)
class Parallel(Strategy):
    """Strategies combined on a mesh.

    Args:
        mesh: how many ranks lie along each axis.
        batch_size: examples of a step over all workers together; None is all the data.
        microbatches: M, the parts of a pipeline's batch that pass through the stages one behind the
            other.
        schedule: naive, gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-v; or a list of your
            own, as text.
        stages_per_rank: of the interleaved schedule; by default two.
        cut: names of the modules at which the stages behind the first begin; by default dure cuts
            in balance.
        balance: what is balanced: estimated or measured time, or memory.
        recompute: stages keep their inputs alone, and compute the rest again for backward.
        sequence: tensor neighbours hold shards of the sequence between the layers that they divide.
        zero: 1 divides the optimizer's state over the ranks of a data group; in one stage 2 divides
            the gradients too, 3 the parameters too.
        clip_norm: the largest norm that a step's gradient may have; by default any.
        plan: which layers are divided, and how (docs/tensor-parallel.md); by default the model's
            ready plan.
    """

    mesh: Mesh = Mesh()  # noqa: RUF009
    batch_size: int | None = 64
    microbatches: int = 4
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    cut: tuple[str, ...] | None = None
    balance: Balance = "estimated"
    recompute: bool = False
    sequence: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    clip_norm: float | None = None
    plan: TensorPlan = TensorPlan()  # noqa: RUF009

    name: ClassVar[str] = "parallel"
    kind: ClassVar[Kind] = "ranks"
    unit: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", TensorPlan(self.plan))

    @property
    def label(self) -> str:
        return f"parallel {'x'.join(map(str, self.mesh.degrees))}" + self.plan.label

    def list_for(self, microbatches: int) -> Schedule:
        """The schedule for so many micro-batches. Raises ValueError if there is none."""
        if OWN in self.schedule:
            own = Schedule.parse(self.schedule)
            if own.ranks != self.mesh.pipeline:
                raise ValueError(
                    f"the schedule has lists for {own.ranks} ranks, but the pipeline "
                    f"{self.mesh.pipeline}"
                )
            made = own if own.microbatches == microbatches else in_order(own.home, microbatches)
        else:
            per_rank = self.stages_per_rank
            if per_rank is None:
                per_rank = 2 if self.schedule in ("interleaved", "zero-bubble-v") else 1
            made = make(self.schedule, self.mesh.pipeline, microbatches, per_rank)
        return made if self.zero < 2 else make("1f1b", self.mesh.pipeline, microbatches, 1)

    @property
    def ranks(self) -> int | None:
        return self.mesh.size

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
            raise ValueError(
                f"microbatches is {self.microbatches}, but a batch is one micro-batch at least"
            )
        if self.balance not in get_args(Balance):
            raise ValueError(
                f"there is no balance {self.balance!r}: choose {', '.join(get_args(Balance))}"
            )
        validate.check(self.list_for(self.most))

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Divides a copy of the model, and runs it on one micro-batch."""
        schedule = self.list_for(self.most)
        model = another(model, task, 0)
        train, test = examples_for(model, task)
        mesh_zero.check(self, model)
        if self.mesh.tensor > 1 or self.zero:
            check_element_wise(task.optimizer(list(model.parameters())))
        elif self.mesh.pipeline > 1:
            check_parameter_wise(task.optimizer(list(model.parameters())))
        if self.mesh.tensor > 1 or self.plan.entries:
            plan = plan_of(model, self.sequence, self.plan)
            check_plan(model, plan, self.mesh.tensor)
            for examples in (train, test) if divides_sequences(plan) else ():
                if examples is not None and len(examples):
                    check_lengths(model, plan, self.mesh.tensor, sample(examples, 1))
        if self.uncut:
            if self.cut:
                raise ValueError(
                    f"a model in one stage begins nowhere else, but cut names {', '.join(self.cut)}"
                )
            return
        tests = partial(sample, test) if test is not None and len(test) else None
        cut = CutModel(
            model, partial(sample, train), schedule.stages, self.examples(len(train)), tests
        )
        cut.decide(cut.choose(self.cut, "estimated"))
        if cut.changed and (self.mesh.data > 1 or self.recompute):
            what = (
                "replicas would go apart"
                if self.mesh.data > 1
                else "recomputation would change it again"
            )
            raise ValueError(
                f"{cut.changed[0]} changes in a forward pass (as by max_norm), and {what}"
            )
        if tests is not None:
            try:
                cut.homes(2, False)
            except ValueError as error:
                raise ValueError(f"in evaluation, {error}") from error

    @property
    def uncut(self) -> bool:
        """Whether the model is computed as it is, in one stage."""
        return self.list_for(self.most).stages == 1 and (self.mesh.tensor > 1 or self.zero > 1)

    def examples(self, of: int) -> int:
        """In a micro-batch, at most, if so many are to be learned."""
        batch = of if self.batch_size is None else min(self.batch_size, of)
        return -(-batch // (self.mesh.data * self.most))

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return ParallelLearner(task, place, seed, self)


class ParallelLearner(Learner):
    """One rank of a mesh at work."""

    unit = "step"
    parted = True
    resizes = True

    def __init__(self, task: Task, place: Place, seed: int, strategy: Parallel) -> None:
        self.task, self.group, self.seed, self.strategy = task, place.group, seed, strategy
        self.device = place.devices[0]
        self.groups = groups_on(strategy.mesh, self.group)
        self.at = self.groups.at
        self.where = f"rank {self.group.rank}"
        self.step = 0
        self.model = place.model(task, seed).to(self.device).train()
        self._divide_layers()
        self._draws = draws_of(self.model)
        self.train_examples, self.test_examples = examples_for(self.model, task)
        self.shares = Shares(task.loss, self.train_examples)
        self.batches = Batches(len(self.train_examples), strategy.batch_size, seed)
        self.units_per_epoch = self.batches.steps_per_epoch
        self._flops = (
            flops_per_step(self.model, self.train_examples, self._share()) / strategy.mesh.pipeline
        )
        self.first_name = first_names(self.model)
        self._cut()
        self._make_optimizer()
        self.speaking = Speaker(self.model) if strategy.uncut else None

    def _make_optimizer(self) -> None:
        """The optimizer of what this rank holds; its state is divided over the data group, if that
        is asked for."""
        self.zero: ZeroRedundancy | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if not self.cut.learned & self.parameters.keys():
            return
        self.optimizer = self.task.optimizer(
            list(self.model.parameters())
        )  # of all: its groups may go by place
        self.rates = Rates(self.optimizer, self.task.lr_schedule)
        held = {id(parameter) for parameter in self.parameters.values()}
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in held]
        for parameter in [
            parameter for parameter in self.optimizer.state if id(parameter) not in held
        ]:
            del self.optimizer.state[parameter]
        self.zero = mesh_zero.zero_of(self)

    def _share(self) -> int:
        """Examples of a step in this pipeline."""
        return -(-self.batches.batch_size // self.strategy.mesh.data)

    def flops_per_step(self) -> float:
        return self._flops

    def _divide_layers(self) -> None:
        """Divides the layers over the tensor group."""
        mesh, group = self.strategy.mesh, self.groups.tensor
        if mesh.tensor == 1:
            return
        homes = {rank: number for number, ranks in enumerate(self.group.hosts()) for rank in ranks}
        mesh.check_hosts([homes[rank] for rank in range(self.group.size)])
        parallelize(
            self.model, plan_of(self.model, self.strategy.sequence, self.strategy.plan), group
        )

    # The cut.

    def _cut(self) -> None:
        strategy = self.strategy
        self.schedule = strategy.list_for(strategy.most)
        self.stream = Stream(derive(self.seed, "draws", self.at.data), False, self._own_draws)
        examples = strategy.examples(len(self.train_examples))
        self.cut = (UncutModel if strategy.uncut else CutModel)(
            self.model, self._sample, self.schedule.stages, examples, self._test_sample
        )
        starts = self.cut.choose(strategy.cut, strategy.balance)
        packed = self.group.broadcast_bytes(
            msgspec.msgpack.encode(starts) if self.group.rank == 0 else None
        )
        self.cut.decide(msgspec.msgpack.decode(packed, type=list[int]))
        numbered = strategy.most > 1 or (bool(modules_on_shards(self.model)) and not strategy.uncut)
        self.stream.carried = not numbered and self.cut.draws
        self._loss = self.stream.drawing(self.task.loss, -1) if numbered else self.task.loss
        apart = any(
            action.kind == "weight_gradient"
            for actions in self.schedule.actions
            for action in actions
        )
        self.remaining: Remaining | None = [] if apart else None
        self.later = now if self.remaining is None else self.remaining.append
        self.own = self.schedule.stages_of(self.at.pipeline)
        self._hold()
        self.stages = {number: self._stage(number) for number in self.own}
        self._engines: dict[int, Engine] = {}
        programs = [stage.program_for(examples) for stage in self.stages.values()]
        self.written = sorted({name for program in programs for name in program.written})

    def _hold(self) -> None:
        """Keeps what this rank's stages use in training, and what none uses, and lets go of the
        rest.

        What training does not use evaluation may, in any stage.
        """
        homes = {
            name: [self.schedule.home[stage] for stage in held]
            for name, held in self.cut.holders.items()
        }
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        known = {name for name, _ in tensors}
        everywhere = list(range(self.strategy.mesh.pipeline))
        self.keepers = {name: sorted(set(homes.get(name, everywhere))) for name in known}
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
        self.tied = [
            name
            for name in self.parameters
            if name in self.cut.learned and len(self.keepers[name]) > 1
        ]

    def _own_draws(self, on_shards: bool) -> int | None:
        """This rank's place in its tensor group while it computes inside a divided layer's region,
        or on a shard."""
        inside = on_shards or any(draws.inside for draws in self._draws)
        return self.at.tensor if inside else None

    def _sample(self, examples: int) -> Any:
        return to_device(sample(self.train_examples, examples), self.device)

    def _test_sample(self, examples: int) -> Any:
        return to_device(sample(self.test_examples or self.train_examples, examples), self.device)

    def _stage(self, number: int) -> Stage:
        return Stage(
            number,
            number == self.schedule.stages - 1,
            lambda examples: self.cut.program(number, examples, True, self.stream, self.later),
            lambda examples: self.cut.structure(examples, True),
            self._loss,
            self.stream,
            self.remaining,
            self.strategy.recompute,
        )

    # A step.

    def advance(self, wish: int) -> Progress:
        """One step of the optimizer on the next joint batch."""
        self.groups.at_step(self.group.step)
        seed_generators(
            self.seed, "step", self.step, self.at.data, everything=self.train_examples.draws
        )
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        indices = self.batches.at(self.step)
        loss, wish = self._agree(self.gradients(indices), wish)
        if not math.isfinite(loss):
            raise LossNotFiniteError(loss, self.where, f"step {self.step + 1}", intact=False)
        started = time.perf_counter()
        if self.optimizer is not None:
            self.rates.at(self.step)
            self.optimizer.step()
        self.group.meter.compute("update", started, time.perf_counter(), self.step + 1)
        mesh_zero.account(self, computing=True)
        mesh_gradients.share_buffers(self)
        self.step += 1
        return Progress(loss, len(indices), wish)

    def gradients(self, indices: Tensor) -> float:
        """Leaves the mean gradient over the joint batch in the parameters held here; returns this
        rank's loss."""
        parts = indices.tensor_split(self.strategy.mesh.data)
        part, most = parts[self.at.data], min(self.strategy.most, len(parts[0]))
        pieces = part.tensor_split(min(self.strategy.most, len(part))) if len(part) else []
        batches = [self._microbatch(piece, number, indices) for number, piece in enumerate(pieces)]
        if self.zero is not None and self.zero.stage > 1:  # ranks of a data group go the same ways
            batches += [self._idle(indices[:1], number) for number in range(len(batches), most)]
        if batches:
            self._engine(len(batches)).run(self.step, batches)
        mesh_zero.account(self, computing=True)
        mesh_gradients.sum_tied(self)
        mesh_gradients.sum_over_replicas(self)
        if self.strategy.clip_norm is not None:
            mesh_gradients.clip(self, self.strategy.clip_norm)
        last = self.stages.get(self.schedule.stages - 1)
        if last is None or not batches:
            return 0.0
        return sum(last.losses[number] * batch.share for number, batch in enumerate(batches))

    def _idle(self, indices: Tensor, number: int) -> Microbatch:
        """One that counts nothing."""
        return dataclasses.replace(self._microbatch(indices, number, indices), share=0.0)

    def _microbatch(self, indices: Tensor, number: int, of: Tensor) -> Microbatch:
        def read() -> tuple[Any, Any]:
            content: tuple[Any, Any] = to_device(self.train_examples.batch(indices), self.device)
            return content

        def read_anew() -> tuple[Any, Any]:
            """The first and the last stage read the same; one micro-batch is read as one worker
            reads it."""
            before = generators_state()
            purpose = ("step",) if self.strategy.most == 1 else ("read", number)
            seed_generators(
                self.seed, purpose[0], self.step, self.at.data, *purpose[1:], everything=True
            )
            content = read()
            restore_generators(before)
            return content

        goes_on = (
            self.strategy.most == 1 and 0 in self.own
        )  # the model draws where reading has stopped
        anew = self.train_examples.draws and not goes_on
        return Microbatch(len(indices), self.shares.of(indices, of), read_anew if anew else read)

    def _engine(self, microbatches: int) -> Engine:
        if microbatches not in self._engines:
            schedule = self.strategy.list_for(microbatches)
            self._engines[microbatches] = Engine(
                self.groups.pipeline, schedule, self.stages, self.stream, self.device
            )
        return self._engines[microbatches]

    def _agree(self, loss: float, wish: int) -> tuple[float, int]:
        """The loss over the joint batch, and rank 0's wish."""
        counts = self.at.tensor == 0
        rows = self.group.all_gather_values(
            [loss if counts else 0.0, float(wish)], "exchange of losses"
        )
        return sum(row[0] for row in rows), int(rows[0][1])

    def evaluate(self) -> dict[str, float]:
        """The test examples, forward through the pipelines; each takes its share."""
        if self.test_examples is None:
            return {}
        started = time.perf_counter()
        self.groups.at_step(self.group.step)
        shares = torch.arange(len(self.test_examples)).tensor_split(self.strategy.mesh.data)
        chunks = [chunks_of(share, self.task, self.cut.stages) for share in shares]
        mine = chunks[self.at.data]
        self.model.eval()
        with self.zero.uncounted() if self.zero is not None else nullcontext():
            totals = self._totals(mine)
            if self.zero is not None and self.zero.stage > 1:
                self._totals(
                    [shares[0][:1]] * (max(map(len, chunks)) - len(mine))
                )  # which count nothing
        self.model.train()
        if self.at.tensor > 0:
            totals = [0.0] * len(totals)
        sums = [sum(column) for column in zip(*self.group.all_gather_values(totals), strict=True)]
        self.group.meter.mark("evaluation", "evaluation", started, time.perf_counter(), self.step)
        names = ["loss", *self.task.measures]
        return {
            f"test_{name}": ratio(sums[i], sums[len(names) + i]) for i, name in enumerate(names)
        }

    def _totals(self, chunks: Sequence[Tensor]) -> list[float]:
        assert self.test_examples is not None
        return totals_of(
            self.task,
            self.test_examples,
            chunks,
            self.cut,
            self.schedule.home,
            self.groups.pipeline,
        )

    # What is kept.

    def weights(self) -> dict[str, Tensor]:
        return mesh_checkpoint.weights_of(self)

    def state(self) -> dict[str, Any]:
        return mesh_checkpoint.state_of(self)

    def part(self) -> dict[str, Any]:
        return mesh_checkpoint.part_of(self)

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        mesh_checkpoint.restore(self, weights, state)
        self.speaking = Speaker(self.model) if self.strategy.uncut else None

    def facts(self) -> dict[str, Any]:
        """What this rank holds, for the report: see `dure.parallel.mesh.facts`."""
        return facts_of(self)

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter]


def sample(examples: Examples, count: int) -> Any:
    """Inputs of so many examples, whatever their values are; no generator is advanced."""
    before = generators_state()
    inputs, _ = examples.batch(torch.arange(count) % len(examples))
    restore_generators(before)
    return inputs


def first_names(model: nn.Module) -> dict[str, str]:
    """Each name of the state_dict to the first name of its tensor, where several share it."""
    firsts = {
        id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    return {
        name: firsts.get(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def draws_of(model: nn.Module) -> set[Draws]:
    """What the divided layers of a model draw from."""
    return {
        module.draws
        for module in model.modules()
        if isinstance(module, Divided) and module.draws is not None
    }

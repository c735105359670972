"""Data, pipeline and tensor parallelism combined on a mesh of ranks.

    data      a batch is divided over the data groups;
    pipeline  in each group its micro-batches pass through the stages of a pipeline;
    tensor    the layers of a stage are divided over the ranks of a tensor group

In a step every pipeline computes the gradients of its examples. Stages sum the gradients of
parameters that they share, and data groups sum replicated gradients. Then every rank updates its
parameters. Any degree may be 1, so each of the three systems is a special case. All combinations
compute the steps of a single worker on the joint batch.

Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM"; each system's own page.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import msgspec
from torch import Tensor, nn

from dure.arguments import at_least, check_ranges
from dure.contracts.fresh_model import examples_for, unused_copy
from dure.contracts.learner import Learner, Proof, StepResult
from dure.contracts.lr_schedule import ScheduledRates
from dure.contracts.strategy import Feature, RunTraits, Strategy, Traits
from dure.contracts.task import Task
from dure.contracts.training_options import Part, trained_from
from dure.contracts.world import Kind, RankContext, World
from dure.data.batches import Batches, check_joint_batch
from dure.data.examples import Examples
from dure.data.sampling import JOINT_SAMPLING
from dure.errors import LossNotFiniteError
from dure.machine.devices import to_device
from dure.memory.file_backed_init import in_files_like, releasing_pass
from dure.memory.formula import MemoryShares, divided_shares
from dure.memory.offload.offload_setting import Offload, parse_offload
from dure.memory.recomputation import recompute_modules
from dure.memory.recompute_setting import ALL, Recompute
from dure.parallel.buffer_broadcast import BufferSync
from dure.parallel.learner_offloading import NO_OFFLOAD, LearnerOffloading, check_offload
from dure.parallel.learner_offloading import check_optimizer as check_steps_of
from dure.parallel.learner_recomputation import (
    NO_RECOMPUTE,
    NO_RECOMPUTE_REQUEST,
    RecomputeRequest,
    check_recompute,
    prove_recompute,
    recompute_plan_for,
)
from dure.parallel.mesh.check import (
    EVALUATED,
    check_cut,
    check_layers,
    check_optimizer,
    check_regions,
    sample,
)
from dure.parallel.mesh.checkpoint import part_of, restore, state_of, weights_of
from dure.parallel.mesh.evaluation import evaluate
from dure.parallel.mesh.facts import facts_of
from dure.parallel.mesh.gradients import (
    clip,
    share_buffers,
    sum_over_replicas,
    sum_tied,
    summed_gradients,
)
from dure.parallel.mesh.mesh import Mesh, groups_on
from dure.parallel.mesh.microbatch_reader import MicrobatchReader
from dure.parallel.mesh.proof import prove_layers
from dure.parallel.mesh.rank_state import build_rank_state, optimizer_of
from dure.parallel.mesh.zero import account, parts_changed, trained_parts, zero_of
from dure.parallel.mesh.zero import check as check_zero
from dure.parallel.pipeline import validate
from dure.parallel.pipeline.balance import Balance
from dure.parallel.pipeline.builders import in_order, make
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.message_cost import cost_facts
from dure.parallel.pipeline.proof import prove_cut
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.runtime import PipelineEngine
from dure.parallel.pipeline.schedule import Schedule, is_user_defined
from dure.parallel.pipeline.single_stage import SingleStageModel
from dure.parallel.pipeline.split_backward import DeferredGradients, compute_now
from dure.parallel.pipeline.stage import Stage
from dure.parallel.pipeline.trace import TRACES
from dure.parallel.tensor.builtin_plans import plan_of
from dure.parallel.tensor.divided import draws_of
from dure.parallel.tensor.dividing import divide
from dure.parallel.tensor.plan import DivisionPlan
from dure.parallel.tensor.rng import modules_on_shards
from dure.parallel.tensor.written_plan import TensorPlan
from dure.parallel.weight_broadcast import share_weights
from dure.randomness.seeds import derive, seed_generators
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_pieces
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.flat import check_no_shared_memory
from dure.tensors.optimizer_state import free_optimizer

ALL_VALUES = (1 << 48) - 1
"""Bit mask of all values that the last stage may receive: 48 bits, which a float64 represents."""

TRAINS_WITH: frozenset[Part] = frozenset({"clip_norm", "ema", "unfreeze", "adapter"})
"""Parts of learning that a task may request and that ranks of a mesh support."""


def cannot(feature: Feature) -> str | None:
    """Return why ranks of a mesh cannot do a part of learning; None if they can."""
    if feature == "precision":
        return "its layers and stages are divided, and proved, in the precision of the weights"
    if feature == "compile":
        return "its layers and stages are divided or traced, and called one by one"
    return None


@dataclasses.dataclass(frozen=True)
class Parallel(Strategy):
    """Data, pipeline and tensor parallelism combined on a mesh.

    Args:
        mesh: number of ranks along each axis.
        batch_size: examples of a step over all workers together; None is all the data.
        microbatches: M, the parts of a pipeline's batch that pass through the stages one after the
            other.
        schedule: naive, gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-v; or a list of your
            own, as text.
        stages_per_rank: stages on each rank in the interleaved schedule; by default two.
        cut: names of the modules at which the stages after the first begin; by default dure cuts
            the model into balanced stages.
        balance: quantity that stages balance: estimated or measured time, or memory.
        recompute: stages store their inputs alone, and recompute the rest for backward; with a
            single stage, modules are recomputed such that a step takes the least memory.
        memory: limit of a worker's step with a single stage, such as 2GB: its parts of weights,
            gradients and optimizer's state, and activations. As few modules as possible are
            recomputed.
        sequence: tensor neighbours hold shards of the sequence between the layers that they divide.
        zero: 1 divides the optimizer's state over the ranks of a data group; with a single stage 2
            divides the gradients too, 3 the parameters too.
        plan: division of the layers (docs/tensor-parallel.md): ready (dure's own), hf (Hugging
            Face's), rows, columns or alternating (of chains of linear layers), or your own plan.
        offload: tensors in files while they are not needed, such as optimizer,activations: of
            optimizer and activations.
        offload_folder: folder of these files, on a disk; by default the first usual folder on a
            disk.
    """

    mesh: Mesh = Mesh()  # noqa: RUF009
    batch_size: int | None = 64
    microbatches: int = dataclasses.field(default=4, metadata=at_least(1))
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    cut: tuple[str, ...] | None = None
    balance: Balance = "estimated"
    recompute: bool = False
    memory: str | None = None
    sequence: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    plan: TensorPlan = TensorPlan()  # noqa: RUF009
    offload: Offload = NO_OFFLOAD
    offload_folder: str | None = None

    name: ClassVar[str] = "parallel"
    traits: ClassVar[Traits] = Traits(
        kind="ranks",
        unit="step",
        trains_with=TRAINS_WITH,
        samples=JOINT_SAMPLING,
        moves=frozenset(
            {"mesh", "schedule", "stages_per_rank", "cut", "balance", "recompute", "memory", "zero"}
            | {"sequence", "plan", "offload", "offload_folder"}
        ),
    )

    def __post_init__(self) -> None:
        # The dataclass is frozen. Settings may contain the plan as text; store it as a value.
        object.__setattr__(self, "plan", TensorPlan(self.plan))
        parse_fields(self, {"offload": parse_offload})

    @property
    def label(self) -> str:
        return f"parallel {'x'.join(map(str, self.mesh.degrees))}" + self.plan.label

    @property
    def run_traits(self) -> RunTraits:
        return RunTraits(
            ranks=self.mesh.size,
            # Another cut adds shared gradients, and the norm of the gradient, in another order.
            deterministic=self.balance != "measured",
            spares_memory=bool(self.offload),
            imports=(TRACES,) if self.mesh.pipeline > 1 else (),
        )

    def shares(self, workers: int | None) -> MemoryShares | None:
        return divided_shares(self.mesh.tensor * self.mesh.pipeline, self.zero, self.mesh.data)

    def cannot(self, feature: Feature, kind: Kind) -> str | None:
        return cannot(feature)

    def list_for(self, microbatches: int) -> Schedule:
        """Return the schedule for a number of micro-batches; raise ValueError if impossible."""
        # A smaller batch has fewer micro-batches than the user's list: it uses the same placement
        # of stages with all forwards first.
        if is_user_defined(self.schedule):
            own = Schedule.parse(self.schedule)
            if own.ranks != self.mesh.pipeline:
                raise ValueError(
                    f"the schedule has lists for {own.ranks} ranks, but the pipeline has "
                    f"{self.mesh.pipeline}"
                )
            made = own if own.microbatches == microbatches else in_order(own.home, microbatches)
        else:
            per_rank = self.stages_per_rank
            if per_rank is None:
                per_rank = 2 if self.schedule in ("interleaved", "zero-bubble-v") else 1
            made = make(self.schedule, self.mesh.pipeline, microbatches, per_rank)
        if self.zero < 2:
            return made
        # There is a single stage. Each micro-batch runs forward and backward before the next, so
        # that its gradients can be reduced. The requested schedule was made only to check it.
        return make("1f1b", self.mesh.pipeline, microbatches, 1)

    def holds_parts(self, workers: int | None) -> bool:
        mesh = self.mesh
        return mesh.tensor > 1 or mesh.pipeline > 1 or (self.zero == 3 and mesh.data > 1)

    @property
    def most(self) -> int:
        """Number of micro-batches of a batch that is large enough."""
        if is_user_defined(self.schedule):
            return Schedule.parse(self.schedule).microbatches
        return 1 if self.schedule == "naive" else self.microbatches

    def check(self, task: Task, world: World) -> None:
        if world.workers is not None:
            self.mesh.check(world.workers)
        check_joint_batch(self.batch_size, len(task.train), self.mesh.data)
        check_ranges(self)
        if self.balance not in get_args(Balance):
            raise ValueError(
                f"there is no balance {self.balance!r}: choose {', '.join(get_args(Balance))}"
            )
        validate.check(self.list_for(self.most))
        check_offload(
            self.offload,
            self.offload_folder,
            ("optimizer", "activations"),
            self.name,
            why="because a rank computes with all its tensors and sends gradients from memory",
        )
        check_recompute(NO_RECOMPUTE, self.memory, self.name)
        if self.memory is not None and not self.runs_untraced:
            raise ValueError(
                f"memory {self.memory} chooses modules to recompute, but a pipeline computes "
                "traced stages: use recompute, or a mesh without a pipeline and microbatches=1"
            )

    def again(self, task: Task) -> RecomputeRequest:
        """Return the request for recomputation by modules; traced stages ignore it."""
        whole = Recompute((ALL,)) if self.recompute and self.memory is None else NO_RECOMPUTE
        if not self.runs_untraced:
            return NO_RECOMPUTE_REQUEST
        shares = divided_shares(self.mesh.tensor, self.zero, self.mesh.data)
        return RecomputeRequest(whole, self.memory, self.examples(len(task.train)), shares)

    def check_model(self, task: Task, model: nn.Module, world: World) -> None:
        """Check the model on a copy: divide the copy and run it on a micro-batch."""
        self.checked(task, model)

    def checked(self, task: Task, model: nn.Module) -> CutModel | None:
        """Return a copy of the model that was cut; None for a single stage without a trace."""
        check_no_shared_memory(model)
        check_pieces(task, model, self.batch_size, self.mesh.data, self.most)
        # A copy, since the checks divide it and run it.
        model = unused_copy(model, task, 0)
        check_steps_of(self.offload, task, model)
        train, test = examples_for(task)
        check_zero(self.zero, self.mesh, self.mesh.pipeline * (self.stages_per_rank or 1), model)
        check_optimizer(task.optimizer(list(model.parameters())), self.mesh, self.zero)
        plan: DivisionPlan = {}
        if self.mesh.tensor > 1 or not self.plan.is_ready:
            plan = plan_of(model, self.sequence, self.plan)
            check_layers(model, plan, self.mesh.tensor, (train, test))
        if not self.runs_untraced:
            cut = self._checked_cut(model, train, test)
            check_regions(cut.reference.operations, plan)
            return cut
        if self.cut:
            raise ValueError(
                f"a model in one stage has no cut, but cut names {', '.join(self.cut)}"
            )
        return None

    def _checked_cut(self, model: nn.Module, train: Examples, test: Examples | None) -> CutModel:
        """Cut the model and check the cut, as far as possible in a single process."""
        tests = partial(sample, test) if test is not None and len(test) else None
        cut = CutModel(
            model,
            sample=partial(sample, train),
            stages=self.list_for(self.most).stages,
            examples=self.examples(len(train)),
            test=tests,
        )
        # Not measured: a check must not depend on how fast this machine is now.
        cut.decide(cut.choose(self.cut, "estimated"))
        check_cut(cut, self.mesh.data, self.recompute, evaluates=tests is not None)
        return cut

    def prove(self, task: Task, model: nn.Module, world: World) -> Proof | None:
        """Compare the stages with the undivided model on a micro-batch.

        Returns None if there is no second model to compare with. For a single stage without a
        trace, the requested recomputation is compared instead.
        """
        # Reuse the copy that was cut for the checks, because tracing takes longest.
        cut = self.checked(task, model)
        if cut is None:
            return prove_recompute(self.again(task), task, model)
        started = time.perf_counter()
        twin = unused_copy(model, task, 0)
        # A task may return the same model each time, and it may have no copy: then there is no
        # second model to compare with.
        if twin is cut.model or twin is model:
            return None
        train, test = examples_for(task)
        prove_cut(
            cut,
            twin,
            others=sample(train, cut.examples, backwards=True),
            evaluation=EVALUATED if test is not None and len(test) else 0,
            parts_gradients=self.list_for(self.most).parts_gradients,
            recompute=self.recompute,
        )
        what = "the traced stages compute what the model computes"
        return Proof(what, time.perf_counter() - started)

    @property
    def runs_untraced(self) -> bool:
        """Whether the model is computed in a single stage, without a trace."""
        # Recomputation by modules needs modules, which a trace does not have. With a single
        # micro-batch both draw the same random numbers.
        again = self.most == 1 and (self.recompute or self.memory is not None)
        apart = self.mesh.tensor > 1 or self.zero > 1 or again
        return apart and self.list_for(self.most).stages == 1

    def examples(self, of: int) -> int:
        """Return the largest number of examples in a micro-batch, for `of` training examples."""
        # The first data group, and its first micro-batch, have the most: both are rounded up.
        batch = of if self.batch_size is None else min(self.batch_size, of)
        return -(-batch // (self.mesh.data * self.most))

    def learner(self, task: Task, context: RankContext, seed: int) -> Learner:
        return ParallelLearner(task, context, seed, self)


class ParallelLearner(Learner):
    """Training on a single rank of a mesh.

    Args:
        task: the task.
        place: this rank's group, devices and folder.
        seed: seed of the run.
        strategy: the strategy's settings.
        again: the request for recomputation; None is the strategy's request.
    """

    rank_state_differs = True
    resizes = True
    by_parts = True
    averaged_tensors_are_parts = True

    def __init__(
        self,
        task: Task,
        context: RankContext,
        seed: int,
        strategy: Parallel,
        again: RecomputeRequest | None = None,
    ) -> None:
        self.task = task
        self.group = context.group
        self.seed = seed
        self.strategy = strategy
        self.device = context.devices[0]
        self.groups = groups_on(strategy.mesh, self.group)
        self.at = self.groups.at
        self.where = f"rank {self.group.rank}"
        model = context.model(task, seed).to(self.device).train()
        self.train_examples, self.test_examples = examples_for(task)
        self.losses = CountedLoss(task.loss, self.train_examples)
        self.batches = Batches(
            len(self.train_examples),
            strategy.batch_size,
            seed,
            order=self.train_examples.order(),
            drop_last=self.train_examples.sampling.drop_last,
        )
        self.examples = self.batches.visited
        self.offloaded = LearnerOffloading(
            strategy.offload, strategy.offload_folder, context, self.device, divided=True
        )
        # Choose on the undivided model, so that all ranks make the same choice.
        asked = strategy.again(task) if again is None else again
        chosen_again = recompute_plan_for(asked, task, model, context.check)
        # Parts of layers are in files too, until `build_rank_state` decides which of them this rank
        # stores.
        with in_files_like(model):
            self._divide_layers(model, context.check)
        if chosen_again is not None:
            recompute_modules(model, chosen_again.choice.names)
        self._draws = draws_of(model)
        self.units_per_epoch = self.batches.steps_per_epoch
        # Before `build_rank_state`, which frees the parameters of other stages. A forward pass
        # counts the operations, and its messages are not part of training.
        with self.groups.tensor.uncounted():
            self._flops = (
                flops_per_step(model, self.train_examples, self._share()) / strategy.mesh.pipeline
            )
        # The schedule of a full batch; smaller batches have separate engines (`_engine`).
        self.schedule = strategy.list_for(strategy.most)
        self.stream = RandomStream(derive(seed, "draws", self.at.data), False, self._own_draws)
        self.rank_state = build_rank_state(
            mesh=strategy.mesh,
            group=self.group,
            groups=self.groups,
            model=model,
            cut=self._cut(model),
            schedule=self.schedule,
            zero=strategy.zero,
        )
        self.rank_state.folder = context.folder
        self._trained_from = trained_from(task, self.rank_state.parameters)
        self.stages = self._stages()
        self._engines: dict[int, PipelineEngine] = {}
        self._without: dict[int, list[str]] = {}
        self._make_optimizer()
        if strategy.runs_untraced:
            # Without a trace, changed buffers are found by comparing values.
            self.rank_state.buffer_sync = BufferSync(model)
        self.reading = MicrobatchReader(
            examples=self.train_examples,
            losses=self.losses,
            seed=seed,
            mesh=strategy.mesh,
            at=self.at,
            device=self.device,
            most=strategy.most,
            begins=0 in self.rank_state.own,
            # Every micro-batch gathers units and reduces gradients over the whole data group, so
            # all its ranks need equally many.
            alike=self.rank_state.zero is not None and self.rank_state.zero.stage > 1,
        )

    def _divide_layers(self, model: nn.Module, check: bool) -> None:
        """Divide the layers over the tensor group. check: whether to prove the plan first."""
        mesh = self.strategy.mesh
        if mesh.tensor == 1:
            return
        # Neighbours exchange messages in every layer, so they must not be on several hosts.
        homes = {}
        for number, ranks in enumerate(self.group.hosts()):
            homes.update(dict.fromkeys(ranks, number))
        mesh.check_hosts([homes[rank] for rank in range(self.group.size)])
        plan = plan_of(model, self.strategy.sequence, self.strategy.plan)
        if check:
            count = self.strategy.examples(len(self.train_examples))
            proof = prove_layers(
                model,
                plan,
                self.task,
                self.seed,
                group=self.group,
                groups=self.groups,
                examples=self.train_examples,
                indices=self.batches.at(0)[:count],
                device=self.device,
            )
            self.proofs = [proof]
        else:
            share_weights(model, self.groups.tensor)
        divide(model, plan, self.groups.tensor)

    def _cut(self, model: nn.Module) -> CutModel | SingleStageModel:
        """Return the model with rank 0's cut, because measured times differ between ranks."""
        kind = SingleStageModel if self.strategy.runs_untraced else CutModel
        cut = kind(
            model,
            sample=self._sample,
            stages=self.schedule.stages,
            examples=self.strategy.examples(len(self.train_examples)),
            test=self._test_sample,
        )
        with releasing_pass(model):
            starts = cut.choose(self.strategy.cut, self.strategy.balance)
        packed = msgspec.msgpack.encode(starts) if self.group.rank == 0 else None
        packed = self.group.broadcast_bytes(packed)
        cut.decide(msgspec.msgpack.decode(packed, type=list[int]))
        return cut

    def _stages(self) -> dict[int, Stage]:
        """Return the stages of this rank, by number; set `held.written` to changed buffers."""
        held = self.rank_state
        strategy = self.strategy
        # Several micro-batches draw at the same time, and so do ranks that divide a sequence: each
        # operation then has a number and its own seed.
        on_shards = bool(modules_on_shards(held.model)) and not strategy.runs_untraced
        numbered = strategy.most > 1 or on_shards
        self.stream.carried = not numbered and held.cut.draws
        # The loss may draw too; -1 is a number that no operation of the model has.
        part = self.losses.part
        self._loss = self.stream.drawing(part, -1) if numbered else part
        # A schedule with separate weight gradients defers them to this list; otherwise they are
        # computed at once.
        self.remaining: DeferredGradients | None = [] if self.schedule.parts_gradients else None
        self.gradient_handler = compute_now if self.remaining is None else self.remaining.append
        stages = {number: self._stage(number) for number in held.own}
        examples = strategy.examples(len(self.train_examples))
        written: set[str] = set()
        for stage in stages.values():
            written.update(stage.program_for(examples).written)
        held.written = sorted(written)
        return stages

    def _make_optimizer(self) -> None:
        """Create the optimizer of this rank's parameters, divided by ZeRO if requested."""
        held = self.rank_state
        held.optimizer = optimizer_of(held, self.task.optimizer)
        if held.optimizer is not None:
            self.rates = ScheduledRates(held.optimizer, self.task.lr_schedule)
            self.offloaded.optimizer(held.optimizer)
            held.zero = zero_of(held, self.strategy.zero)
        self._watch_passes()

    def _watch_passes(self) -> None:
        """Configure offloading of activations to skip tensors that stay in memory anyway."""
        zero, model = self.rank_state.zero, self.rank_state.model
        if zero is None or zero.stage == 1:
            self.offloaded.keep_activations(lambda: (*model.parameters(), *model.buffers()))
            return
        self.offloaded.keep_activations(zero.resident)
        if self.offloaded.activations is not None:
            zero.keep_activations(self.offloaded.activations)

    def _share(self) -> int:
        """Return the examples of a step in this pipeline."""
        return -(-self.batches.batch_size // self.strategy.mesh.data)

    def flops_per_step(self) -> float:
        return self._flops

    def _own_draws(self, on_shards: bool) -> int | None:
        """Return this rank's tensor index inside a divided region or on a shard; otherwise None."""
        # In a divided region, or on a shard of a sequence, neighbours compute different elements,
        # and must not draw the same numbers for them.
        inside = on_shards or any(draws.inside for draws in self._draws)
        return self.at.tensor if inside else None

    def _sample(self, examples: int) -> Any:
        return to_device(sample(self.train_examples, examples), self.device)

    def _test_sample(self, examples: int) -> Any:
        return to_device(sample(self.test_examples or self.train_examples, examples), self.device)

    def _stage(self, number: int) -> Stage:
        cut = self.rank_state.cut
        return Stage(
            number,
            last=number == self.schedule.stages - 1,
            program_for=lambda examples: cut.program(
                number,
                examples,
                training=True,
                stream=self.stream,
                gradient_handler=self.gradient_handler,
            ),
            structure_for=lambda examples: cut.structure(examples, True),
            loss=self._loss,
            stream=self.stream,
            remaining=self.remaining,
            recompute=self.strategy.recompute,
        )

    # A step.

    def advance(self, control_flags: int) -> StepResult:
        """Run a step of the optimizer on the next joint batch.

        control_flags: the control flags of this rank.
        """
        held = self.rank_state
        indices = self.batches.at(held.step)
        mean, _, control_flags = self.compute(indices, control_flags)
        started = time.perf_counter()
        if held.optimizer is not None:
            self.rates.at(held.step)
            held.optimizer.step()
        self.group.meter.compute("update", started, time.perf_counter(), held.step + 1)
        account(held, computing=True)
        # after the update, when no rank computes with them
        share_buffers(held)
        held.step += 1
        return StepResult(mean, len(indices), control_flags)

    def compute(self, indices: Tensor, control_flags: int) -> tuple[float | None, float, int]:
        """Compute the gradient of the joint batch's mean loss, in the parameters' gradients.

        Returns that loss, the number that the loss counts, and rank 0's control flags. Raises
        LossNotFiniteError on all ranks.
        """
        held = self.rank_state
        self.groups.at_step(self.group.step)
        # The ranks of a pipeline and its tensor groups use equal seeds: they compute one model.
        seed_generators(
            self.seed, "step", held.step, self.at.data, everything=self.train_examples.draws
        )
        if held.optimizer is not None:
            held.optimizer.zero_grad(set_to_none=True)
        # All ranks learn of a loss that is not finite before any rank updates.
        losses, count, control_flags, missed = self._agree(*self.gradients(indices), control_flags)
        loss = sum(losses)
        if not math.isfinite(loss):
            where = _not_finite(losses)
            raise LossNotFiniteError(loss, where, f"step {held.step + 1}", intact=False)
        self._drop_gradients(missed)
        gradients = (gradient for _, gradient in summed_gradients(held))
        mean = self.losses.settle(loss, indices, count, gradients)
        self._drop_frozen()
        if self.task.clip_norm is not None:
            clip(held, self.task.clip_norm)
        return mean, count, control_flags

    def gradients(self, indices: Tensor) -> tuple[float, float]:
        """Compute the joint batch's gradient, in the parameters' gradients.

        Returns this rank's contributions to the batch's loss and to the number that the loss
        counts.
        """
        batches = self.reading.microbatches(indices, self.rank_state.step)
        if batches:
            with self.offloaded.saving():
                self._engine(len(batches)).run(self.rank_state.step, batches)
        account(self.rank_state, computing=True)
        # Sum over stages first, so that the replicas sum whole gradients.
        sum_tied(self.rank_state)
        sum_over_replicas(self.rank_state)
        last = self.stages.get(self.schedule.stages - 1)
        if last is None or not batches:
            return 0.0, 0.0
        # Only the last stage knows losses.
        numbers = range(len(batches))
        return sum(last.losses[n] for n in numbers), sum(last.counts[n] for n in numbers)

    def _engine(self, microbatches: int) -> PipelineEngine:
        """Return the engine for this number of micro-batches, made at first use."""
        if microbatches not in self._engines:
            schedule = self.strategy.list_for(microbatches)
            self._engines[microbatches] = PipelineEngine(
                self.groups.pipeline,
                schedule,
                stages=self.stages,
                stream=self.stream,
                device=self.device,
            )
        return self._engines[microbatches]

    def _agree(
        self, loss: float, count: float, control_flags: int
    ) -> tuple[list[float], float, int, int]:
        """Exchange the results of the step between all ranks.

        Returns each rank's contribution to the batch's loss; the number that the loss counts; rank
        0's control flags; and the values without a gradient (`_missed`).
        """
        # Tensor neighbours have the same loss, and stages before the last have none.
        said = [loss, count] if self.at.tensor == 0 else [0.0, 0.0]
        rows = self.group.all_gather_values(
            [*said, float(control_flags), float(self._missed())], "exchange of losses"
        )
        missed = functools.reduce(operator.and_, (int(row[3]) for row in rows))
        return [row[0] for row in rows], sum(row[1] for row in rows), int(rows[0][2]), missed

    def _missed(self) -> int:
        """Return a bit mask of the values that the last stage received and that got no gradient.

        The mask is `ALL_VALUES` on a rank that does not know. A loss may not depend on all outputs.
        """
        last = self.stages.get(self.schedule.stages - 1)
        if last is None or not last.losses or self.schedule.stages == 1:
            return ALL_VALUES
        return ALL_VALUES & ~sum(1 << place for place in last.reached)

    def _drop_gradients(self, missed: int) -> None:
        """Drop gradients of zeros for parameters that have no gradient on a single worker.

        An optimizer skips a parameter without a gradient, but updates a parameter with a gradient
        of zeros.
        """
        cut = self.rank_state.cut
        # With ZeRO the divided state is updated as a whole, so single gradients cannot be dropped.
        if (
            isinstance(cut, SingleStageModel)
            or self.schedule.stages == 1
            or self.rank_state.zero is not None
        ):
            return
        if missed not in self._without:
            self._without[missed] = cut.without_gradient(missed)
        for name in self._without[missed]:
            if name in self.rank_state.parameters:
                self.rank_state.parameters[name].grad = None

    def _drop_frozen(self) -> None:
        """Set the gradients of parameters that are not yet trained to None."""
        if not self._trained_from:
            return
        for name, part in trained_parts(self.rank_state).items():
            if self.rank_state.step < self._trained_from.get(name, 0):
                part.grad = None

    def averaged_tensors(self) -> Mapping[str, Tensor]:
        return trained_parts(self.rank_state)

    def changing_averaged_tensors(self) -> AbstractContextManager[object]:
        return parts_changed(self.rank_state)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the test examples through the pipelines; each data group takes a share."""
        if self.test_examples is None:
            return {}
        self.groups.at_step(self.group.step)
        return evaluate(self.rank_state, self.task, self.test_examples)

    # Checkpoints and facts.

    def weights(self) -> Mapping[str, Tensor]:
        return weights_of(self.rank_state)

    def state(self) -> dict[str, Any]:
        return state_of(self.rank_state)

    def part(self) -> dict[str, Any]:
        return part_of(self.rank_state)

    def rest(self) -> None:
        if self.rank_state.optimizer is not None:
            free_optimizer(self.rank_state.optimizer)

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        restore(self.rank_state, weights, state)
        self.offloaded.restored()
        if self.strategy.runs_untraced:
            self.rank_state.buffer_sync = BufferSync(self.rank_state.model)

    def facts(self) -> dict[str, Any]:
        """Return the facts of this rank for the report: see `dure.parallel.mesh.facts`."""
        # Of full batches, which have the most micro-batches.
        full = max(self._engines, default=1)
        steps = list(self._engines[full].costs) if self._engines else []
        return {
            **facts_of(self.rank_state, self.batches.batch_size, self.stream.carried),
            "step_costs": cost_facts(steps),
        }


def _not_finite(losses: Sequence[float]) -> str:
    """Return the first rank on which the loss is not finite, in words."""
    ranks = (f"rank {rank}" for rank, loss in enumerate(losses) if not math.isfinite(loss))
    return next(ranks, "all ranks together")

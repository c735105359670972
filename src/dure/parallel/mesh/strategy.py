"""Data, pipeline and tensor parallelism at once, on a mesh of ranks.

    data      a batch is divided over the data groups;
    pipeline  in each group its micro-batches pass through the stages of a pipeline;
    tensor    the layers of a stage are divided over the ranks of a tensor group

A step is: every pipeline computes its examples' gradients; parameters that several stages use sum
theirs; data groups sum what their ranks hold alike; every rank updates what it holds. So every
degree may be one, and what is left is one of the systems alone. All of them compute what one worker
does on the joint batch.

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

from dure.contracts.learning import Part, trained_from
from dure.contracts.lr_schedule import Rates
from dure.contracts.strategy import (
    Kind,
    Learner,
    Place,
    Progress,
    Proof,
    Strategy,
    another,
    examples_for,
)
from dure.contracts.task import Task
from dure.data.batches import Batches, check_joint_batch
from dure.data.examples import Examples
from dure.data.sampling import JOINTLY, Way
from dure.errors import LossNotFiniteError
from dure.machine.devices import to_device
from dure.memory.again import compute_again
from dure.memory.formula import Shares, divided
from dure.memory.offload.wanted import Offload, parse_offload
from dure.memory.recompute import ALL, Recompute
from dure.memory.undivided import beside, through
from dure.parallel.first_weights import share_weights
from dure.parallel.mesh.check import (
    EVALUATED,
    check_cut,
    check_layers,
    check_optimizer,
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
from dure.parallel.mesh.held import hold, optimizer_of
from dure.parallel.mesh.mesh import Mesh, groups_on
from dure.parallel.mesh.proof import prove_layers
from dure.parallel.mesh.reading import Reading
from dure.parallel.mesh.zero import account, parts_changed, trained_parts, zero_of
from dure.parallel.mesh.zero import check as check_zero
from dure.parallel.offloaded import NO_OFFLOAD, Offloaded, check_offload
from dure.parallel.offloaded import check_optimizer as check_steps_of
from dure.parallel.pipeline import validate
from dure.parallel.pipeline.apart import Remaining, now
from dure.parallel.pipeline.balance import Balance
from dure.parallel.pipeline.builders import in_order, make
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.draws import Stream
from dure.parallel.pipeline.proof import prove_cut
from dure.parallel.pipeline.runtime import Engine
from dure.parallel.pipeline.schedule import Schedule, is_own
from dure.parallel.pipeline.stage import Stage
from dure.parallel.pipeline.trace import TRACES
from dure.parallel.pipeline.uncut import UncutModel
from dure.parallel.recomputing import (
    NO_RECOMPUTE,
    NOT_ASKED,
    Asked,
    check_recompute,
    chosen,
    prove_recompute,
)
from dure.parallel.speaker import Speaker
from dure.parallel.tensor.divided import draws_of
from dure.parallel.tensor.dividing import divide
from dure.parallel.tensor.draws import modules_on_shards
from dure.parallel.tensor.ready import plan_of
from dure.parallel.tensor.written_plan import TensorPlan
from dure.randomness.seeds import derive, seed_generators
from dure.record.meter import Meter
from dure.settings import parse_fields
from dure.tasks.batch_norm import check_pieces
from dure.tasks.flops import flops_per_step
from dure.tasks.loss_shares import CountedLoss
from dure.tensors.flat import check_apart
from dure.tensors.optimizer_state import forget

EVERY = (1 << 48) - 1
"""As many bits as a float64 keeps, and some less: values that the last stage may receive."""

TRAINS_WITH: frozenset[Part] = frozenset({"clip_norm", "ema", "unfreeze"})
"""Of what a task may ask for, what ranks of a mesh can do."""


def cannot(part: Part) -> str | None:
    """Why ranks of a mesh cannot do a part of learning; None if they can."""
    if part == "precision":
        return "its layers and stages are divided, and proved, in the precision of the weights"
    if part == "compile":
        return "its layers and stages are divided or traced, and called one by one"
    return None


@dataclasses.dataclass(frozen=True)
class Parallel(Strategy):
    """Strategies combined on a mesh.

    Args:
        mesh: how many ranks lie along each axis.
        batch_size: examples of a step over all workers together; None is all the data.
        microbatches: M, the parts of a pipeline's batch that pass through the stages one after the
            other.
        schedule: naive, gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-v; or a list of your
            own, as text.
        stages_per_rank: of the interleaved schedule; by default two.
        cut: names of the modules at which the stages after the first begin; by default dure cuts
            in balance.
        balance: what is balanced: estimated or measured time, or memory.
        recompute: stages keep their inputs alone, and compute the rest again for backward; in one
            stage the modules do with which a step takes the least memory.
        memory: that a worker's step may take in one stage, such as 2GB: its parts of weights,
            gradients and optimizer's state, and activations. As few modules are computed again as
            that needs.
        sequence: tensor neighbours hold shards of the sequence between the layers that they divide.
        zero: 1 divides the optimizer's state over the ranks of a data group; in one stage 2 divides
            the gradients too, 3 the parameters too.
        plan: which layers are divided, and how (docs/tensor-parallel.md): ready (the model's own),
            rows, columns or alternating (of a chain of linear layers), or a plan of your own.
        offload: what lies in files while it is not needed, such as optimizer,activations: of
            optimizer and activations.
        offload_folder: of these files, on a disk; by default the first of the usual ones that is.
    """

    mesh: Mesh = Mesh()  # noqa: RUF009
    batch_size: int | None = 64
    microbatches: int = 4
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
    kind: ClassVar[Kind] = "ranks"
    unit: ClassVar[str] = "step"
    trains_with: ClassVar[frozenset[Part]] = TRAINS_WITH
    samples: ClassVar[frozenset[Way]] = JOINTLY
    moves: ClassVar[frozenset[str]] = frozenset(
        {"mesh", "schedule", "stages_per_rank", "cut", "balance", "recompute", "memory", "zero"}
        | {"sequence", "plan", "offload", "offload_folder"}
    )

    def __post_init__(self) -> None:
        # A frozen dataclass: settings may give the plan as text, and from here on it is a value.
        object.__setattr__(self, "plan", TensorPlan(self.plan))
        parse_fields(self, {"offload": parse_offload})

    @property
    def label(self) -> str:
        return f"parallel {'x'.join(map(str, self.mesh.degrees))}" + self.plan.label

    @property
    def spares_memory(self) -> bool:
        return bool(self.offload)

    @property
    def deterministic(self) -> bool:
        # Another cut adds what stages share, and the norm of a gradient, in other groups.
        return self.balance != "measured"

    def shares(self, workers: int | None) -> Shares | None:
        return divided(self.mesh.tensor * self.mesh.pipeline, self.zero, self.mesh.data)

    def cannot(self, part: Part, kind: Kind) -> str | None:
        return cannot(part)

    def list_for(self, microbatches: int) -> Schedule:
        """The schedule for so many micro-batches. Raises ValueError if there is none."""
        # A smaller batch has fewer micro-batches than the user's list: it goes through the same
        # homes in the plain order.
        if is_own(self.schedule):
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
        if self.zero < 2:
            return made
        # There is one stage, in which each micro-batch goes forward and backward at once, so that
        # its gradients can be reduced; what was made was only checked.
        return make("1f1b", self.mesh.pipeline, microbatches, 1)

    @property
    def ranks(self) -> int | None:
        return self.mesh.size

    @property
    def imports(self) -> tuple[str, ...]:
        return (TRACES,) if self.mesh.pipeline > 1 else ()

    def holds_parts(self, workers: int | None) -> bool:
        mesh = self.mesh
        return mesh.tensor > 1 or mesh.pipeline > 1 or (self.zero == 3 and mesh.data > 1)

    @property
    def most(self) -> int:
        """Micro-batches of a batch that is large enough."""
        if is_own(self.schedule):
            return Schedule.parse(self.schedule).microbatches
        return 1 if self.schedule == "naive" else self.microbatches

    def check(self, task: Task, workers: int | None) -> None:
        if workers is not None:
            self.mesh.check(workers)
        check_joint_batch(self.batch_size, len(task.train), self.mesh.data)
        if self.microbatches < 1:
            raise ValueError(
                f"microbatches is {self.microbatches}, but a batch is one micro-batch at least"
            )
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
            why="for a rank computes with all that it holds, and sends gradients from memory",
        )
        check_recompute(NO_RECOMPUTE, self.memory, self.name)
        if self.memory is not None and not self.uncut:
            raise ValueError(
                f"memory {self.memory} chooses modules, and a pipeline computes traced stages: "
                f"take recompute, or a mesh without a pipeline and microbatches 1"
            )

    def again(self, task: Task) -> Asked:
        """What is computed again by modules; traced stages have a way of their own."""
        whole = Recompute((ALL,)) if self.recompute and self.memory is None else NO_RECOMPUTE
        if not self.uncut:
            return NOT_ASKED
        shares = divided(self.mesh.tensor, self.zero, self.mesh.data)
        return Asked(whole, self.memory, self.examples(len(task.train)), shares)

    def check_model(self, task: Task, model: nn.Module, workers: int | None) -> None:
        """Divides a copy of the model, and runs it on one micro-batch."""
        self.checked(task, model)

    def checked(self, task: Task, model: nn.Module) -> CutModel | None:
        """A copy of the model that was cut; None where it is one stage, computed as it is."""
        check_apart(model)
        check_pieces(task, model, self.batch_size, self.mesh.data, self.most)
        # A copy, since the checks divide it and run it.
        model = another(model, task, 0)
        check_steps_of(self.offload, task, model)
        train, test = examples_for(task)
        check_zero(self.zero, self.mesh, self.mesh.pipeline * (self.stages_per_rank or 1), model)
        check_optimizer(task.optimizer(list(model.parameters())), self.mesh, self.zero)
        if self.mesh.tensor > 1 or not self.plan.is_ready:
            plan = plan_of(model, self.sequence, self.plan)
            check_layers(model, plan, self.mesh.tensor, (train, test))
        if not self.uncut:
            return self._checked_cut(model, train, test)
        if self.cut:
            raise ValueError(
                f"a model in one stage begins nowhere else, but cut names {', '.join(self.cut)}"
            )
        return None

    def _checked_cut(self, model: nn.Module, train: Examples, test: Examples | None) -> CutModel:
        """The model cut, as far as one process can tell."""
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

    def prove(self, task: Task, model: nn.Module, workers: int | None) -> Proof | None:
        """Runs the stages and the undivided model side by side, on one micro-batch."""
        # The copy that was cut for the checks: to trace a model takes longest of all.
        cut = self.checked(task, model)
        if cut is None:
            return prove_recompute(self.again(task), task, model)
        started = time.perf_counter()
        twin = another(model, task, 0)
        # A task may give one and the same model, of which there is no copy: then there is nothing
        # to run beside the stages.
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
    def uncut(self) -> bool:
        """Whether the model is computed as it is, in one stage."""
        # What is computed again are modules, of which a trace has none. With one micro-batch both
        # draw the same random numbers.
        again = self.most == 1 and (self.recompute or self.memory is not None)
        apart = self.mesh.tensor > 1 or self.zero > 1 or again
        return apart and self.list_for(self.most).stages == 1

    def examples(self, of: int) -> int:
        """In a micro-batch, at most, if so many are to be learned."""
        # The first data group, and its first micro-batch, have the most: both are rounded up.
        batch = of if self.batch_size is None else min(self.batch_size, of)
        return -(-batch // (self.mesh.data * self.most))

    def learner(self, task: Task, place: Place, seed: int) -> Learner:
        return ParallelLearner(task, place, seed, self)


class ParallelLearner(Learner):
    """One rank of a mesh at work."""

    unit = "step"
    parted = True
    resizes = True
    by_parts = True
    averages_parts = True

    def __init__(
        self,
        task: Task,
        place: Place,
        seed: int,
        strategy: Parallel,
        again: Asked | None = None,
    ) -> None:
        self.task = task
        self.group = place.group
        self.seed = seed
        self.strategy = strategy
        self.device = place.devices[0]
        self.groups = groups_on(strategy.mesh, self.group)
        self.at = self.groups.at
        self.where = f"rank {self.group.rank}"
        model = place.model(task, seed).to(self.device).train()
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
        self.offloaded = Offloaded(
            strategy.offload, strategy.offload_folder, place, self.device, divided=True
        )
        # Chosen of the undivided model, so that all ranks choose the same.
        asked = strategy.again(task) if again is None else again
        chosen_again = chosen(asked, task, model, place.check)
        # The parts of layers lie in files too until it is known which of them are kept (`hold`).
        with beside(model):
            self._divide_layers(model, place.check)
        if chosen_again is not None:
            compute_again(model, chosen_again.choice.names)
        self._draws = draws_of(model)
        self.units_per_epoch = self.batches.steps_per_epoch
        # Before `hold`, which lets go of the parameters of other stages.
        # They are counted in a forward pass, whose messages are no part of the training.
        with self.groups.tensor.uncounted():
            self._flops = (
                flops_per_step(model, self.train_examples, self._share()) / strategy.mesh.pipeline
            )
        # The schedule of a full batch; smaller ones have an engine of their own (`_engine`).
        self.schedule = strategy.list_for(strategy.most)
        self.stream = Stream(derive(seed, "draws", self.at.data), False, self._own_draws)
        self.held = hold(
            mesh=strategy.mesh,
            group=self.group,
            groups=self.groups,
            model=model,
            cut=self._cut(model),
            schedule=self.schedule,
            zero=strategy.zero,
        )
        self.held.folder = place.folder
        self._trained_from = trained_from(task, self.held.parameters)
        self.stages = self._stages()
        self._engines: dict[int, Engine] = {}
        self._without: dict[int, list[str]] = {}
        self._make_optimizer()
        if strategy.uncut:
            # Nobody has traced this model: what its forward passes change is found by comparing.
            self.held.speaking = Speaker(model)
        self.reading = Reading(
            examples=self.train_examples,
            losses=self.losses,
            seed=seed,
            mesh=strategy.mesh,
            at=self.at,
            device=self.device,
            most=strategy.most,
            begins=0 in self.held.own,
            # Every micro-batch gathers units and reduces gradients, with the whole data group.
            alike=self.held.zero is not None and self.held.zero.stage > 1,
        )

    def _divide_layers(self, model: nn.Module, check: bool) -> None:
        """Divides the layers over the tensor group. check: whether the plan is tried before."""
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

    def _cut(self, model: nn.Module) -> CutModel | UncutModel:
        """The model, cut where rank 0 says: measured times differ between ranks."""
        kind = UncutModel if self.strategy.uncut else CutModel
        cut = kind(
            model,
            sample=self._sample,
            stages=self.schedule.stages,
            examples=self.strategy.examples(len(self.train_examples)),
            test=self._test_sample,
        )
        with through(model):
            starts = cut.choose(self.strategy.cut, self.strategy.balance)
        packed = msgspec.msgpack.encode(starts) if self.group.rank == 0 else None
        packed = self.group.broadcast_bytes(packed)
        cut.decide(msgspec.msgpack.decode(packed, type=list[int]))
        return cut

    def _stages(self) -> dict[int, Stage]:
        """The stages of this rank, by number; `held` learns which buffers they write."""
        held = self.held
        strategy = self.strategy
        # Several micro-batches draw at the same time, and so do ranks that divide a sequence: each
        # operation has a number, and draws from a seed of its own.
        on_shards = bool(modules_on_shards(held.model)) and not strategy.uncut
        numbered = strategy.most > 1 or on_shards
        self.stream.carried = not numbered and held.cut.draws
        # The loss may draw too; -1 is a number that no operation of the model has.
        part = self.losses.part
        self._loss = self.stream.drawing(part, -1) if numbered else part
        # A schedule that computes weight gradients apart finds them on this list; else they are
        # computed at once.
        self.remaining: Remaining | None = [] if self.schedule.parts_gradients else None
        self.later = now if self.remaining is None else self.remaining.append
        stages = {number: self._stage(number) for number in held.own}
        examples = strategy.examples(len(self.train_examples))
        written: set[str] = set()
        for stage in stages.values():
            written.update(stage.program_for(examples).written)
        held.written = sorted(written)
        return stages

    def _make_optimizer(self) -> None:
        """The optimizer of what this rank holds, its state divided if that is asked for."""
        held = self.held
        held.optimizer = optimizer_of(held, self.task.optimizer)
        if held.optimizer is not None:
            self.rates = Rates(held.optimizer, self.task.lr_schedule)
            self.offloaded.optimizer(held.optimizer)
            held.zero = zero_of(held, self.strategy.zero)
        self._watch_passes()

    def _watch_passes(self) -> None:
        """For activations that are offloaded: what is here in any case is not kept once more."""
        zero, model = self.held.zero, self.held.model
        if zero is None or zero.stage == 1:
            self.offloaded.keep_activations(lambda: (*model.parameters(), *model.buffers()))
            return
        self.offloaded.keep_activations(zero.resident)
        if self.offloaded.activations is not None:
            zero.keep_activations(self.offloaded.activations)

    def _share(self) -> int:
        """Examples of a step in this pipeline."""
        return -(-self.batches.batch_size // self.strategy.mesh.data)

    def flops_per_step(self) -> float:
        return self._flops

    def _own_draws(self, on_shards: bool) -> int | None:
        """This rank's place in its tensor group, in a divided region or on a shard; else None."""
        # In a divided region, or on a shard of a sequence, neighbours compute different elements,
        # and must not draw the same numbers for them.
        inside = on_shards or any(draws.inside for draws in self._draws)
        return self.at.tensor if inside else None

    def _sample(self, examples: int) -> Any:
        return to_device(sample(self.train_examples, examples), self.device)

    def _test_sample(self, examples: int) -> Any:
        return to_device(sample(self.test_examples or self.train_examples, examples), self.device)

    def _stage(self, number: int) -> Stage:
        cut = self.held.cut
        return Stage(
            number,
            last=number == self.schedule.stages - 1,
            program_for=lambda examples: cut.program(
                number, examples, training=True, stream=self.stream, later=self.later
            ),
            structure_for=lambda examples: cut.structure(examples, True),
            loss=self._loss,
            stream=self.stream,
            remaining=self.remaining,
            recompute=self.strategy.recompute,
        )

    # A step.

    def advance(self, wish: int) -> Progress:
        """One step of the optimizer on the next joint batch."""
        held = self.held
        indices = self.batches.at(held.step)
        mean, _, wish = self.compute(indices, wish)
        started = time.perf_counter()
        if held.optimizer is not None:
            self.rates.at(held.step)
            held.optimizer.step()
        self.group.meter.compute("update", started, time.perf_counter(), held.step + 1)
        account(held, computing=True)
        # after the update, when no rank computes with them
        share_buffers(held)
        held.step += 1
        return Progress(mean, len(indices), wish)

    def compute(self, indices: Tensor, wish: int) -> tuple[float | None, float, int]:
        """Leaves the gradient of the mean loss of the joint batch in the parameters.

        Returns that loss, what it counts, and rank 0's wish. Raises LossNotFiniteError on all
        ranks.
        """
        held = self.held
        self.groups.at_step(self.group.step)
        # All ranks of a data group seed alike: stages and tensor neighbours compute one model.
        seed_generators(
            self.seed, "step", held.step, self.at.data, everything=self.train_examples.draws
        )
        if held.optimizer is not None:
            held.optimizer.zero_grad(set_to_none=True)
        # All ranks hear of a loss that is not finite before any of them updates.
        losses, count, wish, missed = self._agree(*self.gradients(indices), wish)
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
        return mean, count, wish

    def gradients(self, indices: Tensor) -> tuple[float, float]:
        """Leaves the joint batch's gradient in the parameters.

        Returns what this rank adds to the batch's loss, and to what that counts.
        """
        batches = self.reading.microbatches(indices, self.held.step)
        if batches:
            with self.offloaded.saving():
                self._engine(len(batches)).run(self.held.step, batches)
        account(self.held, computing=True)
        # First over stages, then over replicas: each replica then adds whole gradients.
        sum_tied(self.held)
        sum_over_replicas(self.held)
        last = self.stages.get(self.schedule.stages - 1)
        if last is None or not batches:
            return 0.0, 0.0
        # Only the last stage knows losses.
        numbers = range(len(batches))
        return sum(last.losses[n] for n in numbers), sum(last.counts[n] for n in numbers)

    def _engine(self, microbatches: int) -> Engine:
        if microbatches not in self._engines:
            schedule = self.strategy.list_for(microbatches)
            self._engines[microbatches] = Engine(
                self.groups.pipeline,
                schedule,
                stages=self.stages,
                stream=self.stream,
                device=self.device,
            )
        return self._engines[microbatches]

    def _agree(self, loss: float, count: float, wish: int) -> tuple[list[float], float, int, int]:
        """What all ranks know of the step.

        What each of them adds to the batch's loss, and all of them to what that counts; rank 0's
        wish; and what got no gradient (`_missed`).
        """
        # Tensor neighbours have the same loss, and stages before the last have none.
        said = [loss, count] if self.at.tensor == 0 else [0.0, 0.0]
        rows = self.group.all_gather_values(
            [*said, float(wish), float(self._missed())], "exchange of losses"
        )
        missed = functools.reduce(operator.and_, (int(row[3]) for row in rows))
        return [row[0] for row in rows], sum(row[1] for row in rows), int(rows[0][2]), missed

    def _missed(self) -> int:
        """The values that the last stage has received and that got no gradient, as bits.

        All of them on a rank that does not know. A loss may not depend on all outputs.
        """
        last = self.stages.get(self.schedule.stages - 1)
        if last is None or not last.losses or self.schedule.stages == 1:
            return EVERY
        return EVERY & ~sum(1 << place for place in last.reached)

    def _drop_gradients(self, missed: int) -> None:
        """Takes away the zeros that came where one worker has no gradient.

        An optimizer leaves a parameter without a gradient alone, and one with zeros not.
        """
        cut = self.held.cut
        # Parts of an optimizer's state that are divided are updated together.
        if isinstance(cut, UncutModel) or self.schedule.stages == 1 or self.held.zero is not None:
            return
        if missed not in self._without:
            self._without[missed] = cut.without_gradient(missed)
        for name in self._without[missed]:
            if name in self.held.parameters:
                self.held.parameters[name].grad = None

    def _drop_frozen(self) -> None:
        """Takes the gradients of what is not yet trained."""
        if not self._trained_from:
            return
        for name, part in trained_parts(self.held).items():
            if self.held.step < self._trained_from.get(name, 0):
                part.grad = None

    def averages(self) -> Mapping[str, Tensor]:
        return trained_parts(self.held)

    def changing_averages(self) -> AbstractContextManager[object]:
        return parts_changed(self.held)

    def evaluate(self) -> dict[str, float]:
        """The test examples, forward through the pipelines; each takes its share."""
        if self.test_examples is None:
            return {}
        self.groups.at_step(self.group.step)
        return evaluate(self.held, self.task, self.test_examples)

    # What is kept.

    def weights(self) -> Mapping[str, Tensor]:
        return weights_of(self.held)

    def state(self) -> dict[str, Any]:
        return state_of(self.held)

    def part(self) -> dict[str, Any]:
        return part_of(self.held)

    def rest(self) -> None:
        if self.held.optimizer is not None:
            forget(self.held.optimizer)

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        restore(self.held, weights, state)
        self.offloaded.restored()
        if self.strategy.uncut:
            self.held.speaking = Speaker(self.held.model)

    def facts(self) -> dict[str, Any]:
        """What this rank holds, for the report: see `dure.parallel.mesh.facts`."""
        return facts_of(self.held, self.batches.batch_size, self.stream.carried)

    def meters(self) -> Sequence[Meter]:
        return [self.group.meter]


def _not_finite(losses: Sequence[float]) -> str:
    """On which rank the loss is not finite: the first of them."""
    ranks = (f"rank {rank}" for rank, loss in enumerate(losses) if not math.isfinite(loss))
    return next(ranks, "all ranks together")

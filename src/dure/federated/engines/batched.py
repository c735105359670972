"""Batched engine: train a cohort of clients with the kernel calls of a single client.

The engine handles models that are a chain of known layers (`program`), known losses (`losses`) and
SGD (`sgd`). Layers without training are the same for all clients, and have no per-client weights.
The weights of the C clients of a cohort are adjacent in memory. A step is some 25 calls for all of
them, forward and backward by hand, without a graph; the product that computes the gradients of
weights adds them to the weights.

The weights of a cohort, C d elements for d of the model, fit in the cache. A model of megabytes
makes a cohort of a single client; the gains are then the missing graph, the fused update and better
kernels.

Clients that start from the same weights compute their first step with a single copy: a large
product per layer, not many small products. While their batches are few, each layer continues with
the shared copy, and stores each client's change as factors of a product (`factored`). With a single
step, as in FedSGD, the products are the updates. If updates are only summed, only the sum of the
products is formed (`products`).

Results equal the loop's except for rounding: sums are computed in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, tee
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.federated.engines.block_pool import BlockPool
from dure.federated.engines.factored import which_pay
from dure.federated.engines.job import ClientEngine, ClientJob, JobResult, loss_failure, not_finite
from dure.federated.engines.loop import client_error
from dure.federated.engines.losses import OwnLossError, StepLosses, cross_entropy
from dure.federated.engines.measuring import results_of, steps_of
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.engines.plan import CohortStep, plan
from dure.federated.engines.products import DeferredUpdate, Factors, ProductPart, UpdateProducts
from dure.federated.engines.program import BatchedProgram, program_of
from dure.federated.engines.sgd import SGD, CannotBatchError, sgd_of
from dure.machine.devices import is_cpu, to_device
from dure.machine.threads import SMALL_STEP, threads
from dure.tensors.flat import trainable_parameters

CACHE = 8 << 20
"""Bytes of weights of a cohort, or of the factors of its products, on the CPU."""

FORMED = 64 << 20
"""Bytes of updates of a cohort whose weights are factored, on the CPU.

They are written once, if at all, and need not stay in a cache.
"""

ON_DEVICE = 4 << 30
"""The same numbers of bytes on an accelerator."""

MOST = 256
"""Largest number of clients in a cohort whose weights are factored."""

_NOTHING = JobResult([], [], 0, 0.0)


class CohortLosses(NamedTuple):
    """Losses and counted weights, each of shape (steps, C).

    counted: None if every example counts 1.
    """

    losses: Tensor
    counted: Tensor | None


class CohortKind(NamedTuple):
    """Properties in which all jobs of a batched cohort agree.

    mu: coefficient of the proximal term. anchored, corrected: whether a job has an anchor, a
    correction. factors: whether the weights are factored: nothing is added to the gradients, all
    clients share the start weights, and the batches are few. lr_factor: the job's. measures:
    whether the job's step is the gradient.
    """

    mu: float
    anchored: bool
    corrected: bool
    factors: bool
    lr_factor: float
    measures: bool


def batched_engine(
    task: Task,
    model: nn.Module,
    examples: Examples,
    batch_size: int | None,
    seed: int,
    together: bool = False,
    sums: bool = False,
) -> BatchedEngine | str:
    """Return the engine, or the reason why the task cannot be batched.

    Args:
        task: the task of the run.
        model: a model of the task, which becomes the engine's.
        examples: training examples of all clients.
        batch_size: of a client's step; None is all of its data.
        seed: of the run.
        together: whether a job always runs with the same other jobs, as in a synchronous round.
            Only then may its bits depend on them, and clients that start from the same weights
            share these as long as possible.
        sums: whether the updates are only summed, so that products need not be formed (`products`).
    """
    parameters = list(model.parameters())
    try:
        program = program_of(task, model, examples)
        rule = sgd_of(optimizer_of(task, parameters), trainable_parameters(model))
    except CannotBatchError as reason:
        return str(reason)
    if together and program.loss.rows is cross_entropy:
        program.loss.rows = partial(cross_entropy, in_company=True)
    return BatchedEngine(
        program=program,
        rule=rule,
        examples=examples,
        device=parameters[0].device,
        batch_size=batch_size,
        seed=seed,
        together=together,
        sums=sums,
    )


class BatchedEngine(ClientEngine):
    """Engine that trains cohorts of clients; made by `batched_engine`.

    Args:
        program: the model as a chain of batched layers.
        rule: settings of SGD.
        examples: training examples of all clients.
        device: of the model.
        batch_size: of a client's step; None is all of its data.
        seed: of the run.
        together: as in `batched_engine`.
        sums: as in `batched_engine`.
    """

    name = "batched"

    def __init__(
        self,
        program: BatchedProgram,
        rule: SGD,
        examples: Examples,
        device: torch.device,
        batch_size: int | None,
        seed: int,
        together: bool,
        sums: bool,
    ) -> None:
        self.program = program
        self.rule = rule
        self.batch_size = batch_size
        self.seed = seed
        self.together = together
        self.sums = sums
        self.device = device
        self.flops = 0.0
        """Floating-point operations of an example's step."""
        self.sampling = examples.sampling
        # All examples, once: a step only selects rows of them.
        self.inputs, self.targets = to_device((program.inputs, examples.targets), device)
        sizes = [math.prod(weights.shape) for weights in program.weights]
        # Flat weights have the parameters one after another.
        ends = list(accumulate(sizes))
        self._places = list(zip(program.weights, [0, *ends], ends, strict=False))
        """Each parameter, with its start and end in flat weights."""
        self._whole = ends[-1] * self.inputs.element_size()
        """Bytes of a model's weights."""
        self.memory = BlockPool()
        self._fits: dict[int, int] = {}
        """Number of rows of a job -> cohort size."""
        self._pay: dict[int, list[bool]] = {}
        """Number of rows of a job -> which parameters are factored."""
        self.room = CACHE if is_cpu(device) else ON_DEVICE
        self._formed = FORMED if is_cpu(device) else ON_DEVICE
        self.cohort: int = max(1, min(64, self.room // self._whole))

    def train(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        """Yield the results in the jobs' order, a cohort at a time.

        A client whose loss or weights are not finite has a failure as its result. Raises
        WorkerFailedError, with the client's name, if a user-defined loss raises.
        """
        if isinstance(jobs, Sequence) and all(job.measures is None for job in jobs):
            return self._train(jobs)
        asked, again = tee(jobs)
        return results_of(asked, self._train(steps_of(again)))

    def _train(self, jobs: Iterable[ClientJob]) -> Iterator[JobResult]:
        # Jobs that start from different weights (personalised layers, for example) share none.
        apart = isinstance(jobs, Sequence) and len({id(job.weights[0]) for job in jobs}) > 1
        for some, kinds in windows(jobs, self._classifier(self.together and not apart)):
            results: dict[int, JobResult] = {}
            for kind, places in kinds.items():
                trained = self._cohort([some[place] for place in places], kind)
                results.update(zip(places, trained, strict=True))
            # Handed over one by one, without a second reference here.
            yield from map(results.pop, range(len(some)))

    def _classifier(self, shared: bool) -> Callable[[ClientJob], tuple[CohortKind, int]]:
        """Return a function from a job to its kind and its cohort size.

        The function computes both once for all jobs that agree in the relevant properties.
        """
        # Most jobs of a round agree: each kind is examined once.
        known: dict[tuple[Any, ...], tuple[CohortKind, int]] = {}

        def classify(job: ClientJob) -> tuple[CohortKind, int]:
            added = job.mu, job.anchor is None, job.correction is None, job.lr_factor, job.measures
            what = (job.steps, job.indices.numel(), *added)
            if what not in known:
                kind = self._kind(job, shared)
                known[what] = kind, self._most(job, kind)
            return known[what]

        return classify

    def _kind(self, job: ClientJob, shared: bool) -> CohortKind:
        # Factors represent products alone: any other change of the weights needs per-client
        # weights.
        rule = self._rule(job)
        added = job.mu or job.correction is not None or rule.momentum or rule.weight_decay
        factors = shared and not added and any(self._factored(self._rows(job)))
        return CohortKind(
            mu=job.mu,
            anchored=job.anchor is not None,
            corrected=job.correction is not None,
            factors=factors,
            lr_factor=job.lr_factor,
            measures=job.measures is not None,
        )

    def _rule(self, job: ClientJob) -> SGD:
        """Return the SGD rule of the job's steps; a measuring job moves by the gradient alone."""
        if job.measures is not None:
            return replace(self.rule, lr=1.0, momentum=0.0, weight_decay=0.0)
        if job.lr_factor == 1:
            return self.rule
        return replace(self.rule, lr=self.rule.lr * job.lr_factor)

    def _rows(self, job: ClientJob) -> int:
        """Return the rows of all steps of the job."""
        examples = job.indices.numel()
        return job.steps * (examples if self.batch_size is None else min(self.batch_size, examples))

    def alone(self, flops: Callable[[], float], threads: int | None) -> None:
        # If jobs run with changing other jobs, a step gets no threads of its own: they could change
        # its bits.
        if self.together and self.device.type == "cpu":
            self.flops = flops()
            self.threads = threads

    def at_once(self, job: ClientJob) -> int:
        """Return the cohort size for jobs like this one."""
        return self._most(job, self._kind(job, self.together))

    def _most(self, job: ClientJob, kind: CohortKind) -> int:
        """Return the cohort size for jobs like this one, all of this kind."""
        if not kind.factors:
            return self.cohort
        rows = self._rows(job)
        if rows not in self._fits:
            # A job's share of a cohort, by the tightest of three bounds: factors in the cache,
            # updates in memory, the number of clients.
            share = max(self._kept(rows) / self.room, self._whole / self._formed, 1 / MOST)
            # A share of 1/n may be larger by a rounding, and n of them still fit.
            self._fits[rows] = max(1, int((1 + 1e-9) / share))
        return self._fits[rows]

    def _kept(self, rows: int) -> int:
        """Return the bytes of the factors of `rows` rows and of the unfactored weights."""
        elements = 0
        for weights, pays in zip(self.program.weights, self._factored(rows), strict=True):
            if not pays:
                elements += math.prod(weights.shape)
            # A bias shares its weight's factor, so only the weight is counted.
            elif weights.beside is None:
                elements += rows * sum(weights.shape)
        return elements * int(self.inputs.element_size())

    def _factored(self, rows: int) -> list[bool]:
        """Return which parameters are factored for `rows` rows in all steps together.

        The factored parameters are weights, together with their biases.
        """
        if rows not in self._pay:
            weights = self.program.weights
            pay = dict(
                zip(map(id, weights), which_pay(rows, [one.shape for one in weights]), strict=True)
            )
            self._pay[rows] = [
                pay[id(one if one.beside is None else one.beside)] for one in weights
            ]
        return self._pay[rows]

    @torch.no_grad()
    def _cohort(self, jobs: Sequence[ClientJob], kind: CohortKind) -> list[JobResult]:
        made = plan(jobs, self.batch_size, self.seed, self.sampling)
        deltas, found, finite = self._compute(
            [jobs[which] for which in made.by_steps], made.steps, kind
        )
        values = found.losses.T.tolist()
        counts = None if found.counted is None else found.counted.T.tolist()
        # The plan sorts jobs by steps; results return in the order of the jobs.
        trained: list[JobResult] = [_NOTHING] * len(jobs)
        for at, which in enumerate(made.by_steps):
            sizes = made.sizes[at]
            samples = sum(sizes)
            # Padding steps beyond a client's own have no size, and count nothing: their losses, 0,
            # are left out.
            own = sizes if counts is None else counts[at]
            counted = sum(own)
            loss = sum(map(mul, values[at], own)) / counted if counted else 0.0
            trained[which] = JobResult(
                delta=deltas[at],
                buffers=[],
                samples=samples,
                loss=loss,
                counted=None if counts is None else counted,
            )
        # Rare: only now is each job checked. A sum may also overflow by itself; the check then
        # finds nothing.
        if not finite:
            for at, which in enumerate(made.by_steps):
                trained[which] = _looked_at(trained[which], values[at])
        return trained

    def _compute(
        self, jobs: Sequence[ClientJob], steps: Sequence[CohortStep], kind: CohortKind
    ) -> tuple[list[Sequence[Tensor]], CohortLosses, bool]:
        """Return each job's update; the losses, (steps, C); and whether all of them are finite."""
        rule = self._rule(jobs[0])
        start, constant = self._begin(jobs)
        shares = self.together and len(start) == 1
        # With a single step from shared weights the product is the change: it goes to the output,
        # and no weights are written.
        once = shares and len(steps) == 1 and not rule.momentum
        # Rows of all steps, with padding: the size of each factor.
        rows = sum(step.rows.shape[1] for step in steps) if kind.factors else 0
        assert not rows or len(start) == 1, (
            "jobs whose weights are factored need the same initial weights"
        )
        pay = self._factored(rows)
        # Updates that are only summed stay unformed; parameters that stay factored have no output.
        defers = rows > 0 and self.sums
        changes, outputs = self._outputs(len(jobs), start, pay if defers else [False] * len(pay))
        losses = torch.zeros(len(steps), len(jobs), dtype=self.inputs.dtype, device=self.device)
        counted: Tensor | None = None
        threads_here = self._threads(steps)
        own_threads = nullcontext() if threads_here is None else threads(threads_here)
        # Tensors of inference mode are read outside, and never changed.
        with torch.inference_mode(), own_threads:
            # Each parameter of all clients, loaded for its use: as factors, or as per-client
            # weights.
            for (weights, begin, end), output, pays in zip(self._places, outputs, pay, strict=True):
                if pays:
                    weights.factor(start[0, begin:end], len(jobs), rule, rows)
                    continue
                weights.load(
                    start=start[:, begin:end],
                    clients=len(jobs),
                    rule=rule,
                    pull=jobs[0].mu,
                    constant=None if constant is None else constant[:, begin:end],
                    shares=shares,
                    only=output if once else None,
                )
            self.program.begin(len(jobs))
            for at, step in enumerate(steps):
                if self.look is not None:
                    self.look()
                try:
                    found = self._step(step, at == 0)
                except OwnLossError as error:
                    raised = error.__cause__ or error
                    raise client_error(jobs[error.client], raised) from raised
                losses[at, : len(step.sizes)] = found.losses
                if found.counted is not None:
                    if counted is None:
                        counted = torch.zeros_like(losses, dtype=torch.float64)
                    counted[at, : len(step.sizes)] = found.counted
            self._write(start, outputs, once)
        if defers:
            products = UpdateProducts(self._parts(outputs), rule.lr, threads_here)
            # Unformed updates cannot be checked for NaN, so a bound has to exclude NaN; otherwise
            # they are formed and checked.
            if products.bounded():
                own = jobs[0].weights[0]
                deferred: list[Sequence[Tensor]] = [
                    DeferredUpdate(products, at, own) for at in range(len(jobs))
                ]
                return deferred, CohortLosses(losses, counted), _finite(losses)
            changes = products.all()
        updates = changes.to(jobs[0].weights[0].device).unbind(0)
        finite = _finite(changes) and _finite(losses)
        return [[update] for update in updates], CohortLosses(losses, counted), finite

    def _threads(self, steps: Sequence[CohortStep]) -> int | None:
        """Return the number of threads of operators; None leaves the number unchanged.

        The number depends on the model and the cohort.
        """
        # By the first step, which has all clients: a cohort has a fixed number of threads, for
        # reproducible bits.
        if self.threads is None or self.flops * steps[0].rows.numel() < SMALL_STEP:
            return None
        return self.threads

    def _outputs(
        self, clients: int, like: Tensor, stay: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return memory for the weights' changes: as a whole, and a view (C, n) per parameter.

        Parameters that stay factored have no memory.
        """
        if all(stay):
            return like.new_empty(0), [None] * len(stay)
        places = zip(self._places, stay, strict=True)
        sizes = [0 if stays else end - begin for (_, begin, end), stays in places]
        changes = self.memory.take(clients, sum(sizes), like)
        return changes, [
            part if size else None
            for part, size in zip(torch.split(changes, sizes, 1), sizes, strict=True)
        ]

    def _parts(self, outputs: Sequence[Tensor | None]) -> list[ProductPart]:
        """Return the parts of `UpdateProducts`: outputs, or factors of parameters without one."""
        weights = self.program.weights
        biased = {id(one.beside) for one in weights}
        parts: list[ProductPart] = []
        for one, output in zip(weights, outputs, strict=True):
            if output is not None:
                parts.append(output)
            elif one.factored is not None:
                parts.append(Factors(*one.factored.factors(), id(one) in biased))
        return parts

    def _write(self, start: Tensor, outputs: Sequence[Tensor | None], once: bool) -> None:
        """Write the current weights minus `start` to the outputs.

        once: whether the outputs have the changes already.
        """
        for (weights, begin, end), output in zip(self._places, outputs, strict=True):
            if output is not None and weights.is_factored:
                weights.change(output)
            elif output is not None and not once:
                before = start[:, begin:end].view(-1, *weights.shape)
                torch.sub(weights.values, before, out=output.view(weights.values.shape))

    def _begin(self, jobs: Sequence[ClientJob]) -> tuple[Tensor, Tensor | None]:
        """Return the start of a cohort, (C, d) or, if all are the same, (1, d).

        The start is the weights, and the constant part of the gradients, without the term mu w.
        """
        first = jobs[0]
        start = self._side_by_side([job.weights for job in jobs])
        constant: Tensor | None = None
        if first.mu and first.anchor is not None:
            # mu (w - anchor) + correction: the part without w is computed once, the rest is a
            # factor of w.
            constant = self._side_by_side([_known(job.anchor) for job in jobs]) * -first.mu
        elif first.mu:
            constant = start * -first.mu
        if first.correction is not None:
            correction = self._side_by_side([_known(job.correction) for job in jobs])
            constant = correction if constant is None else constant + correction
        return start, constant

    def _side_by_side(self, values: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the values stacked: (C, d), or (1, d) if all are the same tensor."""
        tensors = [value[0] for value in values]
        # By identity: the clients of a round share the same tensor, and comparing numbers would
        # cost a pass.
        alike = len(set(map(id, tensors))) == 1
        together = tensors[0].unsqueeze(0) if alike else torch.stack(tensors)
        return together.to(self.device)

    def _step(self, step: CohortStep, first: bool) -> StepLosses:
        rows = step.rows.view(-1).to(self.device)
        inputs = self.inputs.index_select(0, rows).unflatten(0, step.rows.shape)
        targets = self.targets.index_select(0, rows).unflatten(0, step.rows.shape)
        shares = step.shares.to(self.device, self.inputs.dtype)
        return self.program.step(
            inputs=inputs, targets=targets, sizes=step.sizes, shares=shares, first=first
        )


def windows(
    jobs: Iterable[ClientJob], classify: Callable[[ClientJob], tuple[CohortKind, int]]
) -> Iterator[tuple[list[ClientJob], dict[CohortKind, list[int]]]]:
    """Yield the jobs in order, in windows that end as soon as a kind has a full cohort.

    Each window comes with the places of each kind's jobs, which can be computed together. classify:
    returns a job's kind and its cohort size; the smallest cohort size of the jobs of a kind counts,
    because a cohort has places of equal size.
    """
    some: list[ClientJob] = []
    kinds: dict[CohortKind, list[int]] = {}
    least: dict[CohortKind, int] = {}
    for job in jobs:
        kind, most = classify(job)
        places = kinds.get(kind, [])
        together = min(most, least.get(kind, most))
        # The cohort size of this job is smaller than the present number: the window ends before it.
        if places and len(places) >= together:
            yield some, kinds
            some = []
            kinds = {}
            least = {}
            places = []
            together = most
        kinds[kind] = places
        least[kind] = together
        places.append(len(some))
        some.append(job)
        # A cohort is full. Jobs of other kinds in the window run with it, in smaller cohorts, so
        # that results come in the jobs' order.
        if len(places) >= together:
            yield some, kinds
            some = []
            kinds = {}
            least = {}
    if some:
        yield some, kinds


def _finite(tensor: Tensor) -> bool:
    # A pass without a mask: NaN and infinities stay in a sum. A sum may overflow although no
    # element is infinite; the caller then checks each job.
    return bool(tensor.sum().isfinite())


def _known(values: Sequence[Tensor] | None) -> Sequence[Tensor]:
    assert values is not None, "the jobs of a cohort have to be alike"
    return values


def _looked_at(trained: JobResult, losses: Sequence[float]) -> JobResult:
    """Return the result, or a failure if losses or weights are not finite."""
    failure = loss_failure(losses)
    if failure is None and not bool(trained.delta[0].isfinite().all()):
        failure = "its weights became not finite"
    return trained if failure is None else not_finite(failure)

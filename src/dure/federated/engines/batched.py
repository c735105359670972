"""Whole cohorts of clients at once: one call of a kernel where a loop makes one for each client.

For models that are a chain of known layers (`program`), known losses (`losses`) and SGD (`sgd`).
Layers that are not trained are the same for all clients, and have no weights here.
The weights of the C clients of a cohort lie side by side, and a step is some 25 calls for all of
them, forward and backward by hand, without a graph; the gradients of weights are added to the
weights by the product that makes them.

A cohort is so large that its weights stay in the cache: C d elements, d the model's. Of a model of
megabytes that is one client, where what is won is the missing graph, the fused update and better
kernels.

Clients that begin at the same weights compute their first step with one copy of them: one large
product a layer, not many small ones. While their batches are few, each layer goes on so, and keeps
what each client adds as factors of a product (`factored`). If there is one step, as in FedSGD, the
products are the updates; and where updates are only summed, the products are not formed for each
client but for their sum (`products`).

Equal to the loop but for rounding: sums are made in another order.
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
from dure.federated.engines.factored import which_pay
from dure.federated.engines.job import Engine, Job, Trained, loss_failure, not_finite
from dure.federated.engines.loop import failed
from dure.federated.engines.losses import Found, OwnLossError, cross_entropy
from dure.federated.engines.measuring import results_of, steps_of
from dure.federated.engines.memory import Memory
from dure.federated.engines.optimizers import optimizer_of
from dure.federated.engines.plan import Step, plan
from dure.federated.engines.products import Deferred, Factors, Part, Products
from dure.federated.engines.program import Program, program_of
from dure.federated.engines.sgd import SGD, CannotBatchError, sgd_of
from dure.machine.devices import to_device
from dure.machine.threads import SMALL_STEP, threads
from dure.tensors.flat import trained_of

CACHE = {"cpu": 8 << 20, "cuda": 4 << 30}
"""Bytes of weights of a cohort, or of the factors of its products."""

FORMED = {"cpu": 64 << 20, "cuda": 4 << 30}
"""Bytes of updates of a cohort whose weights are factored.

Written once, if at all, they need not stay in a cache.
"""

MOST = 256
"""Clients of a cohort whose weights are factored, at most."""

_NOTHING = Trained([], [], 0, 0.0)


class Losses(NamedTuple):
    """Of each step and client, (steps, C), and what they have counted; None: their examples."""

    losses: Tensor
    counted: Tensor | None


class Kind(NamedTuple):
    """What is added to the gradients of a job: mu, whether it has an anchor, a correction.

    factors: whether nothing is, it begins at weights that all share, and its batches are so few
    that these are factored. lr_factor: the job's. measures: whether its step is the gradient.
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
    """The engine, or the reason why this cannot be computed for many clients at once.

    together: whether a job is computed with the same others whenever it is, as those of a
    synchronous round are. Only then may its bits depend on them, and clients that begin at the same
    weights share them while they can. sums: whether, besides, the updates are only summed, so that
    what are products need not be formed (`products`).
    """
    parameters = list(model.parameters())
    try:
        program = program_of(task, model, examples)
        rule = sgd_of(optimizer_of(task, parameters), trained_of(model))
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


class BatchedEngine(Engine):
    """Trains cohorts of clients; made by `batched_engine`."""

    name = "batched"

    def __init__(
        self,
        program: Program,
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
        # All examples, once: a step only picks rows of them.
        self.inputs, self.targets = to_device((program.inputs, examples.targets), device)
        sizes = [math.prod(weights.shape) for weights in program.weights]
        # Flat weights have the parameters one after another.
        ends = list(accumulate(sizes))
        self._places = list(zip(program.weights, [0, *ends], ends, strict=False))
        """Each parameter, and where it begins and ends in flat weights."""
        self._whole = ends[-1] * self.inputs.element_size()
        """Bytes of the weights."""
        self.memory = Memory()
        self._fits: dict[int, int] = {}
        """How many jobs with so many rows make a cohort."""
        self._pay: dict[int, list[bool]] = {}
        """Which parameters are factored in steps of so many rows."""
        kind = device.type if device.type in CACHE else "cpu"
        self.room = CACHE[kind]
        self._formed = FORMED[kind]
        self.cohort: int = max(1, min(64, self.room // self._whole))

    def train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """The results in the jobs' order, a cohort at a time.

        A client whose loss or weights are not finite has a failure as its result. Raises
        WorkerFailedError, which names the client, when a loss of the user's own raises.
        """
        if isinstance(jobs, Sequence) and all(job.measures is None for job in jobs):
            return self._train(jobs)
        asked, again = tee(jobs)
        return results_of(asked, self._train(steps_of(again)))

    def _train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        # Jobs that begin at different weights (personal layers, say) have none to share.
        apart = isinstance(jobs, Sequence) and len({id(job.weights[0]) for job in jobs}) > 1
        for some, kinds in windows(jobs, self._classifier(self.together and not apart)):
            results: dict[int, Trained] = {}
            for kind, places in kinds.items():
                trained = self._cohort([some[place] for place in places], kind)
                results.update(zip(places, trained, strict=True))
            # Given away one by one: nobody here keeps what has been taken.
            yield from map(results.pop, range(len(some)))

    def _classifier(self, shared: bool) -> Callable[[Job], tuple[Kind, int]]:
        """What says of a job its kind, and how many like it make a cohort.

        It is found out once for all that are alike in that.
        """
        # Most jobs of a round are alike: each kind is looked into once.
        known: dict[tuple[Any, ...], tuple[Kind, int]] = {}

        def classify(job: Job) -> tuple[Kind, int]:
            added = job.mu, job.anchor is None, job.correction is None, job.lr_factor, job.measures
            what = (job.steps, job.indices.numel(), *added)
            if what not in known:
                kind = self._kind(job, shared)
                known[what] = kind, self._most(job, kind)
            return known[what]

        return classify

    def _kind(self, job: Job, shared: bool) -> Kind:
        # Factors hold products alone: whatever else moves the weights needs weights of the client's
        # own.
        rule = self._rule(job)
        added = job.mu or job.correction is not None or rule.momentum or rule.weight_decay
        factors = shared and not added and any(self._factored(self._rows(job)))
        return Kind(
            mu=job.mu,
            anchored=job.anchor is not None,
            corrected=job.correction is not None,
            factors=factors,
            lr_factor=job.lr_factor,
            measures=job.measures is not None,
        )

    def _rule(self, job: Job) -> SGD:
        """The rule of its steps. One that measures moves by the gradient alone."""
        if job.measures is not None:
            return replace(self.rule, lr=1.0, momentum=0.0, weight_decay=0.0)
        if job.lr_factor == 1:
            return self.rule
        return replace(self.rule, lr=self.rule.lr * job.lr_factor)

    def _rows(self, job: Job) -> int:
        """The rows of all steps of the job."""
        examples = job.indices.numel()
        return job.steps * (examples if self.batch_size is None else min(self.batch_size, examples))

    def alone(self, flops: Callable[[], float], threads: int | None) -> None:
        # Where jobs come now with these and then with those, a step has no threads of its own: they
        # could change its bits.
        if self.together and self.device.type == "cpu":
            self.flops = flops()
            self.threads = threads

    def at_once(self, job: Job) -> int:
        """How many jobs like this one make a cohort."""
        return self._most(job, self._kind(job, self.together))

    def _most(self, job: Job, kind: Kind) -> int:
        """How many jobs like this one, all of this kind, make a cohort."""
        if not kind.factors:
            return self.cohort
        rows = self._rows(job)
        if rows not in self._fits:
            # What one job takes of a cohort's room, by the tightest of three bounds: factors in the
            # cache, updates in memory, the number of clients.
            share = max(self._kept(rows) / self.room, self._whole / self._formed, 1 / MOST)
            # A share of 1/n may be a rounding larger than that, and n of them still fit.
            self._fits[rows] = max(1, int((1 + 1e-9) / share))
        return self._fits[rows]

    def _kept(self, rows: int) -> int:
        """Bytes of the factors of so many rows, and of the weights that are not factored."""
        elements = 0
        for weights, pays in zip(self.program.weights, self._factored(rows), strict=True):
            if not pays:
                elements += math.prod(weights.shape)
            # A bias has its weight's factor, so only the weight is counted.
            elif weights.beside is None:
                elements += rows * sum(weights.shape)
        return elements * int(self.inputs.element_size())

    def _factored(self, rows: int) -> list[bool]:
        """Which parameters are factored in steps of so many rows together.

        They are weights, and with them their biases.
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
    def _cohort(self, jobs: Sequence[Job], kind: Kind) -> list[Trained]:
        made = plan(jobs, self.batch_size, self.seed, self.sampling)
        deltas, found, finite = self._compute(
            [jobs[which] for which in made.by_steps], made.steps, kind
        )
        values = found.losses.T.tolist()
        counts = None if found.counted is None else found.counted.T.tolist()
        # The plan has its own order (by steps); results go back to that of the jobs.
        trained: list[Trained] = [_NOTHING] * len(jobs)
        for at, which in enumerate(made.by_steps):
            sizes = made.sizes[at]
            samples = sum(sizes)
            # Steps beyond a client's own have no size, and count nothing: their losses, 0, are left
            # out.
            own = sizes if counts is None else counts[at]
            counted = sum(own)
            loss = sum(map(mul, values[at], own)) / counted if counted else 0.0
            trained[which] = Trained(
                delta=deltas[at],
                buffers=[],
                samples=samples,
                loss=loss,
                counted=None if counts is None else counted,
            )
        # Seldom: only now is each job looked at. Sums may also overflow by themselves; then nothing
        # is found.
        if not finite:
            for at, which in enumerate(made.by_steps):
                trained[which] = _looked_at(trained[which], values[at])
        return trained

    def _compute(
        self, jobs: Sequence[Job], steps: Sequence[Step], kind: Kind
    ) -> tuple[list[Sequence[Tensor]], Losses, bool]:
        """Each job's update; the losses, (steps, C); and whether all of it is finite."""
        rule = self._rule(jobs[0])
        start, constant = self._begin(jobs)
        shares = self.together and len(start) == 1
        # With one step from shared weights the product is the change: it goes to the output, no
        # weights are written.
        once = shares and len(steps) == 1 and not rule.momentum
        # Rows of all steps, as blocks have them: what each factor needs room for.
        rows = sum(step.rows.shape[1] for step in steps) if kind.factors else 0
        assert not rows or len(start) == 1, "jobs whose weights are factored begin at the same ones"
        pay = self._factored(rows)
        # Who only sums updates gets them unformed; what stays factors has no output.
        defers = rows > 0 and self.sums
        changes, outputs = self._outputs(len(jobs), start, pay if defers else [False] * len(pay))
        losses = torch.zeros(len(steps), len(jobs), dtype=self.inputs.dtype, device=self.device)
        counted: Tensor | None = None
        threads_here = self._threads(steps)
        own_threads = nullcontext() if threads_here is None else threads(threads_here)
        # What is made in inference mode is read outside, and never changed.
        with torch.inference_mode(), own_threads:
            # Each parameter of all clients, loaded as it is going to be used: as factors, or as
            # weights of their own.
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
                    raise failed(jobs[error.client], raised) from raised
                losses[at, : len(step.sizes)] = found.losses
                if found.counted is not None:
                    if counted is None:
                        counted = torch.zeros_like(losses, dtype=torch.float64)
                    counted[at, : len(step.sizes)] = found.counted
            self._write(start, outputs, once)
        if defers:
            products = Products(self._parts(outputs), rule.lr, threads_here)
            # Unformed updates cannot be looked at for NaN, so a bound has to say that there is
            # none; where it does not, they are formed and looked at.
            if products.bounded():
                own = jobs[0].weights[0]
                deferred: list[Sequence[Tensor]] = [
                    Deferred(products, at, own) for at in range(len(jobs))
                ]
                return deferred, Losses(losses, counted), _finite(losses)
            changes = products.all()
        updates = changes.to(jobs[0].weights[0].device).unbind(0)
        finite = _finite(changes) and _finite(losses)
        return [[update] for update in updates], Losses(losses, counted), finite

    def _threads(self, steps: Sequence[Step]) -> int | None:
        """The threads of operators; None where they stay as they are.

        The model and the cohort decide.
        """
        # By the first step, which has all clients: a cohort has one number of threads, for the sake
        # of its bits.
        if self.threads is None or self.flops * steps[0].rows.numel() < SMALL_STEP:
            return None
        return self.threads

    def _outputs(
        self, clients: int, like: Tensor, stay: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Where the changes of the weights go: all of them, and each parameter's, (C, n).

        Those that stay factors have none.
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

    def _parts(self, outputs: Sequence[Tensor | None]) -> list[Part]:
        """The parts of products: the outputs, and where there is none the factors."""
        weights = self.program.weights
        biased = {id(one.beside) for one in weights}
        parts: list[Part] = []
        for one, output in zip(weights, outputs, strict=True):
            if output is not None:
                parts.append(output)
            elif one.factored is not None:
                parts.append(Factors(*one.factored.factors(), id(one) in biased))
        return parts

    def _write(self, start: Tensor, outputs: Sequence[Tensor | None], once: bool) -> None:
        """Fills the outputs with what the weights are now less `start`.

        once: that stands there already.
        """
        for (weights, begin, end), output in zip(self._places, outputs, strict=True):
            if output is not None and weights.is_factored:
                weights.change(output)
            elif output is not None and not once:
                before = start[:, begin:end].view(-1, *weights.shape)
                torch.sub(weights.values, before, out=output.view(weights.values.shape))

    def _begin(self, jobs: Sequence[Job]) -> tuple[Tensor, Tensor | None]:
        """What a cohort begins with, (C, d) or, where all are the same, (1, d).

        These are the weights, and what is added to gradients but for the pull to the weights
        themselves.
        """
        first = jobs[0]
        start = self._side_by_side([job.weights for job in jobs])
        constant: Tensor | None = None
        if first.mu and first.anchor is not None:
            # mu (w - anchor) + correction: what does not change with w is made once, the rest is a
            # factor on w.
            constant = self._side_by_side([_known(job.anchor) for job in jobs]) * -first.mu
        elif first.mu:
            constant = start * -first.mu
        if first.correction is not None:
            correction = self._side_by_side([_known(job.correction) for job in jobs])
            constant = correction if constant is None else constant + correction
        return start, constant

    def _side_by_side(self, values: Sequence[Sequence[Tensor]]) -> Tensor:
        """The values side by side: (C, d), or (1, d) if all are one tensor."""
        tensors = [value[0] for value in values]
        # By identity: the clients of a round are handed the same tensor, and comparing numbers
        # would cost a pass.
        alike = len(set(map(id, tensors))) == 1
        together = tensors[0].unsqueeze(0) if alike else torch.stack(tensors)
        return together.to(self.device)

    def _step(self, step: Step, first: bool) -> Found:
        rows = step.rows.view(-1).to(self.device)
        inputs = self.inputs.index_select(0, rows).unflatten(0, step.rows.shape)
        targets = self.targets.index_select(0, rows).unflatten(0, step.rows.shape)
        shares = step.shares.to(self.device, self.inputs.dtype)
        return self.program.step(
            inputs=inputs, targets=targets, sizes=step.sizes, shares=shares, first=first
        )


def windows(
    jobs: Iterable[Job], classify: Callable[[Job], tuple[Kind, int]]
) -> Iterator[tuple[list[Job], dict[Kind, list[int]]]]:
    """The jobs in their order, each time until there is a cohort of some kind.

    With them come the places of those of each kind, which can be computed together. classify: a
    job's kind, and how many jobs like it make a cohort; where the jobs of a kind differ, the least
    of these counts, for a cohort has places of one size.
    """
    some: list[Job] = []
    kinds: dict[Kind, list[int]] = {}
    least: dict[Kind, int] = {}
    for job in jobs:
        kind, most = classify(job)
        places = kinds.get(kind, [])
        together = min(most, least.get(kind, most))
        # This job makes the bound smaller than what is there already: the window ends before it.
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
        # A cohort is full. Jobs of other kinds in the window are computed with it, in smaller
        # cohorts, so that results come in the jobs' order.
        if len(places) >= together:
            yield some, kinds
            some = []
            kinds = {}
            least = {}
    if some:
        yield some, kinds


def _finite(tensor: Tensor) -> bool:
    # One pass without a mask: NaN and infinities stay in a sum. A sum may overflow where no element
    # has; whoever asks then looks closer.
    return bool(tensor.sum().isfinite())


def _known(values: Sequence[Tensor] | None) -> Sequence[Tensor]:
    assert values is not None, "the jobs of a cohort are alike"
    return values


def _looked_at(trained: Trained, losses: Sequence[float]) -> Trained:
    """The result, or a failure where losses or weights are not finite."""
    failure = loss_failure(losses)
    if failure is None and not bool(trained.delta[0].isfinite().all()):
        failure = "its weights became not finite"
    return trained if failure is None else not_finite(failure)

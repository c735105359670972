"""Hooks of an algorithm of a user's own: published algorithms that are written with them compute
what their papers say, by every engine, resumed to the bit, or are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.deploy.server.model_streams import ModelStreams
from dure.errors import WorkerFailedError
from dure.federated.algorithm import Algorithm, AlgorithmInputs, ClientMemory
from dure.federated.engines.job import ClientJob, JobResult, Reference
from dure.federated.engines.objective import LocalBatch
from dure.federated.server.sampling import PerClientPoisson, Selection
from dure.federated.server.update_validation import invalid_reason
from dure.protocol.messages import Assignment, Update
from dure.wire.layout import FederationSpec, ModelLayout
from dure.wire.requests import UploadRequest
from small import same_bits, small_task, weights_of

LR = 0.3
BATCH = 4
CLIENTS = 4
ROUNDS = 3


class Own(dure.FedAvg):
    """FedAvg with the hooks of a class."""

    name: ClassVar[str] = "own"
    title: ClassVar[str] = "own"
    hooks: ClassVar[type[Algorithm]]

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        made = self.hooks()
        made.start = start  # type: ignore[attr-defined]
        return made


def of(hooks: type[Algorithm], kind: type[dure.FedAvg] = Own, **settings: Any) -> dure.FedAvg:
    """A strategy with these hooks, whose clients have different numbers of steps."""
    made = dataclass(frozen=True)(
        type(hooks.__name__, (kind,), {"hooks": hooks, "__doc__": "Own."})
    )
    if kind is not Own:
        made.algorithm = Own.algorithm
    settings = {"clients": CLIENTS, "batch_size": BATCH, "partition": "quantity-skew:1", **settings}
    return made(**settings)


# The algorithms, as a user writes them


class Nova(Algorithm):
    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        return 1 / update.steps, update.weight

    def step(self, weights, mean, updates):
        n = sum(one.weight for one in updates)
        effective = sum(one.weight * one.steps for one in updates) / n
        return [w + effective * d for w, d in zip(weights, mean, strict=True)]


class FedExP(Algorithm):
    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        return 1.0, 1.0

    def step(self, weights, mean, updates):
        squares = sum(float(d.square().sum()) for one in updates for d in one.delta)
        of_mean = sum(float(d.square().sum()) for d in mean)
        rate = max(1.0, squares / (2 * len(updates) * (of_mean + 1e-3)))
        return [w + rate * d for w, d in zip(weights, mean, strict=True)]


class FedDyn(Algorithm):
    """The server's h is a state; each client keeps its gradient's memory."""

    alpha = 0.1
    h: list[Tensor] | None = None

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        return 1.0, 1.0

    def step(self, weights, mean, updates):
        moved = self.alpha * len(updates) / self.start.clients
        h = self.h or [torch.zeros_like(w) for w in weights]
        self.h = [one - moved * d for one, d in zip(h, mean, strict=True)]
        return [w + d - one / self.alpha for w, d, one in zip(weights, mean, self.h, strict=True)]

    def state(self):
        return self.h

    def restore(self, state):
        self.h = state

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        correction = None if memory is None else [-one for one in memory]
        return [replace(job, mu=self.alpha, correction=correction)]

    def answer(self, jobs, trained, assignment, memory):
        (one,) = trained
        before = memory or [torch.zeros_like(d) for d in one.delta]
        own = [g - self.alpha * d for g, d in zip(before, one.delta, strict=True)]
        return one.delta, (), own


class QFFL(Algorithm):
    """q-FedAvg: the loss where a client begins is its extra."""

    q = 1.5
    scale = 1 / LR  # L

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        return [torch.zeros(1, dtype=torch.float64)]

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        # A pass over all its data, where it begins.
        whole = replace(job, measures="loss", first_step=0, steps=-(-len(job.indices) // BATCH))
        return [job, whole]

    def answer(self, jobs, trained, assignment, memory):
        loss = torch.tensor([trained[1].loss], dtype=torch.float64)
        return trained[0].delta, [loss], None

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        return float(update.extra[0]) ** self.q, 1.0

    def step(self, weights, mean, updates):
        h = 0.0
        for one in updates:
            loss = float(one.extra[0])
            square = sum(float((self.scale * d).square().sum()) for d in one.delta)
            h += self.q * loss ** (self.q - 1) * square + self.scale * loss**self.q
        moved = self.scale * len(updates) / h
        return [w + moved * d for w, d in zip(weights, mean, strict=True)]


class Mime(Algorithm):
    """SVRG's correction in each step, and the server's momentum, which stays in a round.

    c is of the round before, so that clients are asked once.
    """

    beta = 0.5
    momentum: list[Tensor] | None = None
    control: list[Tensor] | None = None

    def down(self) -> Sequence[Tensor]:
        zeros = [torch.zeros_like(w) for w in self.start.weights]
        return [*(self.momentum or zeros), *(self.control or zeros)]

    def expects(self, asked: Assignment) -> Sequence[Tensor]:
        return asked.weights

    def share(self, update: Update, staleness: int) -> tuple[float, float]:
        return 1.0, 1.0

    def absorb(self, extra: list[Tensor], updates: float) -> None:
        before = self.momentum or [torch.zeros_like(one) for one in extra]
        self.control = extra
        self.momentum = [
            self.beta * m + (1 - self.beta) * g for m, g in zip(before, extra, strict=True)
        ]

    def state(self):
        return [self.momentum, self.control]

    def restore(self, state):
        self.momentum, self.control = state

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        half = len(assignment.extra) // 2
        momentum, control = assignment.extra[:half], assignment.extra[half:]
        # η·((1 - β)·(g - g_x + c) + β·m) = η(1 - β)·(g - g_x + c + β/(1 - β)·m)
        fixed = [
            c + self.beta / (1 - self.beta) * m for c, m in zip(control, momentum, strict=True)
        ]
        step = replace(
            job,
            lr_factor=job.lr_factor * (1 - self.beta),
            correction=fixed,
            references=[Reference(job.weights, job.buffers)],
        )
        whole = replace(job, measures="gradient", first_step=0, steps=-(-len(job.indices) // BATCH))
        return [step, whole]

    def objective(self, batch: LocalBatch) -> Tensor:
        loss = batch.loss(batch.model(batch.inputs))
        if not batch.references:
            return loss
        (model,) = batch.references
        fixed = {k: v.detach().requires_grad_() for k, v in model.named_parameters()}
        there = batch.loss(functional_call(model, fixed, (batch.inputs,)))
        gradients = torch.autograd.grad(there, list(fixed.values()))
        pairs = zip(batch.model.parameters(), gradients, strict=True)
        return loss - sum((p * g).sum() for p, g in pairs)

    def answer(self, jobs, trained, assignment, memory):
        return trained[0].delta, trained[1].delta, None


class Moon(Algorithm):
    """Held near the global model's outputs, and away from those of its own before."""

    def jobs(
        self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
    ) -> list[ClientJob]:
        if memory is None:
            return [job]
        return [replace(job, references=[Reference(job.weights, []), Reference(memory, [])])]

    def objective(self, batch: LocalBatch) -> Tensor:
        outputs = batch.model(batch.inputs)
        loss = batch.loss(outputs)
        if not batch.references:
            return loss
        near, far = (model(batch.inputs) for model in batch.references)
        return loss + (outputs - near).square().mean() - 0.1 * (outputs - far).square().mean()

    def answer(self, jobs, trained, assignment, memory):
        own = [w + d for w, d in zip(jobs[0].weights, trained[0].delta, strict=True)]
        return trained[0].delta, (), own


# The same by hand: one vector, plain autograd, the rules as papers have them

Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Client:
    """A client's data, and how it trains."""

    number: int
    inputs: Tensor
    targets: Tensor
    model: nn.Module

    @property
    def n(self) -> int:
        return len(self.targets)

    @property
    def steps(self) -> int:
        return -(-self.n // BATCH)

    def outputs(self, w: Tensor, inputs: Tensor) -> Tensor:
        named = dict(self.model.named_parameters())
        pieces = w.split([p.numel() for p in named.values()])
        values = {
            key: piece.view_as(p) for (key, p), piece in zip(named.items(), pieces, strict=True)
        }
        return functional_call(self.model, values, (inputs,))

    def loss(self, w: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.outputs(w, inputs), targets)

    def gradient(self, w: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(self.loss(w, inputs, targets), w)[0]

    def whole(self, w: Tensor) -> tuple[float, Tensor]:
        """(loss, gradient) on all its data."""
        everything = w, self.inputs, self.targets
        return float(self.loss(*everything)), self.gradient(*everything)

    def trained(self, w: Tensor, round: int, direction: Gradient, lr: float = LR) -> Tensor:
        batches = Batches(self.n, BATCH, 0, self.number)
        for step in range(round * self.steps, (round + 1) * self.steps):
            own = batches.at(step)
            w = w - lr * direction(w, self.inputs[own], self.targets[own])
        return w


Round = Callable[[Tensor, int, list[Client], dict[str, Any]], Tensor]


def nova(w: Tensor, round: int, clients: list[Client], kept: dict[str, Any]) -> Tensor:
    n = sum(one.n for one in clients)
    moved = [(one, one.trained(w, round, one.gradient) - w) for one in clients]
    effective = sum(one.n / n * one.steps for one in clients)
    return w + effective * sum(one.n / n * d / one.steps for one, d in moved)


def fed_exp(w: Tensor, round: int, clients: list[Client], kept: dict[str, Any]) -> Tensor:
    moved = torch.stack([one.trained(w, round, one.gradient) - w for one in clients])
    mean = moved.mean(0)
    rate = moved.square().sum() / (2 * len(clients) * (mean.square().sum() + 1e-3))
    return w + max(1.0, float(rate)) * mean


def fed_dyn(w: Tensor, round: int, clients: list[Client], kept: dict[str, Any]) -> Tensor:
    alpha = FedDyn.alpha
    found = []
    for one in clients:
        own = kept.get(one.number, torch.zeros_like(w))

        def direction(
            v: Tensor, inputs: Tensor, targets: Tensor, one: Client = one, own: Tensor = own
        ) -> Tensor:
            return one.gradient(v, inputs, targets) - own + alpha * (v - w)

        new = one.trained(w, round, direction)
        kept[one.number] = own - alpha * (new - w)
        found.append(new)
    kept["h"] = kept.get("h", torch.zeros_like(w)) - alpha / len(clients) * sum(
        new - w for new in found
    )
    return sum(found) / len(found) - kept["h"] / alpha


def q_ffl(w: Tensor, round: int, clients: list[Client], kept: dict[str, Any]) -> Tensor:
    q, scale = QFFL.q, QFFL.scale
    total, h = torch.zeros_like(w), 0.0
    for one in clients:
        loss, _ = one.whole(w)
        change = scale * (w - one.trained(w, round, one.gradient))
        total += loss**q * change
        h += q * loss ** (q - 1) * float(change.square().sum()) + scale * loss**q
    return w - total / h


def mime(w: Tensor, round: int, clients: list[Client], kept: dict[str, Any]) -> Tensor:
    zero = torch.zeros_like(w)
    m, c, beta = kept.get("m", zero), kept.get("c", zero), Mime.beta
    found = []
    for one in clients:

        def direction(v: Tensor, inputs: Tensor, targets: Tensor, one: Client = one) -> Tensor:
            at = one.gradient(v, inputs, targets) - one.gradient(w, inputs, targets) + c
            return (1 - beta) * at + beta * m

        found.append(one.trained(w, round, direction))
    kept["c"] = sum(one.whole(w)[1] for one in clients) / len(clients)
    kept["m"] = beta * m + (1 - beta) * kept["c"]
    return sum(found) / len(found)


def moon(w: Tensor, round: int, clients: list[Client], kept: dict[str, Any]) -> Tensor:
    n = sum(one.n for one in clients)
    new = torch.zeros_like(w)
    for one in clients:
        before = kept.get(one.number)

        def direction(
            v: Tensor,
            inputs: Tensor,
            targets: Tensor,
            one: Client = one,
            before: Tensor | None = before,
        ) -> Tensor:
            v = v.detach().requires_grad_()
            loss = one.loss(v, inputs, targets)
            if before is not None:
                outputs = one.outputs(v, inputs)
                loss = loss + (outputs - one.outputs(w, inputs).detach()).square().mean()
                loss = loss - 0.1 * (outputs - one.outputs(before, inputs).detach()).square().mean()
            return torch.autograd.grad(loss, v)[0]

        kept[one.number] = one.trained(w, round, direction)
        new += one.n / n * kept[one.number]
    return new


RULES: dict[type[Algorithm], Round] = {
    Nova: nova,
    FedExP: fed_exp,
    FedDyn: fed_dyn,
    QFFL: q_ffl,
    Mime: mime,
    Moon: moon,
}


def by_hand(rule: Round) -> Tensor:
    task = small_task(lr=LR)
    model = seeded_model(task, 0)
    w = nn.utils.parameters_to_vector(model.parameters()).detach()
    parts = of(Nova).divide(task, 0)
    clients = [Client(number, *task.train.batch(parts[number]), model) for number in range(CLIENTS)]
    kept: dict[str, Any] = {}
    for round in range(ROUNDS):
        w = rule(w, round, clients, kept)
    return w


def run(
    hooks: type[Algorithm], rounds: int = ROUNDS, engine: str = "loop", **where: Any
) -> dure.Run:
    world = dure.Simulated(engine=engine, processes=2)
    stop = dure.Stop(rounds=rounds)
    return dure.train(small_task(lr=LR), of(hooks), world, stop, **where)


@pytest.mark.parametrize("engine", ["loop", "batched", "loop-processes"])
@pytest.mark.parametrize("hooks", RULES)
def test_a_published_algorithm_computes_what_its_paper_says(hooks, engine) -> None:
    if engine == "batched" and hooks in (Mime, Moon):
        with pytest.raises(ValueError, match=r"batched cannot compute .* objective of its own"):
            run(hooks, engine=engine)
        return
    if engine == "loop-processes" and hooks not in (Mime, QFFL):
        pytest.skip("what travels to processes is in the two others")
    torch.testing.assert_close(
        weights_of(run(hooks, engine=engine)), by_hand(RULES[hooks]), rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize("hooks", [FedDyn, Mime, Moon])
def test_it_goes_on_with_the_same_bits(hooks, tmp_path: Path) -> None:
    run(hooks, rounds=1, out=tmp_path / "run")
    again = {"task": small_task(lr=LR), "strategy": of(hooks)}
    resumed = dure.resume(tmp_path / "run", stop=dure.Stop(rounds=ROUNDS), **again)
    assert same_bits(resumed, run(hooks))


def test_the_strategys_server_optimizer_goes_on_from_the_step() -> None:
    class Plain(Algorithm):
        def step(self, weights, mean, updates):
            return [w + d for w, d in zip(weights, mean, strict=True)]

    stop = dure.Stop(rounds=ROUNDS)
    for kind in (dure.FedAvgM, dure.FedAdam):
        settings = {"clients": CLIENTS, "batch_size": BATCH, "partition": "quantity-skew:1"}
        theirs = dure.train(small_task(), kind(**settings), stop=stop)
        ours = dure.train(small_task(), of(Plain, kind), stop=stop)
        torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-12)


def test_what_a_step_changes_in_place_is_its_own() -> None:
    class InPlace(Algorithm):
        def step(self, weights, mean, updates):
            for w, d in zip(weights, mean, strict=True):
                w += d
                d.zero_()
            self.mine = list(weights)
            return weights

        def absorb(self, extra, updates):
            for one in self.mine:
                one.fill_(7.0)

    assert same_bits(run(InPlace), run(Algorithm))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda w, d, u: d[0], "returns a Tensor, but has to return a list of tensors"),
        (lambda w, d, u: [w[0][1:]], r"float64 \[214\], but the model has torch.float64 \[215\]"),
        (lambda w, d, u: [w[0].float()], "returns weights of torch.float32"),
        (lambda w, d, u: [w[0] / 0], "returns weights that are not finite"),
        (lambda w, d, u: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_step_that_cannot_be_is_told_with_its_round(step, message) -> None:
    class Wrong(Algorithm):
        def step(self, weights, mean, updates):
            return step(weights, mean, updates)

    with pytest.raises(WorkerFailedError, match=f"server failed in round 1: .*{message}"):
        run(Wrong)


def test_an_objective_that_is_no_number_is_told_with_its_client() -> None:
    class Wrong(Algorithm):
        def objective(self, batch):
            return batch.model(batch.inputs)

    message = (
        r"client \d failed in round 1: .*the objective is \[\d, 3\], but has to be a tensor of"
    )
    with pytest.raises(WorkerFailedError, match=message):
        run(Wrong)


@pytest.mark.parametrize(
    ("hooks", "kind", "settings", "message"),
    [
        (
            Nova,
            Own,
            {"privacy": "secure-aggregation"},
            "step of Nova of own needs single updates",
        ),
        (Nova, Own, {"privacy": "user-level:1:1"}, "step of Nova of own needs single updates"),
        (Moon, Own, {"privacy": "dp-sgd:1:1"}, "Moon of own has its own objective"),
        (Moon, dure.PerFedAvg, {}, "the algorithm has its own objective: use fed-avg"),
    ],
)
def test_hooks_that_do_not_go_together_with_something_are_refused(
    hooks, kind, settings, message
) -> None:
    with pytest.raises((ValueError, WorkerFailedError), match=message):
        dure.train(small_task(), of(hooks, kind, **settings), stop=dure.Stop(rounds=1))


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_job_that_measures_moves_nothing(what, engine) -> None:
    """Whatever the optimizer is, and however many steps: the mean over all examples."""
    found: list[tuple[int, float, Tensor]] = []

    class Measures(Algorithm):
        def jobs(
            self, job: ClientJob, assignment: Assignment, memory: ClientMemory | None
        ) -> list[ClientJob]:
            return [job, replace(job, measures=what, mu=3.0, lr_factor=0.5)]

        def answer(self, jobs, trained: list[JobResult], assignment, memory):
            assert trained[1].samples == len(jobs[1].indices)
            found.append((jobs[0].client, trained[1].loss, trained[1].delta[0]))
            return trained[0].delta, (), None

    task = small_task(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1))
    dure.train(task, of(Measures), dure.Simulated(engine=engine), dure.Stop(rounds=1))
    model = seeded_model(task, 0)
    w = nn.utils.parameters_to_vector(model.parameters()).detach()
    parts = of(Measures).divide(task, 0)
    assert len(found) == CLIENTS
    for number, loss, gradient in found:
        right = Client(number, *task.train.batch(parts[number]), model).whole(w)
        assert loss == pytest.approx(right[0], rel=1e-12)
        wanted = right[1] if what == "gradient" else torch.zeros_like(w)
        torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-13)


# The number of steps


@pytest.mark.parametrize(("steps", "fits"), [(0, False), (1, True), (10, True), (11, False)])
def test_an_update_has_a_number_of_steps_that_can_be(steps, fits) -> None:
    weights = [torch.zeros(3)]
    asked = Assignment(1, 2, 0, 0, weights, (), 12)
    update = Update(1, 2, 0, 5, 10, 0.5, weights, (), steps=steps)
    reason = invalid_reason(update, asked, extra=(), examples=5, most_counted=1.0, finite=True)
    assert reason == (None if fits else f"it says that 10 examples made {steps} steps")


@pytest.mark.parametrize(("said", "samples", "steps"), [(7, 10, 7), (0, 10, 4), (0, 3, 3)])
def test_a_client_that_does_not_say_its_steps_has_made_those_of_the_strategy(
    said, samples, steps
) -> None:
    federation = FederationSpec(
        2, 0, ModelLayout([[]], ()), None, steps=lambda examples: examples - 1
    )
    sending = ModelStreams(federation, None, None, None)
    failed = "its loss became not finite"
    reserve = UploadRequest(1, 0, "", 5, samples, 0.5, failure=failed, steps=said)
    asked = Assignment(1, 2, 0, 0, (), (), 0)
    assert sending.update(reserve, asked, None).steps == steps


def test_fed_buff_steps_along_its_buffer() -> None:
    seen: list[int] = []

    class Counts(Algorithm):
        def step(self, weights, mean, updates):
            seen.append(len(updates))
            return [w + d for w, d in zip(weights, mean, strict=True)]

    settings = {"clients": 6, "fraction": 0.5, "buffer": 2, "partition": "iid"}
    made = of(Counts, dure.FedBuff, **settings)
    dure.train(small_task(), made, stop=dure.Stop(rounds=3))
    assert seen == [2, 2, 2]


# Selection by loss


@dataclass(frozen=True)
class Largest(Selection):
    """Those of all clients with the largest losses, now or as they were told last."""

    name: ClassVar[str] = "largest"
    asks: ClassVar[bool] = True

    def ranked(self, seed, round, attempt, sizes, losses):
        clients = range(len(sizes))
        return sorted(clients, key=losses.now(clients).__getitem__, reverse=True)


@dataclass(frozen=True)
class LargestLast(Selection):
    name: ClassVar[str] = "largest-last"

    def ranked(self, seed, round, attempt, sizes, losses):
        told = [losses.last(client) for client in range(len(sizes))]
        known = {client: loss for client, loss in enumerate(told) if loss is not None}
        return sorted(known, key=known.__getitem__, reverse=True)[:2]


def asked(run: dure.Run) -> list[list[int]]:
    """The clients of each round, by the flights of the report."""
    rounds: dict[int, list[int]] = {}
    for flight in run.summary["facts"][0]["flights"]:
        rounds.setdefault(flight[1], []).append(flight[0])
    return [sorted(rounds[round]) for round in sorted(rounds)]


def test_clients_with_the_largest_losses_now_are_asked() -> None:
    strategy = dure.FedAvg(clients=6, fraction=0.34, selection=Largest())
    task = small_task()
    one = dure.train(task, strategy, stop=dure.Stop(rounds=1))
    model = seeded_model(task, 0)
    losses = [
        float(F.cross_entropy(model(task.train.inputs[part]), task.train.targets[part]))
        for part in strategy.divide(task, 0)
    ]
    largest = sorted(range(6), key=losses.__getitem__, reverse=True)[:2]
    assert asked(one) == [sorted(largest)]
    # Six have been sent the model for their loss, and two of them again to train.
    nbytes = 215 * 8
    server = one.summary["per_worker"][0]
    assert server["bytes_sent"] == (6 + 2) * nbytes
    assert server["bytes_received"] == 6 * 8 + 2 * nbytes


def test_losses_that_were_told_last_are_known_after_a_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 6, "fraction": 0.34, "selection": LargestLast()}
    stop = dure.Stop(rounds=5)
    whole = dure.train(small_task(), dure.FedAvg(**settings), stop=stop)
    # In the second round those of the first are the only ones that have told a loss.
    first, second, *_ = asked(whole)
    assert first == second
    dure.train(
        small_task(), dure.FedAvg(**settings), stop=dure.Stop(rounds=1), out=tmp_path / "run"
    )
    again = {"task": small_task(), "strategy": dure.FedAvg(**settings)}
    resumed = dure.resume(tmp_path / "run", stop=stop, **again)
    assert same_bits(resumed, whole)


def test_a_selection_of_ones_own_is_named_on_the_command_line(tmp_path: Path) -> None:
    from dure.federated.server import sampling

    file = tmp_path / "my_rules.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from dure.federated.server.sampling import Uniform\n"
        "@dataclass(frozen=True)\n"
        "class Odd(Uniform):\n"
        "    step: int = 2\n"
        "    def ranked(self, seed, round, attempt, sizes, losses):\n"
        "        return range(1, len(sizes), self.step)\n"
    )
    text = f"{file}:Odd:1.0:inf:1:3"
    selection = sampling.parse(text)
    assert str(selection) == text
    one = dure.train(
        small_task(),
        dure.FedAvg(clients=8, fraction=0.25, selection=text),
        stop=dure.Stop(rounds=2),
    )
    assert asked(one) == [[1, 4], [1, 4]]


@pytest.mark.parametrize("ranked", [[0, 0], [9], [-1]])
def test_a_ranking_of_clients_that_there_are_not_is_refused(ranked) -> None:
    @dataclass(frozen=True)
    class Wrong(Selection):
        name: ClassVar[str] = "wrong"

        def ranked(self, seed, round, attempt, sizes, losses):
            return ranked

    with pytest.raises(
        WorkerFailedError,
        match=re.escape(f"ranks {ranked}, but it has to rank each of the clients 0 to 5"),
    ):
        dure.train(
            small_task(), dure.FedAvg(clients=6, selection=Wrong()), stop=dure.Stop(rounds=1)
        )


class Tossed(LargestLast, PerClientPoisson):
    """Coins, which no loss changes."""


@pytest.mark.parametrize(
    ("selection", "settings", "world", "message"),
    [
        (Tossed(), {}, {}, "draws each client independently of its loss"),
        (LargestLast(), {"privacy": "secure-aggregation"}, {}, "needs the losses of single"),
        (Largest(), {"privacy": "dp-sgd:1:1"}, {}, "asks clients for losses, which have no noise"),
        (Largest(), {}, {"transfer_budget": "1MB"}, "sends additional models to get losses"),
    ],
)
def test_losses_are_not_looked_at_where_they_are_kept(selection, settings, world, message) -> None:
    strategy = dure.FedAvg(clients=6, selection=selection, **settings)
    with pytest.raises(ValueError, match=message):
        dure.train(small_task(), strategy, dure.Simulated(**world), dure.Stop(rounds=1))


def test_a_selection_that_asks_is_refused_over_a_network(tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=6, selection=Largest())
    with pytest.raises(Exception, match="which only simulations support"):
        dure.serve(small_task(), strategy, dure.Stop(rounds=1), out=tmp_path / "run", port=0)

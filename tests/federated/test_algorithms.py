"""What each algorithm promises beyond FedAvg."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.federated.algorithm import Start
from dure.federated.cohort.job import Job
from dure.federated.cohort.meta import MetaEngine
from dure.federated.fed_async import staleness_weight
from dure.federated.fed_per import PersonalLayers
from dure.federated.federated import Federated, FederatedLearner
from dure.federated.server_optimizer import ServerOptimizer
from dure.flat import FlatParameters
from dure.strategy import Place
from small import network, small_task


def train(strategy: Federated, rounds: int = 3, task: dure.Task | None = None, **world: Any) -> dure.Run:
    return dure.train(task or small_task(), strategy, dure.Simulated(engine="loop", **world), dure.Stop(rounds=rounds))


def learner(strategy: Federated, rounds: int, task: dure.Task | None = None) -> FederatedLearner:
    """A learner after so many rounds, to look into."""
    kept: list[FederatedLearner] = []

    def program(place: Place) -> None:
        one = strategy.learner(task or small_task(), place, 0)
        assert isinstance(one, FederatedLearner)
        for _ in range(rounds):
            one.advance(0)
        kept.append(one)

    dure.Simulated(engine="loop").run(program, lambda event: None)
    return kept[0]


# SCAFFOLD


@pytest.mark.parametrize("fraction", [0.2, 0.6, 1.0])
def test_the_server_s_control_is_the_mean_of_all_clients_controls(fraction: float) -> None:
    one = learner(dure.Scaffold(clients=5, fraction=fraction, batch_size=4, partition="quantity-skew:0.5"), 6)
    (control,) = one.algorithm.state()
    total = sum((memory[0] for memory in one.clients.memories.values()), torch.zeros_like(control))
    assert float((control - total / 5).abs().max()) < 1e-12
    assert float(control.abs().max()) > 1e-3


def test_a_client_that_does_not_take_part_keeps_its_control() -> None:
    one = learner(dure.Scaffold(clients=5, fraction=0.2, batch_size=4), 1)
    (asked,) = one.clients.memories
    before = one.clients.memories[asked][0].clone()
    while asked not in one.log.turns or one.log.turns[asked] < 2:
        others = {client: memory[0].clone() for client, memory in one.clients.memories.items()}
        one.advance(0)
        changed = [c for c, value in others.items() if not torch.equal(value, one.clients.memories[c][0])]
        assert len(changed) <= 1
    assert not torch.equal(before, one.clients.memories[asked][0])


class Point(nn.Module):
    """A single number, moved by a quadratic loss: curvature and minimum differ from client to client."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * (self.at - inputs[:, 1:]) ** 2 / 2


def quadratics() -> tuple[dure.Task, float]:
    """Two clients with curvatures 1 and 10 and minima 1 and -1; where their sum is smallest."""
    data = torch.tensor([[1.0, 1.0], [10.0, -1.0]], dtype=torch.float64)
    task = dure.Task(
        *(Point, lambda outputs, targets: outputs.mean(), dure.Examples(data, torch.zeros(2), keys=["a", "b"]), None),
        partial(torch.optim.SGD, lr=0.05),
        metrics={},
    )
    return task, (1 * 1 + 10 * -1) / 11


@pytest.mark.parametrize(("strategy", "arrives"), [(dure.Scaffold, True), (dure.FedAvg, False)])
def test_with_unlike_clients_and_many_local_steps_only_scaffold_arrives(strategy: Any, arrives: bool) -> None:
    task, best = quadratics()
    run = train(strategy(clients=None, partition="natural-key", local_steps=20, batch_size=None), 200, task)
    assert (abs(float(run.model.at.detach()) - best) < 1e-6) == arrives


def test_scaffold_sends_twice_as_much() -> None:
    plain, controlled = (train(kind(clients=4, batch_size=4)) for kind in (dure.FedAvg, dure.Scaffold))
    assert controlled.summary["bytes_sent"] == 2 * plain.summary["bytes_sent"]


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam])
def test_scaffold_refuses_what_option_ii_is_wrong_for(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="scaffold needs clients with plain SGD"):
        train(dure.Scaffold(clients=2), task=small_task(optimizer=optimizer))


# FedProx


@settings(max_examples=8)
@given(st.floats(0.01, 2.0), st.floats(0.5, 3.0), st.floats(-2, 2))
def test_many_proximal_steps_on_a_quadratic_find_its_closed_form(mu: float, curvature: float, minimum: float) -> None:
    data = torch.tensor([[curvature, minimum]], dtype=torch.float64)
    task = dure.Task(
        *(Point, lambda outputs, targets: outputs.mean(), (data, torch.zeros(1)), None),
        partial(torch.optim.SGD, lr=0.3),
        metrics={},
    )
    run = train(dure.FedProx(clients=1, local_steps=160, batch_size=None, mu=mu), 1, task)
    assert float(run.model.at.detach()) == pytest.approx(curvature * minimum / (curvature + mu), abs=1e-9)


# Server optimizers


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6), st.sampled_from(["adagrad", "adam", "yogi"]))
def test_adaptive_steps_are_those_of_a_scalar_by_hand(deltas: list[float], rule: Any) -> None:
    one = ServerOptimizer(rule, 0.1, 0.9, 0.99, 1e-2)
    weights = [torch.zeros(1, dtype=torch.float64)]
    state = one.start(weights)
    x, m, v = 0.0, 0.0, 1e-4
    for delta in deltas:
        weights, state = one.step(weights, [torch.tensor([delta], dtype=torch.float64)], state)
        m = 0.9 * m + 0.1 * delta
        square = delta * delta
        if rule == "adagrad":
            v += square
        elif rule == "adam":
            v = 0.99 * v + 0.01 * square
        else:
            v -= 0.01 * square * math.copysign(1, v - square) * (v != square)
        x += 0.1 * m / (math.sqrt(v) + 1e-2)
    assert float(weights[0]) == pytest.approx(x, rel=1e-12, abs=1e-15)


def test_a_constant_update_makes_adam_step_by_its_rate() -> None:
    one = ServerOptimizer("adam", 0.1, 0.9, 0.99, 1e-9)
    weights = [torch.zeros(2, dtype=torch.float64)]
    state = one.start(weights)
    for _ in range(3000):
        before = weights[0]
        weights, state = one.step(weights, [torch.tensor([3.0, -0.2], dtype=torch.float64)], state)
    assert torch.allclose(weights[0] - before, torch.tensor([0.1, -0.1], dtype=torch.float64), atol=1e-8)


def test_momentum_on_the_server_adds_up() -> None:
    one = ServerOptimizer("sgd", 0.5, 0.9)
    weights, delta = [torch.zeros(1)], [torch.ones(1)]
    state = one.start(weights)
    for expected in (0.5, 0.5 + 0.5 * 1.9, 0.5 + 0.5 * 1.9 + 0.5 * 2.71):
        weights, state = one.step(weights, delta, state)
        assert float(weights[0]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        (dure.FedAvgM(beta1=1.0), "beta1 is 1.0, but it is in"),
        (dure.FedAdam(beta2=-0.1), "beta2 is -0.1"),
        (dure.FedYogi(tau=0.0), "tau is 0.0, but it keeps from dividing by zero"),
        (dure.FedAdagrad(server_lr=0.0), "server_lr is 0.0, but the model has to move"),
        (dure.FedProx(mu=-1.0), "mu is -1.0, but it is 0 or more"),
        (dure.FedAsync(alpha=1.5), "alpha is 1.5, but a share is in"),
        (dure.FedAsync(selection="weighted"), "selection weighted is for rounds, and fed-async has none"),
        (dure.FedBuff(buffer=0), "buffer is 0, but a step takes at least one update"),
        (dure.FedSGD(local_epochs=2), "fed-sgd is one step over all of a client's data"),
        (dure.FedPer(personal_layers=3), "personal_layers is 3, but of the model's 3 layers some are shared"),
        (dure.Ditto(lam=float("nan")), "lam is nan, but it is 0 or more"),
        (dure.PerFedAvg(alpha=-1.0), "alpha is -1.0, but a step is 0 or more"),
        (dure.ByzantineGD(aggregate="median"), "byzantine has its own rule"),
        (dure.ByzantineGD(clients=3, groups=5), "geometric-median-of-means:5"),
        (dure.FedAvg(held_out=1.0), "held_out is 1.0"),
        (dure.FedAvg(fine_tune=2), "fine_tune measures clients' own models"),
        (dure.FedAvg(clients=4, aggregate="krum:2"), "at least 7 updates"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_makes_no_sense_is_refused_in_one_line(strategy: Federated, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        train(strategy)
    assert "\n" not in str(caught.value)


# FedAsync


@given(st.integers(0, 50), st.floats(0, 10), st.floats(0, 10))
def test_weights_of_staleness_begin_at_one_and_never_rise(staleness: int, a: float, b: float) -> None:
    for weighting in ("constant", "polynomial", "hinge"):
        weights = [staleness_weight(weighting, s, a, b) for s in range(staleness + 2)]  # type: ignore[arg-type]
        assert weights[0] == 1.0
        assert weights == sorted(weights, reverse=True)


def test_the_hinge_is_continuous_and_has_its_plus_one_outside() -> None:
    assert staleness_weight("hinge", 4, 10, 4) == 1.0
    assert staleness_weight("hinge", 6, 10, 4) == pytest.approx(1 / 21)
    assert staleness_weight("polynomial", 3, 0.5, 0) == pytest.approx(0.5)


# Personalisation


def test_personal_layers_never_travel() -> None:
    whole, shared = train(dure.FedAvg(clients=4)), train(dure.FedPer(clients=4, personal_layers=1, held_out=0.0))
    last = sum(p.numel() for p in list(whole.model.parameters())[-2:]) * 8
    messages = 2 * 3 * 4
    assert whole.summary["bytes_sent"] - shared.summary["bytes_sent"] == messages * last


def test_parts_of_a_model_join_to_what_they_were() -> None:
    model = network()
    weights = FlatParameters(model).copy()
    one = PersonalLayers(Start(model, weights, 4, 0.1), 2)
    joined = one.whole(one.shared(weights), {})
    assert torch.equal(joined[0], weights[0])
    assert len(one.shared(weights)[0]) == 6 * 12 + 12


def test_own_models_are_worth_more_where_clients_are_unlike() -> None:
    data = dure.load_task("digits")
    for strategy in (
        dure.FedPer(clients=10, partition="label-shards:2", local_epochs=2),
        dure.Ditto(clients=10, partition="label-shards:2", local_epochs=2),
        dure.FedAvg(clients=10, partition="label-shards:2", local_epochs=2, held_out=0.2, fine_tune=2),
        dure.PerFedAvg(clients=10, partition="label-shards:2", local_epochs=2, alpha=0.05, fine_tune=2),
    ):
        run = dure.train(data, strategy, dure.Simulated(engine="loop"), dure.Stop(rounds=4), evaluate_every=4)
        measured = run.history.evaluations[-1].metrics
        assert (measured["personal_accuracy"] or 0) > (measured["client_accuracy"] or 0), strategy.label
        assert (measured["client_accuracy_p10"] or 0) <= (measured["client_accuracy"] or 0)


def ditto(lam: float) -> FederatedLearner:
    task = small_task(lr=0.05)
    return learner(dure.Ditto(clients=3, batch_size=None, local_steps=5, lam=lam, held_out=0.0), 4, task)


def test_ditto_with_no_pull_trains_alone_and_with_a_strong_one_stays_near_the_global_model() -> None:
    free, held = ditto(0.0), ditto(15.0)
    task, parts = small_task(lr=0.05), free.clients.parts
    for client in range(3):
        inputs, targets = task.train.batch(parts[client])
        alone = dure.Task(network, F.cross_entropy, (inputs, targets), None, task.optimizer)
        run = dure.train(alone, dure.SingleWorker(None), stop=dure.Stop(steps=20))
        flat = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
        assert float((free.clients.memories[client][0] - flat).abs().max()) < 1e-12
        near = [
            float((one.clients.memories[client][0] - one.coordinator.model.weights[0]).norm()) for one in (free, held)
        ]
        assert near[1] < near[0]


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_the_hessian_free_gradient_is_autograd_s(alpha: float) -> None:
    task = small_task()
    model = network()
    start = FlatParameters(model).copy()
    engine = MetaEngine(task, model, task.train, None, 0, alpha, True)
    batches = [torch.arange(10), torch.arange(10, 25), torch.arange(25, 41)]
    _, (gradient,) = engine._meta_gradient(batches)

    def loss(flat: Tensor, batch: Tensor) -> Tensor:
        inputs, targets = task.train.batch(batch)
        pieces, at = {}, 0
        for name, parameter in model.named_parameters():
            pieces[name] = flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
        return F.cross_entropy(torch.func.functional_call(model, pieces, (inputs,)), targets)

    gradient_of = torch.func.grad(loss)
    adapted = start[0] - alpha * gradient_of(start[0], batches[0])
    outer = gradient_of(adapted, batches[1])
    _, curved = torch.func.jvp(lambda w: gradient_of(w, batches[2]), (start[0],), (outer,))
    assert torch.allclose(gradient, outer - alpha * curved, atol=1e-6)


def test_a_job_of_the_meta_engine_leaves_the_weights_it_was_given() -> None:
    task = small_task()
    engine = MetaEngine(task, network(), task.train, 5, 0, 0.1, False)
    weights = FlatParameters(network()).copy()
    before = weights[0].clone()
    (result,) = engine.train([Job(0, 0, torch.arange(20), weights, [], 0, 3)])
    assert torch.equal(weights[0], before)
    assert result.samples == 15
    assert float(result.delta[0].abs().max()) > 0


def test_a_backdoor_reports_its_success_beside_the_accuracy() -> None:
    task = dure.load_task("digits")
    strategy = dure.FedAvg(clients=10, local_epochs=2)
    world = dure.Simulated(attack="backdoor:0:5", attackers=3, engine="loop")
    metrics = dure.train(task, strategy, world, dure.Stop(rounds=4), evaluate_every=4).history.evaluations[-1].metrics
    assert 0 <= (metrics["test_backdoor"] or 0) <= 1
    assert (metrics["test_backdoor"] or 0) > 0.3

"""What each algorithm promises beyond FedAvg."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.world import RankContext
from dure.errors import WorkerFailedError
from dure.federated.algorithm import AlgorithmInputs
from dure.federated.algorithms.fed_async import staleness_weight
from dure.federated.algorithms.fed_per import PersonalLayers
from dure.federated.client.clients import FederatedClients
from dure.federated.engines.job import ClientJob
from dure.federated.engines.meta import MetaEngine
from dure.federated.server.coordinator import Coordinator
from dure.federated.server.sampling import Weighted
from dure.federated.server.server import FederatedServer
from dure.federated.server.server_optimizer import ServerOptimizer
from dure.federated.strategy import Federated
from dure.protocol.messages import Update
from dure.tensors.flat import FlatParameters
from dure.worlds.simulated import FederationSimulation
from small import examples, largest_difference, network, same_bits, small_task

ENGINE = pytest.mark.parametrize("engine", ["loop", "batched"])


def train(
    strategy: Federated, rounds: int = 3, task: dure.Task | None = None, **world: Any
) -> dure.Run:
    conditions = dure.Simulated(**{"engine": "loop", **world})
    return dure.train(task or small_task(), strategy, conditions, dure.Stop(rounds=rounds))


def learner(
    strategy: Federated, rounds: int, task: dure.Task | None = None, **world: Any
) -> FederatedServer:
    """A learner after so many rounds, to look into."""
    kept: list[FederatedServer] = []

    def program(context: RankContext) -> None:
        one = strategy.learner(task or small_task(), context, 0)
        assert isinstance(one, FederatedServer)
        for _ in range(rounds):
            one.advance(0)
        kept.append(one)

    dure.Simulated(**{"engine": "loop", **world}).run(program, lambda event: None)
    return kept[0]


def clients_of(one: FederatedServer) -> FederatedClients:
    """The other half, which the simulation has."""
    assert isinstance(one.carrier, FederationSimulation)
    assert isinstance(one.carrier.clients, FederatedClients)
    return one.carrier.clients


def liars_of(one: FederatedServer) -> set[int]:
    """The malicious clients of its first round."""
    attackers = clients_of(one).attackers
    assert attackers is not None
    return set(attackers.of(0))


def by_hand(
    task: dure.Task,
    indices: Tensor,
    start: Tensor,
    steps: int,
    mu: float,
    lr: float,
    momentum: float,
    decay: float,
) -> Tensor:
    """A client's model, in one vector, after steps of SGD over all its data with the proximal
    term."""
    inputs, targets = task.train.batch(indices)
    model = task.model()
    w, velocity = start, torch.zeros_like(start)
    for _ in range(steps):
        nn.utils.vector_to_parameters(w, model.parameters())
        gradients = torch.autograd.grad(
            F.cross_entropy(model(inputs), targets), list(model.parameters())
        )
        gradient = nn.utils.parameters_to_vector(gradients) + mu * (w - start) + decay * w
        velocity = momentum * velocity + gradient
        w = w - lr * velocity
    return w


# All of them


def held_by(names: list[str]) -> dure.Task:
    """Examples in four unequal portions, the k-th of which client names[k] has."""
    data = examples(41)
    portions = torch.arange(4).repeat_interleave(torch.tensor([3, 8, 12, 18])).tolist()
    return small_task(
        train=dure.Examples(
            data.inputs, data.targets, keys=[names[portion] for portion in portions]
        )
    )


OWNERS: dict[str, Any] = {
    "clients": None,
    "partition": "natural-key",
    "batch_size": None,
    "local_steps": 3,
}


@ENGINE
@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(**OWNERS),
        dure.FedAvg(aggregate="median", **OWNERS),
        dure.FedProx(mu=0.3, equal_weights=True, **OWNERS),
        dure.FedAdam(server_lr=0.05, **OWNERS),
        dure.Scaffold(**OWNERS),
    ],
    ids=lambda strategy: f"{strategy.name} {strategy.aggregate}",
)
@settings(max_examples=5)
@given(st.permutations(["a", "b", "c", "d"]))
def test_it_does_not_matter_which_client_has_which_data(
    strategy: Any, engine: str, names: list[str]
) -> None:
    before, after = (
        train(strategy, task=held_by(owners), engine=engine) for owners in (list("abcd"), names)
    )
    assert largest_difference(before, after) < 1e-12


# SCAFFOLD


@pytest.mark.parametrize("fraction", [0.2, 0.6, 1.0])
def test_the_server_s_control_is_the_mean_of_all_clients_controls(fraction: float) -> None:
    one = learner(
        dure.Scaffold(clients=5, fraction=fraction, batch_size=4, partition="quantity-skew:0.5"), 6
    )
    (control,) = one.algorithm.state()
    total = sum(
        (memory[0] for memory in clients_of(one).memories.values()), torch.zeros_like(control)
    )
    assert float((control - total / 5).abs().max()) < 1e-12
    assert float(control.abs().max()) > 1e-3


def test_a_client_that_does_not_take_part_keeps_its_control() -> None:
    one = learner(dure.Scaffold(clients=5, fraction=0.2, batch_size=4), 1)
    (asked,) = clients_of(one).memories
    before = clients_of(one).memories[asked][0].clone()
    while asked not in one.log.turns or one.log.turns[asked] < 2:
        others = {client: memory[0].clone() for client, memory in clients_of(one).memories.items()}
        one.advance(0)
        changed = [
            c
            for c, value in others.items()
            if not torch.equal(value, clients_of(one).memories[c][0])
        ]
        assert len(changed) <= 1
    assert not torch.equal(before, clients_of(one).memories[asked][0])


class Point(nn.Module):
    """A single number, moved by a quadratic loss: curvature and minimum differ from client to
    client."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * (self.at - inputs[:, 1:]) ** 2 / 2


def quadratics() -> tuple[dure.Task, float]:
    """Two clients with curvatures 1 and 10 and minima 1 and -1; where their sum is smallest."""
    data = torch.tensor([[1.0, 1.0], [10.0, -1.0]], dtype=torch.float64)
    task = dure.Task(
        *(
            Point,
            lambda outputs, targets: outputs.mean(),
            dure.Examples(data, torch.zeros(2), keys=["a", "b"]),
            None,
        ),
        partial(torch.optim.SGD, lr=0.05),
        metrics={},
    )
    return task, (1 * 1 + 10 * -1) / 11


@pytest.mark.parametrize(("strategy", "arrives"), [(dure.Scaffold, True), (dure.FedAvg, False)])
def test_with_unlike_clients_and_many_local_steps_only_scaffold_arrives(
    strategy: Any, arrives: bool
) -> None:
    task, best = quadratics()
    run = train(
        strategy(clients=None, partition="natural-key", local_steps=20, batch_size=None), 60, task
    )
    assert (abs(float(run.model.at.detach()) - best) < 1e-6) == arrives


def test_scaffold_sends_twice_as_much() -> None:
    plain, controlled = (
        train(kind(clients=4, batch_size=4)) for kind in (dure.FedAvg, dure.Scaffold)
    )
    assert controlled.summary["bytes_sent"] == 2 * plain.summary["bytes_sent"]


def in_two_groups(parameters: Any, **second: Any) -> torch.optim.Optimizer:
    first, *rest = list(parameters)
    return torch.optim.SGD([{"params": [first]}, {"params": rest, **second}], lr=0.1)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1, maximize=True),
        torch.optim.Adam,
        partial(in_two_groups, lr=0.01),
        partial(in_two_groups, momentum=0.9),
        partial(in_two_groups, weight_decay=0.1),
    ],
)
def test_scaffold_refuses_what_option_ii_is_wrong_for(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="scaffold needs clients with plain SGD"):
        train(dure.Scaffold(clients=2), task=small_task(optimizer=optimizer))


def test_scaffold_takes_groups_of_one_rate() -> None:
    plain, grouped = (
        train(dure.Scaffold(clients=2), task=small_task(optimizer=optimizer))
        for optimizer in (partial(torch.optim.SGD, lr=0.1), in_two_groups)
    )
    assert largest_difference(plain, grouped) < 1e-12


@pytest.mark.parametrize("by_examples", [False, True])
def test_controls_count_alike_however_updates_count(by_examples: bool) -> None:
    strategy = dure.Scaffold(
        clients=5, batch_size=4, partition="quantity-skew:0.5", by_examples=by_examples
    )
    one = learner(strategy, 4)
    (control,) = one.algorithm.state()
    total = torch.stack([memory[0] for memory in clients_of(one).memories.values()]).sum(0)
    assert float((control - total / 5).abs().max()) < 1e-12


@pytest.mark.parametrize(("attack", "sent"), [("sign-flip:3", -3.0), ("large:1e9", None)])
def test_liars_forge_their_controls_too(
    monkeypatch: pytest.MonkeyPatch, attack: str, sent: float | None
) -> None:
    arrived: list[Update] = []
    fold = Coordinator.fold
    monkeypatch.setattr(
        Coordinator,
        "fold",
        lambda self, update, **known: arrived.append(update) or fold(self, update),
    )
    strategy = dure.Scaffold(clients=5, batch_size=4)
    honest, honestly = learner(strategy, 1), list(arrived)
    arrived.clear()
    lying = learner(strategy, 1, attack=attack, attackers=2)
    liars = liars_of(lying)
    assert len(liars) == 2
    for mine, theirs in zip(arrived, honestly, strict=True):
        for part in ("delta", "extra"):
            (got,), (was,) = getattr(mine, part), getattr(theirs, part)
            expected = (
                was
                if mine.client not in liars
                else torch.full_like(was, 1e9)
                if sent is None
                else sent * was
            )
            assert torch.equal(got, expected), part
    assert not torch.equal(lying.algorithm.state()[0], honest.algorithm.state()[0])


# FedProx


@settings(max_examples=8)
@given(st.floats(0.01, 2.0), st.floats(0.5, 3.0), st.floats(-2, 2))
def test_many_proximal_steps_on_a_quadratic_find_its_closed_form(
    mu: float, curvature: float, minimum: float
) -> None:
    data = torch.tensor([[curvature, minimum]], dtype=torch.float64)
    task = dure.Task(
        *(Point, lambda outputs, targets: outputs.mean(), (data, torch.zeros(1)), None),
        partial(torch.optim.SGD, lr=0.3),
        metrics={},
    )
    run = train(dure.FedProx(clients=1, local_steps=160, batch_size=None, mu=mu), 1, task)
    assert float(run.model.at.detach()) == pytest.approx(
        curvature * minimum / (curvature + mu), abs=1e-9
    )


@ENGINE
@settings(max_examples=10)
@given(st.floats(0, 2), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.0, 0.9]))
def test_the_proximal_gradient_is_beside_weight_decay_and_under_momentum(
    engine: str, mu: float, decay: float, momentum: float
) -> None:
    task = small_task(
        optimizer=partial(torch.optim.SGD, lr=0.2, momentum=momentum, weight_decay=decay)
    )
    expected = nn.utils.parameters_to_vector(seeded_model(task, 0).parameters()).detach()
    for _ in range(
        2
    ):  # what a client is held near moves on with the rounds, and its momentum begins anew
        expected = by_hand(
            task, torch.arange(len(task.train)), expected, 2, mu, 0.2, momentum, decay
        )
    strategy = dure.FedProx(clients=1, local_steps=2, batch_size=None, mu=mu)
    run = train(strategy, 2, task, engine=engine)
    assert torch.allclose(
        nn.utils.parameters_to_vector(run.model.parameters()), expected, rtol=0, atol=1e-12
    )


UNEQUAL: dict[str, Any] = {"clients": 5, "partition": "quantity-skew:0.5", "batch_size": None}


@ENGINE
@pytest.mark.parametrize("steps", [1, 3])
def test_chosen_by_their_sizes_clients_count_alike(engine: str, steps: int) -> None:
    strategy = dure.FedProx(
        fraction=0.6, selection="weighted", equal_weights=True, mu=0.3, local_steps=steps, **UNEQUAL
    )
    one = learner(strategy, 0, engine=engine)
    for number in range(3):
        before = one.coordinator.model.weights[0].clone()
        turns = dict(one.log.turns)
        one.advance(0)
        asked = [client for client, count in one.log.turns.items() if count > turns.get(client, 0)]
        order = Weighted().order(0, number, 0, clients_of(one).data.sizes)
        assert set(asked) == {order(0), order(1), order(2)}
        parts = [clients_of(one).data.parts[client] for client in asked]
        models = torch.stack(
            [by_hand(one.task, part, before, steps, 0.3, 0.3, 0.0, 0.0) for part in parts]
        )
        after = one.coordinator.model.weights[0]
        assert float((after - models.mean(0)).abs().max()) < 1e-12
        weights = torch.tensor([len(part) for part in parts], dtype=torch.float64)
        assert float((after - weights @ models / weights.sum()).abs().max()) > 1e-4, (
            "by examples it is another model"
        )


def test_in_a_run_clients_take_part_as_often_as_they_have_examples() -> None:
    strategy = dure.FedProx(
        fraction=0.2, selection="weighted", equal_weights=True, local_steps=1, **UNEQUAL
    )
    one, rounds = learner(strategy, 300), 300
    assert max(clients_of(one).data.sizes) > 3 * min(clients_of(one).data.sizes)
    for client, size in enumerate(clients_of(one).data.sizes):
        p = size / sum(clients_of(one).data.sizes)
        assert abs(one.log.turns[client] - rounds * p) < 4 * math.sqrt(rounds * p * (1 - p))


def straight() -> nn.Module:
    """A layer whose gradients by cross-entropy are at most the largest input, and 1 for a bias:
    those of logits are probabilities less ones or zeros."""
    return nn.Linear(6, 3).double()


def moved(mu: float, lr: float, engine: str, rounds: int = 1) -> float:
    """How far the model is from where it began, in the coordinate that moved farthest."""
    task = small_task(model=straight, lr=lr)
    strategy = dure.FedProx(
        clients=3, batch_size=4, local_epochs=3, mu=mu, partition="quantity-skew:0.5"
    )
    run = train(strategy, rounds, task, engine=engine)
    pairs = zip(run.model.parameters(), seeded_model(task, 0).parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


LARGEST = max(1.0, float(small_task().train.inputs.abs().max()))


@ENGINE
@settings(max_examples=10)
@given(st.floats(0, 6), st.floats(0.05, 1), st.integers(1, 2))
def test_a_pull_of_mu_lets_a_round_go_no_farther_than_a_gradient_over_mu(
    engine: str, power: float, share: float, rounds: int
) -> None:
    """w - w_t becomes (1 - lr·mu)·(w - w_t) - lr·g: with lr·mu <= 1 it never exceeds |g|/mu."""
    mu = 10**power
    assert moved(mu, share / mu, engine, rounds) <= rounds * LARGEST / mu + 1e-14


@ENGINE
def test_ten_times_the_pull_is_a_tenth_of_the_way(engine: str) -> None:
    ways = [moved(mu, 1 / mu, engine) for mu in (1e3, 1e4, 1e5, 1e6)]
    assert [one / other for one, other in pairwise(ways)] == pytest.approx([10] * 3, rel=1e-2)


# Server optimizers


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=6), st.sampled_from(["adagrad", "adam", "yogi"])
)
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
    assert torch.allclose(
        weights[0] - before, torch.tensor([0.1, -0.1], dtype=torch.float64), atol=1e-8
    )


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
        (dure.FedAvgM(beta1=1.0), "beta1 is 1.0, but it has to be in"),
        (dure.FedAdam(beta2=-0.1), "beta2 is -0.1"),
        (dure.FedYogi(tau=0.0), "tau is 0.0, but it has to be greater than 0"),
        (dure.FedAdagrad(server_lr=0.0), "server_lr is 0.0, but it has to be greater than 0"),
        (dure.FedProx(mu=-1.0), "mu is -1.0, but it has to be 0 or more"),
        (dure.FedAsync(alpha=1.5), "alpha is 1.5, but it has to be in"),
        (
            dure.FedAsync(selection="weighted"),
            "selection weighted is for rounds, but fed-async has no rounds",
        ),
        (dure.FedAsync(weighting="poly"), "there is no weighting 'poly'; there are: constant"),  # type: ignore[arg-type]
        (dure.FedAsync(a=float("nan")), "a is nan, which is not a number"),
        (dure.FedAsync(b=float("nan"), weighting="hinge"), "b is nan, which is not a number"),
        (dure.FedAsync(rho=float("inf")), "rho is inf, but it has to be 0 or more"),
        (dure.FedAvg(server_lr=float("inf")), "server_lr is inf, but it has to be greater than 0"),
        (dure.FedAdam(tau=float("inf")), "tau is inf, but it has to be greater than 0"),
        (dure.PerFedAvg(order="hessian_free"), "there is no order 'hessian_free', did you mean"),  # type: ignore[arg-type]
        (
            dure.ByzantineGD(local_epochs=5),
            "byzantine makes one step per round; for local epochs",
        ),
        (dure.ByzantineGD(local_steps=2), "byzantine makes one step per round"),
        (dure.ByzantineGD(batch_size=4, local_steps=3), "byzantine makes one step per round"),
        (
            dure.FedAvg(clients=None, partition="natural-key", aggregate="krum:2"),
            "at least 7 updates a round .* not 3",
        ),
        (
            dure.ByzantineGD(clients=None, partition="natural-key", groups=5),
            "geometric-median-of-means:5",
        ),
        (dure.FedBuff(buffer=0), "buffer is 0, but it has to be 1 or more"),
        (dure.FedBuff(clients=3, buffer=3001), "give a buffer of at most 3000"),
        (dure.FedSGD(local_epochs=2), "fed-sgd makes one step over all of a client's data"),
        (
            dure.FedPer(personal_layers=3),
            "personal_layers is 3, but the model has 3 layers, of which some have to be shared",
        ),
        (dure.Ditto(lam=float("nan")), "lam is nan, which is not a number"),
        (dure.PerFedAvg(alpha=-1.0), "alpha is -1.0, but it has to be 0 or more"),
        (dure.ByzantineGD(aggregate="median"), "byzantine has its own aggregation rule"),
        (dure.ByzantineGD(clients=3, groups=5), "geometric-median-of-means:5"),
        (dure.FedAvg(held_out=1.0), "held_out is 1.0"),
        (dure.FedAvg(fine_tune=2), "fine_tune evaluates clients' personalised models"),
        (dure.FedAvg(clients=4, aggregate="krum:2"), "at least 7 updates"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_makes_no_sense_is_refused_in_one_line(strategy: Federated, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        train(strategy)
    assert "\n" not in str(caught.value)


def test_a_buffer_that_the_epochs_of_a_run_never_fill_is_refused() -> None:
    task = small_task()
    with pytest.raises(ValueError, match="in 4 epochs 3 clients send about 6 updates"):
        dure.train(
            task, dure.FedBuff(clients=3, buffer=7, local_epochs=2), stop=dure.Stop(epochs=4)
        )
    dure.train(
        task,
        dure.FedBuff(clients=3, buffer=6, local_epochs=2, batch_size=4),
        stop=dure.Stop(epochs=4),
    )


# FedAsync


@given(st.integers(0, 50), st.floats(0, 10), st.floats(0, 10))
def test_weights_of_staleness_begin_at_one_and_never_rise(
    staleness: int, a: float, b: float
) -> None:
    for weighting in ("constant", "polynomial", "hinge"):
        weights = [staleness_weight(weighting, s, a, b) for s in range(staleness + 2)]  # type: ignore[arg-type]
        assert weights[0] == 1.0
        assert weights == sorted(weights, reverse=True)


def test_the_hinge_is_continuous_and_has_its_plus_one_outside() -> None:
    assert staleness_weight("hinge", 4, 10, 4) == 1.0
    assert staleness_weight("hinge", 6, 10, 4) == pytest.approx(1 / 21)
    assert staleness_weight("polynomial", 3, 0.5, 0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedBuff(clients=5, fraction=0.2, buffer=10, batch_size=4),
        dure.FedBuff(clients=3, fraction=1.0, buffer=9, batch_size=None),
        dure.FedAsync(clients=2, fraction=0.5, stale=6, batch_size=4),
    ],
    ids=lambda strategy: strategy.label,
)
def test_a_client_that_is_handed_a_model_again_goes_on_with_its_next_batches(
    monkeypatch: pytest.MonkeyPatch, strategy: Federated
) -> None:
    arrived: list[Update] = []
    fold = Coordinator.fold
    monkeypatch.setattr(
        Coordinator,
        "fold",
        lambda self, update, **known: arrived.append(update) or fold(self, update),
    )
    drops = small_task(
        model=lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 3)).double()
    )
    learner(strategy, 30 if strategy.name == "fed-async" else 4, drops, devices="lognormal:1.5")
    pairs = [(update.client, update.round) for update in arrived]
    assert len(set(pairs)) < len(pairs), "no client was handed the same model twice"
    assert len({update.delta[0].numpy().tobytes() for update in arrived}) == len(arrived)


# Byzantine gradient descent


def under_attack(strategy: Federated, attack: str | None) -> tuple[dure.Run, dict[str, Any]]:
    """Thirty rounds of twenty clients, of whom four lie, others in every round; the last
    evaluation."""
    lies = (
        {"attack": attack, "attackers": 4, "attackers_change": True} if attack is not None else {}
    )
    task = dure.load_task("digits", model="logistic", lr=2.0)
    world = dure.Simulated(engine="batched", **lies)  # type: ignore[arg-type]
    run = dure.train(task, strategy, world, dure.Stop(rounds=30), evaluate_every=30)
    return run, run.history.evaluations[-1].metrics


@pytest.mark.parametrize("attack", ["sign-flip:10", "gaussian:200"])
def test_liars_who_change_every_round_destroy_the_mean_and_not_the_median_of_means(
    attack: str,
) -> None:
    strategy = dure.ByzantineGD(clients=20, groups=10)
    (_, clean), (run, attacked) = under_attack(strategy, None), under_attack(strategy, attack)
    lies = [
        (number, client) for number, client, lie, *_ in run.summary["facts"][0]["updates"] if lie
    ]
    assert len(lies) == 4 * 30
    assert len({client for _, client in lies}) > 15
    assert clean["test_accuracy"] > 0.9
    assert attacked["test_accuracy"] > clean["test_accuracy"] - 0.02
    assert attacked["test_loss"] < 1.5 * clean["test_loss"]
    _, mean = under_attack(dure.FedSGD(clients=20), attack)
    assert not (mean["test_accuracy"] or 0) > 0.5


def test_a_little_is_sent_by_all_liars_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[Update] = []
    fold = Coordinator.fold
    monkeypatch.setattr(
        Coordinator,
        "fold",
        lambda self, update, **known: arrived.append(update) or fold(self, update),
    )
    strategy = dure.FedAvg(clients=7, batch_size=4)
    learner(strategy, 1)
    computed = {update.client: update.delta[0] for update in arrived}
    arrived.clear()
    liars = liars_of(learner(strategy, 1, attack="alie:1.5", attackers=3))
    honest = torch.stack([computed[client] for client in range(7) if client not in liars])
    assert len(arrived) == 7
    assert len(honest) == 4
    lie = honest.mean(0) - 1.5 * honest.std(0, correction=1)
    for update in arrived:
        expected = lie if update.client in liars else computed[update.client]
        assert torch.allclose(update.delta[0], expected, rtol=0, atol=1e-14), update.client


# Personalisation


def test_personal_layers_never_travel() -> None:
    whole, shared = (
        train(dure.FedAvg(clients=4)),
        train(dure.FedPer(clients=4, personal_layers=1, held_out=0.0)),
    )
    last = sum(p.numel() for p in list(whole.model.parameters())[-2:]) * 8
    messages = 2 * 3 * 4
    assert whole.summary["bytes_sent"] - shared.summary["bytes_sent"] == messages * last


def test_parts_of_a_model_join_to_what_they_were() -> None:
    model = network()
    weights = FlatParameters(model).copy()
    one = PersonalLayers(AlgorithmInputs(model, weights, 4, 0.1), 2)
    joined = one.whole(one.shared(weights), [])
    assert torch.equal(joined[0], weights[0])
    assert len(one.shared(weights)[0]) == 6 * 12 + 12


def test_own_models_are_worth_more_where_clients_are_unlike() -> None:
    data = dure.load_task("digits")
    for strategy in (
        dure.FedPer(clients=10, partition="label-shards:2", local_epochs=2),
        dure.Ditto(clients=10, partition="label-shards:2", local_epochs=2),
        dure.FedAvg(
            clients=10, partition="label-shards:2", local_epochs=2, held_out=0.2, fine_tune=2
        ),
        dure.PerFedAvg(
            clients=10, partition="label-shards:2", local_epochs=2, alpha=0.05, fine_tune=2
        ),
    ):
        run = dure.train(
            data, strategy, dure.Simulated(engine="loop"), dure.Stop(rounds=2), evaluate_every=2
        )
        measured = run.history.evaluations[-1].metrics
        assert (measured["personal_accuracy"] or 0) > (measured["client_accuracy"] or 0), (
            strategy.label
        )
        assert (measured["client_accuracy_p10"] or 0) <= (measured["client_accuracy"] or 0)


def ditto(lam: float) -> FederatedServer:
    task = small_task(lr=0.05)
    return learner(
        dure.Ditto(clients=3, batch_size=None, local_steps=5, lam=lam, held_out=0.0), 4, task
    )


def test_ditto_with_no_pull_trains_alone_and_with_a_strong_one_stays_near_the_global_model() -> (
    None
):
    free, held = ditto(0.0), ditto(15.0)
    task, parts = small_task(lr=0.05), clients_of(free).data.parts
    for client in range(3):
        inputs, targets = task.train.batch(parts[client])
        alone = dure.Task(network, F.cross_entropy, (inputs, targets), None, task.optimizer)
        run = dure.train(alone, dure.SingleWorker(None), stop=dure.Stop(steps=20))
        flat = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
        assert float((clients_of(free).memories[client][0] - flat).abs().max()) < 1e-12
        near = [
            float((clients_of(one).memories[client][0] - one.coordinator.model.weights[0]).norm())
            for one in (free, held)
        ]
        assert near[1] < near[0]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3)).double()


def unlike() -> dure.Task:
    """Four clients whose inputs have other means, and a model that learns these."""
    data = examples(80)
    owner = torch.arange(80) % 4
    inputs = data.inputs + 4.0 * owner[:, None] - 6
    train = dure.Examples(inputs, data.targets, keys=[str(k) for k in owner.tolist()])
    return small_task(model=normed, train=train, test=None, lr=0.05)


def loss_of(one: FederatedServer, client: int, weights: Any, buffers: Any) -> float:
    """A model's loss on what a client holds out."""
    model = normed().eval()
    FlatParameters(model).load(weights)
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
    inputs, targets = clients_of(one).personal.examples.batch(
        clients_of(one).personal.held_out[client]
    )
    return float(F.cross_entropy(model(inputs), targets).detach())


NATURAL: dict[str, Any] = {"clients": None, "partition": "natural-key", "batch_size": 8}


def test_tuned_models_are_measured_with_their_own_buffers() -> None:
    one = learner(dure.FedAvg(held_out=0.2, fine_tune=3, **NATURAL), 3, unlike())
    measured, model, losses = one.evaluate(), one.coordinator.model, []
    for client in clients_of(one).personal.clients:
        indices = clients_of(one).data.parts[client]
        steps = 3 * clients_of(one).training.work.per_epoch(len(indices))
        job = ClientJob(
            client, model.number, indices, model.weights, model.buffers, model.number * steps, steps
        )
        (tuned,) = clients_of(one).engine.at([]).train([job])
        losses.append(loss_of(one, client, [model.weights[0] + tuned.delta[0]], tuned.buffers))
    assert measured["personal_loss_mean"] == pytest.approx(sum(losses) / 4, rel=1e-12)


def test_ditto_s_models_are_measured_with_the_buffers_that_they_keep() -> None:
    one = learner(dure.Ditto(fraction=0.5, **NATURAL), 3, unlike())
    measured, model, losses = one.evaluate(), one.coordinator.model, []
    for client in clients_of(one).personal.clients:
        weights, *buffers = clients_of(one).memories.get(client, [*model.weights, *model.buffers])
        losses.append(loss_of(one, client, [weights], buffers))
    assert measured["personal_loss_mean"] == pytest.approx(sum(losses) / 4, rel=1e-12)


def test_ditto_with_no_pull_has_the_buffers_of_training_alone() -> None:
    task = unlike()
    one = learner(
        dure.Ditto(lam=0.0, held_out=0.0, local_steps=5, **{**NATURAL, "batch_size": None}), 4, task
    )
    for client in range(4):
        alone = dure.Task(
            normed,
            F.cross_entropy,
            task.train.batch(clients_of(one).data.parts[client]),
            None,
            task.optimizer,
        )
        run = dure.train(alone, dure.SingleWorker(None), stop=dure.Stop(steps=20))
        assert all(
            torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
            for mine, theirs in zip(
                clients_of(one).memories[client][1:], run.model.buffers(), strict=True
            )
        )


@pytest.mark.parametrize("fine_tune", [0, 1])
def test_ditto_goes_on_with_its_clients_buffers(tmp_path: Path, fine_tune: int) -> None:
    world, strategy = (
        dure.Simulated(engine="loop"),
        dure.Ditto(fraction=0.5, fine_tune=fine_tune, **NATURAL),
    )
    whole = dure.train(unlike(), strategy, world, dure.Stop(rounds=5))
    dure.train(unlike(), strategy, world, dure.Stop(rounds=2), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=unlike(), stop=dure.Stop(rounds=5))
    assert same_bits(whole, again)
    assert whole.history.evaluations[-1].metrics == again.history.evaluations[-1].metrics


def test_fine_tuning_takes_the_examples_that_are_there() -> None:
    one = learner(
        dure.FedAvg(clients=4, held_out=0.2, fine_tune=1), 1, arrival="arriving:0.5:86400"
    )
    engine, seen = clients_of(one).engine.at([]), []
    train_all = engine.train
    engine.train = lambda jobs: train_all([seen.append(job) or job for job in jobs])  # type: ignore[method-assign,func-returns-value]
    one.evaluate()
    assert len(seen) == 4
    for job in seen:
        there = clients_of(one).data.indices(job.client, one.carrier.now)
        assert torch.equal(job.indices, there)
        assert len(there) < len(clients_of(one).data.parts[job.client])


def frozen() -> nn.Module:
    model = network()
    model[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    return model


@pytest.mark.parametrize("order", ["first-order", "hessian-free"])
def test_per_fed_avg_leaves_frozen_parameters_as_they_are(order: Any) -> None:
    decaying = partial(torch.optim.SGD, lr=0.3, weight_decay=0.1)
    task = small_task(model=frozen, optimizer=decaying)
    strategy = dure.PerFedAvg(clients=4, order=order, alpha=0.1)
    model = dure.train(task, strategy, stop=dure.Stop(rounds=2)).model
    before = seeded_model(task, 0)
    same = [
        torch.equal(mine, theirs)
        for mine, theirs in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert same == [True, False, False, False, False, False]


def test_per_fed_avg_without_an_inner_step_is_fed_avg_where_parameters_are_frozen() -> None:
    task = small_task(
        model=frozen, optimizer=partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)
    )
    options: dict[str, Any] = {"clients": 4, "batch_size": None, "local_steps": 2}
    meta = train(dure.PerFedAvg(alpha=0.0, held_out=0.0, fine_tune=0, **options), task=task)
    assert largest_difference(meta, train(dure.FedAvg(**options), task=task)) < 1e-12


def test_an_error_of_a_client_of_per_fed_avg_names_it() -> None:
    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad:
            raise KeyError("no such class")
        return F.cross_entropy(outputs, targets)

    with pytest.raises(
        WorkerFailedError, match="client 0 failed in round 1: KeyError: 'no such class'"
    ):
        train(dure.PerFedAvg(clients=1), task=small_task(loss=fails, test=None))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_client_of_per_fed_avg_whose_loss_is_not_finite_is_refused(bad: float) -> None:
    def lost(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + bad  # the gradient is finite

    with pytest.warns(
        UserWarning, match="update of client 0 is rejected: its first loss is not finite"
    ):
        run = train(dure.PerFedAvg(clients=1), task=small_task(loss=lost, test=None))
    assert run.history.steps[0].numbers["refused"] == 1


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
    (result,) = engine.train([ClientJob(0, 0, torch.arange(20), weights, [], 0, 3)])
    assert torch.equal(weights[0], before)
    assert result.samples == 15
    assert float(result.delta[0].abs().max()) > 0


def test_a_backdoor_reports_its_success_beside_the_accuracy() -> None:
    task = dure.load_task("digits")
    strategy = dure.FedAvg(clients=10, local_epochs=2)
    world = dure.Simulated(attack="backdoor:0:5", attackers=3, engine="loop")
    metrics = (
        dure.train(task, strategy, world, dure.Stop(rounds=4), evaluate_every=4)
        .history.evaluations[-1]
        .metrics
    )
    assert 0 <= (metrics["test_backdoor"] or 0) <= 1
    assert (metrics["test_backdoor"] or 0) > 0.3


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).double().mean()


def test_the_worst_tenth_of_a_metric_that_falls_is_the_highest() -> None:
    task = small_task(n=400, metrics={"error": wrong})
    strategy = dure.FedAvg(clients=10, held_out=0.3, fine_tune=1, partition="label-shards:2")
    run = train(strategy, task=task)
    measured, best = run.history.evaluations[-1].metrics, run.history.best()
    for model in ("client", "personal"):
        values = sorted(run.summary["facts"][0]["by_client"][f"{model}_error"])
        worst = torch.tensor(values, dtype=torch.float64).quantile(0.9)
        assert measured[f"{model}_error_p10"] == pytest.approx(float(worst))
        assert best[f"{model}_error_p10"] == min(run.history.curve(f"{model}_error_p10")[1])

"""Models with complex, half-precision, sparse or whole numbers, and buffers that begin infinite."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.contracts.task import accuracy
from dure.data.partition import IID
from dure.errors import TooFewClientsError
from dure.federated.aggregate import parse
from dure.federated.engines.meta import MetaEngine
from dure.federated.server.client_metrics import ClientMeasurements
from dure.federated.server.global_model import GlobalModel
from dure.federated.server.server_optimizer import Rule, ServerOptimizer
from dure.protocol.messages import EvaluationResults, Update
from small import CLASSES, FEATURES, largest_difference, small_task


def train(task: dure.Task, strategy: Any, rounds: int = 3, **world: Any) -> dure.Run:
    return dure.train(
        task, strategy, dure.Simulated(**{"engine": "loop", **world}), dure.Stop(rounds=rounds)
    )


def update(client: int, delta: Tensor, buffers: Sequence[Tensor] = ()) -> Update:
    return Update(client, client, 0, 1, 1, 0.5, [delta], list(buffers), [])


# Complex weights


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "yogi"])
@pytest.mark.parametrize(
    "aggregate", ["mean", "median", "krum:1", "geometric-median", "clipped:1/mean", "bulyan:1"]
)
def test_a_complex_weight_is_two_real_ones(rule: Rule, aggregate: str) -> None:
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(7, 5, 2, dtype=torch.float64, generator=generator)
    optimizer = ServerOptimizer(rule, 0.5, 0.5)
    start = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    real = GlobalModel([start], [], parse(aggregate), optimizer)
    complex_one = GlobalModel([torch.view_as_complex(start)], [], parse(aggregate), optimizer)
    for _ in range(2):
        for client, delta in enumerate(updates):
            real.fold(update(client, delta), 1.0, 1.0)
            complex_one.fold(update(client, torch.view_as_complex(delta)), 1.0, 1.0)
        real.finish(0)
        complex_one.finish(0)
    torch.testing.assert_close(
        torch.view_as_real(complex_one.weights[0]), real.weights[0], rtol=1e-12, atol=1e-12
    )


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES, dtype=torch.complex128)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.to(torch.complex128)).abs()


@pytest.mark.parametrize("aggregate", ["mean", "median", "clipped:1/mean"])
@pytest.mark.parametrize("system", [dure.FedAvg, dure.FedAdam, dure.FedYogi])
def test_a_model_of_complex_numbers_learns(system: Any, aggregate: str) -> None:
    run = train(small_task(model=Complex), system(clients=5, batch_size=4, aggregate=aggregate), 6)
    _, losses = run.history.curve("test_loss")
    assert losses[-1] < losses[0]


# Half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad"])
def test_moments_of_half_precision_are_in_single(rule: Rule, dtype: torch.dtype) -> None:
    optimizer = ServerOptimizer(rule, 0.01, 0.9, 0.999, 1e-3)
    halves, singles = [torch.zeros(1, dtype=dtype)], [torch.zeros(1)]
    half, single = optimizer.start(halves), optimizer.start(singles)
    for step in range(500):
        delta = torch.tensor([0.3 if step == 0 else 1e-3], dtype=dtype)
        _, half = optimizer.step(halves, [delta], half)
        _, single = optimizer.step(singles, [delta.float()], single)
    assert all(torch.equal(one, other) for one, other in zip(half, single, strict=True))


# Whole numbers, sparse gradients


class Counting(nn.Module):
    """A whole number among the parameters, which torch cannot train."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES).double()
        self.size = nn.Parameter(torch.tensor([16777217]), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        return scores


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=5),
        dure.FedAsync(clients=5),
        dure.FedAvg(clients=5, aggregate="median"),  # type: ignore[arg-type]
    ],
    ids=lambda strategy: strategy.label,
)
def test_whole_numbers_among_the_parameters_stay_as_they_are(strategy: Any) -> None:
    """They do not travel, so that nobody has to take a mean of them."""
    run = train(small_task(model=Counting), strategy)
    # As a float32 it would be another number.
    assert run.model.get_parameter("size").tolist() == [16777217]
    _, losses = run.history.curve("test_loss")
    assert losses[-1] < losses[0]


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(12, CLASSES, sparse=sparse, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.words(inputs).sum(1)


@pytest.mark.parametrize(
    "strategy", [dure.FedProx, dure.Scaffold, dure.FedAsync, dure.Ditto, dure.PerFedAvg]
)
def test_sparse_gradients_learn_as_dense_ones_do(strategy: Any) -> None:
    inputs = torch.randint(0, 12, (40, 3), generator=torch.Generator().manual_seed(0))
    runs = [
        train(
            small_task(
                model=partial(Words, sparse), train=(inputs, inputs[:, 0] % CLASSES), test=None
            ),
            strategy(clients=5, batch_size=4),
        )
        for sparse in (True, False)
    ]
    assert largest_difference(*runs) < 1e-12


def test_targets_that_are_no_classes_have_no_histograms() -> None:
    inputs = torch.randn(40, FEATURES)
    for targets in (torch.tensor([-1, 1] * 20), torch.arange(40) * 10_000_000):
        task = small_task(
            train=(inputs, targets),
            test=None,
            loss=lambda out, y: (out.mean(1) - y.sign()).square().mean(),
        )
        description = dure.FedAvg(clients=4).division(task, 0)
        assert description is not None
        assert description.label_histograms is None
        assert "4 clients" in str(description)
        assert IID().divide(4, task.train, 0)


# Buffers


def test_a_buffer_that_was_infinite_takes_the_mean_of_what_it_became() -> None:
    infinite = torch.tensor([torch.inf, -torch.inf, 2.0, torch.nan], dtype=torch.float64)
    became = [
        torch.tensor([1.0, -torch.inf, 3.0, 4.0], dtype=torch.float64),
        torch.tensor([3.0, -torch.inf, 5.0, 8.0], dtype=torch.float64),
    ]
    model = GlobalModel([torch.zeros(1)], [infinite])
    for client, buffer in enumerate(became):
        model.fold(update(client, torch.zeros(1), [buffer]), 1.0, 1.0)
    model.finish(0)
    assert model.buffers[0].tolist() == [2.0, -torch.inf, 4.0, 6.0]


def test_a_model_that_observes_the_range_of_its_inputs_learns() -> None:
    class Observing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES).double()
            self.register_buffer("least", torch.tensor(torch.inf, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                self.least = torch.minimum(self.least, inputs.min())
            scores: Tensor = self.layer(inputs)
            return scores

    run = train(small_task(model=Observing), dure.FedAvg(clients=5, batch_size=4))
    _, losses = run.history.curve("test_loss")
    assert losses[-1] < losses[0]
    assert bool(run.model.get_buffer("least").isfinite())


# Odd conditions


def test_prox_on_devices_that_compute_in_no_time_and_still_come_too_late() -> None:
    strategy = dure.FedProx(clients=5, selection="uniform:1:0.01")
    with pytest.raises(TooFewClientsError, match="give it more time"):
        train(dure.load_task("digits"), strategy, devices="equal:inf")


def test_a_tenth_more_of_a_hundred_clients_is_ten_more() -> None:
    pacing = dure.FedAvg(clients=200, fraction=0.5, selection="uniform:1.1").pacing(200)
    assert pacing.asked(0, 0, 200) == 110


def test_both_sides_of_a_hessian_free_step_drop_the_same() -> None:
    def model(chance: float) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, 32), nn.Tanh(), nn.Dropout(chance), nn.Linear(32, CLASSES)]
        return nn.Sequential(*layers).double()

    found = {}
    for chance in (0.0, 0.5):
        task = small_task(model=partial(model, chance), loss=F.cross_entropy)
        engine = MetaEngine(task, model(chance), task.train, None, 0, 0.1, True)
        at, batch = engine.flat.copy(), torch.arange(40)
        (gradient,) = engine._gradient(batch)[1]
        engine.flat.load(at)
        (less,) = engine._less_curvature([gradient.clone()], batch, at)
        found[chance] = float((less - gradient).norm() / gradient.norm())
    assert found[0.5] < 3 * found[0.0] + 0.1


class Scheduled(torch.optim.SGD):
    """Has a scheduler inside, which holds it weakly."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self, 1, 0.5)


def test_an_optimizer_lives_as_long_as_its_steps() -> None:
    task = small_task(optimizer=Scheduled)
    strategy = dure.FedAvg(clients=3, batch_size=4)
    threshold = gc.get_threshold()
    gc.set_threshold(20)
    try:
        run = dure.train(task, strategy, dure.Simulated(engine="loop"), dure.Stop(rounds=2))
    finally:
        gc.set_threshold(*threshold)
    assert run.summary["ended"] == "rounds"


def test_clients_with_nothing_to_count_hide_nothing_of_the_others() -> None:
    values = {"client_f1": [0.5, float("nan"), 1.0]}
    some = ClientMeasurements({"f1": accuracy}).take(EvaluationResults([0, 1, 2], values))
    assert some["client_f1"] == some["client_f1_mean"] == some["client_f1_p50"] == 0.75
    assert some["client_f1_p10"] == pytest.approx(0.55)
    assert some["client_f1_p90"] == pytest.approx(0.95)
    assert some["client_f1_worst"] == 0.5
    nothing = ClientMeasurements({"f1": accuracy}).take(
        EvaluationResults([0], {"client_f1": [float("nan")]})
    )
    assert all(map(math.isnan, nothing.values()))


# Parameters that the loss does not reach


class FrozenByNoGrad(nn.Module):
    """The backbone is trainable, and computes under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(FEATURES, 5).double()
        self.head = nn.Linear(5, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(inputs)
        scores: Tensor = self.head(features)
        return scores


class FrozenByItsForward(FrozenByNoGrad):
    """The backbone is trainable until the first forward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.backbone.requires_grad_(False)
        return super().forward(inputs)


DECAYING = partial(torch.optim.SGD, lr=0.3, momentum=0.5, weight_decay=0.1)


@pytest.mark.parametrize("model", [FrozenByNoGrad, FrozenByItsForward])
def test_a_parameter_that_the_loss_does_not_reach_is_left_alone_as_by_a_plain_loop(
    model: type[nn.Module],
) -> None:
    task = small_task(model=model, optimizer=DECAYING)
    alike = dure.FedAvg(clients=1, local_steps=3, batch_size=None)
    run = train(task, alike, rounds=1, engine="auto")
    mine = seeded_model(task, 0)
    optimizer = DECAYING(mine.parameters())
    inputs, targets = task.train.batch(torch.arange(len(task.train)))
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(mine(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    trained = run.model.state_dict()
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", [FrozenByNoGrad, FrozenByItsForward])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_per_fedavg_moves_no_parameter_that_the_loss_does_not_reach(
    model: type[nn.Module], alpha: float
) -> None:
    task = small_task(model=model, optimizer=DECAYING)
    run = train(task, dure.PerFedAvg(clients=2, local_steps=2, alpha=alpha), engine="auto")
    start = seeded_model(task, 0).state_dict()
    for name in ("backbone.weight", "backbone.bias"):
        assert torch.equal(run.model.state_dict()[name], start[name])
    assert not torch.equal(run.model.state_dict()["head.weight"], start["head.weight"])

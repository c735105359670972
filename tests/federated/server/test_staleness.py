"""Updates from models of the past: FedAsync and FedBuff against oracles that keep every model and
train by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dure
from dure.contracts.fresh_model import seeded_model
from dure.federated.algorithm import Algorithm, AlgorithmInputs
from dure.federated.strategy import Federated
from dure.protocol.messages import Update
from dure.randomness.permutation import Permutation
from dure.randomness.seeds import derive
from small import small_task, weights_of

TOLERANCE = 1e-12
LR = 0.3
ENGINES = ["loop", "batched"]
SOME = settings(max_examples=5)


def train(strategy: Federated, rounds: int, seed: int = 0, **world: Any) -> dure.Run:
    return dure.train(
        small_task(LR), strategy, dure.Simulated(**world), dure.Stop(rounds=rounds), seed=seed
    )


def arrivals(run: dure.Run) -> list[tuple[int, int]]:
    """(client, number of the model that it was handed) of every update, in order of arrival."""
    flights = run.summary["facts"][0]["flights"]
    return [(client, number) for client, number, _, _, outcome in flights if outcome == "accepted"]


def staleness_of(run: dure.Run, buffer: int = 1) -> list[int]:
    """Of every update, in order of arrival: models made since it was handed out. The run's own
    count agrees."""
    found = [at // buffer - number for at, (_, number) in enumerate(arrivals(run))]
    assert Counter(found) == dict(run.summary["facts"][0]["staleness"])
    return found


class ByHand:
    """Every model so far, as vectors, and clients' training by autograd alone: steps over all of
    their examples."""

    def __init__(self, strategy: Federated, seed: int) -> None:
        self.task = small_task(LR)
        self.parts = strategy.divide(self.task, seed)
        self.model = seeded_model(self.task, seed)
        self.models = [torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])]

    def gradient(self, client: int, x: Tensor, rho: float, anchor: Tensor) -> Tensor:
        """Of f + rho/2 |x - anchor|^2 at x."""
        inputs, targets = self.task.train.batch(self.parts[client])
        x = x.clone().requires_grad_()
        outputs = torch.func.functional_call(self.model, self.pieces(x), (inputs,))
        objective = self.task.loss(outputs, targets) + rho / 2 * (x - anchor).square().sum()
        return torch.autograd.grad(objective, x)[0]

    def trained(self, client: int, start: Tensor, steps: int, rho: float, anchor: Tensor) -> Tensor:
        """Where SGD comes to from `start`."""
        x = start
        for _ in range(steps):
            x = x - LR * self.gradient(client, x, rho, anchor)
        return x

    def pieces(self, x: Tensor) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        split = torch.split(x, [p.numel() for p in named.values()])
        return {
            name: piece.view_as(p) for (name, p), piece in zip(named.items(), split, strict=True)
        }


def weight(strategy: dure.FedAsync, staleness: int) -> float:
    """s, as the paper writes it."""
    if strategy.weighting == "polynomial":
        return 1 / math.pow(staleness + 1, strategy.a)
    late = max(staleness - strategy.b, 0.0) if strategy.weighting == "hinge" else 0.0
    return 1 / (strategy.a * late + 1)


def distance(run: dure.Run, x: Tensor) -> float:
    return float((weights_of(run) - x).abs().max())


# FedAsync


def mixed(
    run: dure.Run,
    strategy: dure.FedAsync,
    seed: int,
    rho: float | None = None,
    anchor: str = "received",
) -> Tensor:
    """The last model of x_t = (1 - a_t) x_{t-1} + a_t x_new. rho: another than the strategy's;
    anchor: or present."""
    by_hand = ByHand(strategy, seed)
    models, steps = by_hand.models, strategy.local_steps or 1
    for client, number in arrivals(run):
        received, present = models[number], models[-1]
        pull = present if anchor == "present" else received
        new = by_hand.trained(client, received, steps, strategy.rho if rho is None else rho, pull)
        rate = strategy.alpha * weight(strategy, len(models) - 1 - number)
        models.append((1 - rate) * present + rate * new)
    return models[-1]


ASYNCHRONOUS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "simulated": ({"stale": 4}, {}),
    "devices": ({"fraction": 1.0}, {"devices": "lognormal:1.5"}),
    "some-lost": ({"fraction": 0.6}, {"devices": "stragglers:0.4:20", "drop_out": 0.3}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ASYNCHRONOUS)
@SOME
@given(
    seed=st.integers(0, 1000),
    clients=st.integers(2, 6),
    steps=st.integers(1, 4),
    weighting=st.sampled_from(["constant", "polynomial", "hinge"]),
    alpha=st.floats(0.1, 1.0),
    rho=st.floats(0.01, 2.0),
)
def test_clients_of_fed_async_are_held_near_the_stale_model_that_they_received(
    case: str,
    engine: str,
    seed: int,
    clients: int,
    steps: int,
    weighting: Any,
    alpha: float,
    rho: float,
) -> None:
    options, world = ASYNCHRONOUS[case]
    strategy = dure.FedAsync(
        clients=clients,
        local_steps=steps,
        batch_size=None,
        partition=dure.QuantitySkew(0.5),
        alpha=alpha,
        rho=rho,
        weighting=weighting,
        a=0.7,
        b=1.0,
        **options,
    )
    run = train(strategy, 14, seed, engine=engine, **world)
    assert distance(run, mixed(run, strategy, seed)) < TOLERANCE


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_it_would_be_seen_if_they_were_held_near_another_model_or_none(
    case: str, engine: str
) -> None:
    options, world = ASYNCHRONOUS[case]
    strategy = dure.FedAsync(clients=5, local_steps=3, batch_size=None, rho=0.5, **options)
    run = train(strategy, 20, engine=engine, **world)
    assert max(staleness_of(run)) >= 3
    assert distance(run, mixed(run, strategy, 0)) < TOLERANCE
    assert distance(run, mixed(run, strategy, 0, rho=0.0)) > 1e-4
    assert distance(run, mixed(run, strategy, 0, anchor="present")) > 1e-4


# FedBuff


def buffered(
    run: dure.Run, strategy: dure.FedBuff, seed: int, power: float = 0.5, against: str = "received"
) -> Tensor:
    """The last model of x <- x - (server_lr / K) sum s (x_tau - y), with s = (1 +
    staleness)^-power."""
    by_hand, arrived = ByHand(strategy, seed), arrivals(run)
    models, steps = by_hand.models, strategy.local_steps or 1
    for at in range(0, len(arrived), strategy.buffer):
        total = torch.zeros_like(models[0])
        for client, number in arrived[at : at + strategy.buffer]:
            received = models[number]
            left = models[-1] if against == "present" else received
            delta = left - by_hand.trained(client, received, steps, 0.0, received)
            total += (1 + len(models) - 1 - number) ** -power * delta
        models.append(models[-1] - strategy.server_lr / strategy.buffer * total)
    return models[-1]


BUFFERED: dict[str, dict[str, Any]] = {
    "devices": {"devices": "lognormal:1.5"},
    "some-lost": {"devices": "stragglers:0.4:20", "drop_out": 0.3},
    "some-away": {"devices": "lognormal:1", "availability": "probability:0.7:1"},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", BUFFERED)
@SOME
@given(
    seed=st.integers(0, 1000),
    clients=st.integers(3, 8),
    fraction=st.floats(0.3, 1.0),
    steps=st.integers(1, 3),
    buffer=st.integers(1, 5),
    server_lr=st.floats(0.1, 1.5),
)
def test_fed_buff_adds_what_clients_moved_from_the_models_they_started_from(
    case: str,
    engine: str,
    seed: int,
    clients: int,
    fraction: float,
    steps: int,
    buffer: int,
    server_lr: float,
) -> None:
    strategy = dure.FedBuff(
        clients=clients,
        fraction=fraction,
        local_steps=steps,
        batch_size=None,
        partition=dure.QuantitySkew(0.5),
        buffer=buffer,
        server_lr=server_lr,
    )
    run = train(strategy, 6, seed, engine=engine, **BUFFERED[case])
    assert len(arrivals(run)) == 6 * buffer
    assert distance(run, buffered(run, strategy, seed)) < TOLERANCE


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", BUFFERED)
def test_it_would_be_seen_if_fed_buff_took_the_present_model_or_forgot_the_discount(
    case: str, engine: str
) -> None:
    strategy = dure.FedBuff(
        clients=8, fraction=1.0, local_steps=2, batch_size=None, buffer=2, server_lr=0.8
    )
    run = train(strategy, 10, engine=engine, **BUFFERED[case])
    assert max(staleness_of(run, buffer=2)) >= 3
    assert distance(run, buffered(run, strategy, 0)) < TOLERANCE
    assert distance(run, buffered(run, strategy, 0, against="present")) > 1e-3
    assert distance(run, buffered(run, strategy, 0, power=0.0)) > 1e-3


@dataclass(frozen=True)
class Undiscounted(dure.FedBuff):
    """FedBuff with s = 1."""

    def algorithm(self, start: AlgorithmInputs) -> Algorithm:
        return Algorithm()


@pytest.mark.parametrize("engine", ENGINES)
@SOME
@given(seed=st.integers(0, 1000), clients=st.integers(2, 8))
def test_a_buffer_of_one_without_discount_is_asynchronous_sgd(
    engine: str, seed: int, clients: int
) -> None:
    strategy = Undiscounted(clients=clients, fraction=1.0, local_steps=1, batch_size=None, buffer=1)
    run = train(strategy, 20, seed, engine=engine, devices="lognormal:1")
    assert max(staleness_of(run)) >= 1
    by_hand = ByHand(strategy, seed)
    for client, number in arrivals(run):
        stale = by_hand.models[number]
        by_hand.models.append(by_hand.models[-1] - LR * by_hand.gradient(client, stale, 0.0, stale))
    assert distance(run, by_hand.models[-1]) < TOLERANCE


# How stale they are


class Point(nn.Module):
    """A single number, whatever the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.at.expand(len(inputs))


def points(targets: Sequence[float]) -> dure.Task:
    """A client of one example moves in one step to its target. The metric `at` is where the model
    is."""
    values = torch.tensor(targets, dtype=torch.float64)
    return dure.Task(
        *(Point, lambda outputs, targets: (outputs - targets).square().mean() / 2),
        dure.Examples(torch.zeros(len(values), 1), values),
        dure.Examples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.float64)),
        partial(torch.optim.SGD, lr=1.0),
        metrics={"at": lambda outputs, targets: outputs.mean()},
    )


def juggled(most: int, updates: int) -> tuple[list[int], list[int]]:
    """(seconds of the clients that are asked at the start, and of the one that is asked at second
    1, 2, ...).

    Who is asked at second t takes t mod (most + 1), or most + 1 for 0: then one is back at every
    second.
    """
    count = most + 1
    later = [at % count or count for at in range(1, updates + 1)]
    back = {at + seconds for at, seconds in enumerate(later, start=1)}
    assert len(back) == updates, "no two are back at once"
    return [second for second in range(1, count + 1) if second not in back], later


def unevenness(staleness: Sequence[int], most: int) -> float:
    """Chi-squared against the uniform distribution on 0..most: most is its mean, 2 most its
    variance if it is true."""
    expected = len(staleness) / (most + 1)
    counts = Counter(staleness)
    assert max(counts) <= most
    return sum((counts[value] - expected) ** 2 / expected for value in range(most + 1))


@pytest.mark.parametrize("most", [2, 4, 16])
def test_delays_that_are_set_to_it_give_the_simulated_staleness(most: int, tmp_path: Path) -> None:
    """As many clients are at work as a juggler has balls, and one is back each second: who was
    handed model t is as stale as it took seconds, less one. So each staleness comes once in every
    most + 1 updates; draws come near it."""
    updates = 30 * (most + 1)
    first, later = juggled(most, updates)
    clients = updates + len(first)
    seconds = dict(
        zip(
            Permutation(clients, derive(0, "candidates", 0)).first(clients),
            first + later,
            strict=True,
        )
    )
    path = tmp_path / "devices.csv"
    rows = [f"{client},{1 / seconds[client]!r},inf,inf" for client in range(clients)]
    path.write_text("\n".join(["client,examples_per_second,down_mbit,up_mbit", *rows]))
    task, stop = points([0.0] * clients), dure.Stop(rounds=updates)

    def staleness(devices: str, **options: Any) -> list[int]:
        world = dure.Simulated(engine="loop", devices=devices)  # type: ignore[arg-type]
        strategy = dure.FedAsync(
            clients=clients, fraction=len(first) / clients, batch_size=None, **options
        )
        return staleness_of(dure.train(task, strategy, world, stop, evaluate_every=updates))[
            most + 1 :
        ]

    enough = most + 4 * math.sqrt(2 * most)
    assert unevenness(staleness(f"file:{path}"), most) == 0.0
    assert unevenness(staleness("equal", stale=most), most) < enough
    assert unevenness(staleness("equal", stale=most - 1), most) > enough, (
        "so near that one value less is seen"
    )


# How much they count


def share(strategy: dure.FedAsync, staleness: int) -> float:
    """The strategy's s, of an update that is so stale."""
    update = Update(0, 0, 0, 7, 7, 0.5, [torch.ones(1)], [])
    scale, of_all = strategy.algorithm(AlgorithmInputs(Point(), [torch.zeros(1)], 3, 0.1)).share(
        update, staleness
    )
    assert of_all == 1.0
    return scale / strategy.alpha


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (10.0, 4.0, [1.0, 1 / 11, 1 / 21]),
        (4.0, 2.0, [1.0, 1 / 5, 1 / 9]),
        (0.5, 0.0, [1.0, 2 / 3, 1 / 2]),
    ],
)
def test_the_hinge_is_one_up_to_b_and_falls_from_there(
    a: float, b: float, expected: list[float]
) -> None:
    strategy = dure.FedAsync(weighting="hinge", a=a, b=b)
    assert [share(strategy, staleness) for staleness in range(int(b) + 1)] == [1.0] * (int(b) + 1)
    assert [share(strategy, int(b) + late) for late in range(3)] == pytest.approx(
        expected, rel=1e-14
    )


@given(st.integers(1, 60), st.floats(0, 100), st.floats(1e-12, 1e-6))
def test_the_hinge_does_not_jump_at_b(staleness: int, a: float, little: float) -> None:
    at, above, below = (
        share(dure.FedAsync(weighting="hinge", a=a, b=b), staleness)
        for b in (staleness, staleness - little, staleness + little)
    )
    assert (at, below) == (1.0, 1.0)
    assert 1 - a * little - 1e-9 <= above <= 1.0


@pytest.mark.parametrize("weighting", ["constant", "polynomial", "hinge"])
@given(alpha=st.floats(0.01, 1.0), a=st.floats(0, 10), b=st.floats(0, 60))
def test_the_staler_an_update_is_the_less_it_counts(
    weighting: Any, alpha: float, a: float, b: float
) -> None:
    strategy = dure.FedAsync(alpha=alpha, weighting=weighting, a=a, b=b)
    shares = [share(strategy, staleness) for staleness in range(61)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares == pytest.approx(
        [weight(strategy, staleness) for staleness in range(61)], rel=1e-12
    )


@pytest.mark.parametrize("weighting", ["constant", "polynomial", "hinge"])
@pytest.mark.parametrize("case", ["simulated", "devices"])
def test_after_many_updates_alpha_is_what_it_was(weighting: Any, case: str) -> None:
    options, world = ASYNCHRONOUS[case]
    targets = [3.0, -5.0, 8.0, -2.0, 6.0, -7.0]
    strategy = dure.FedAsync(
        clients=6,
        batch_size=None,
        alpha=0.4,
        rho=0.0,
        weighting=weighting,
        a=0.7,
        b=2.0,
        **options,
    )
    task, world = points(targets), {"engine": "loop", **world}
    run = dure.train(
        task, strategy, dure.Simulated(**world), dure.Stop(rounds=200), evaluate_every=1
    )
    parts, stale = strategy.divide(task, 0), staleness_of(run)
    at = [float(one.metrics["test_at"] or 0.0) for one in run.history.evaluations]
    assert len(at) == 1 + 200
    assert len(set(stale[100:])) >= 3
    for before, after, (client, _), staleness in zip(
        at, at[1:], arrivals(run), stale, strict=False
    ):
        target = targets[int(parts[client])]
        if abs(target - before) > 0.01:
            assert (after - before) / (target - before) == pytest.approx(
                0.4 * weight(strategy, staleness), rel=1e-11
            )

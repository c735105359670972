"""Downpour SGD under a virtual clock: what it equals, what it sends, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from dure.data.batches import Batches
from dure.data.partition import LabelShards
from dure.parameter_server.adagrad import DownpourAdagrad
from small import check_all, largest_difference, network, same_bits, small_task

ADAM = partial(torch.optim.Adam, lr=0.01)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
STOP = dure.Stop(rounds=2)
PARAMETERS = 215


def simulated(task: dure.Task | None = None, stop: dure.Stop = STOP, **fields: Any) -> dure.Run:
    world = dure.Simulated(devices=fields.pop("devices", "equal"))
    strategy = dure.Downpour(**{"batch_size": 8, "replicas": 1, **fields})
    return dure.train(task or small_task(), strategy, world, stop)


def alone(task: dure.Task | None = None) -> dure.Run:
    return dure.train(task or small_task(), dure.SingleWorker(8), stop=dure.Stop(epochs=2))


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.3), MOMENTUM, ADAM])
@given(servers=st.integers(1, 4), partitions=st.integers(1, 2), period=st.sampled_from([None, 3]))
@settings(max_examples=5, deadline=None)
def test_one_replica_has_the_bits_of_a_single_worker(
    optimizer: Any, servers: int, partitions: int, period: int | None
) -> None:
    task = small_task(optimizer=optimizer, lr_schedule=lambda step: 1 / (1 + step))
    fields = {"servers": servers, "partitions": partitions, "period": period}
    rounds = 2 if period is None else 4  # 41 examples are 6 steps
    run = simulated(task, dure.Stop(rounds=rounds), overlap=False, **fields)
    assert same_bits(run, alone(task))


def test_a_replica_that_pushes_every_step_need_not_fetch() -> None:
    run = simulated(fetch_every=5, overlap=False)
    assert largest_difference(run, alone()) < 1e-12


def test_adagrad_is_that_of_torch_without_its_constants() -> None:
    adagrad = partial(torch.optim.Adagrad, lr=0.05, eps=0, initial_accumulator_value=0)
    run = simulated(gamma=0.05, overlap=False)
    assert same_bits(run, alone(small_task(optimizer=adagrad)))


def test_adagrad_leaves_alone_what_never_had_a_gradient() -> None:
    weights = nn.Parameter(torch.ones(3))
    optimizer = DownpourAdagrad([weights], lr=0.5)
    # The square of the last one is no number above zero.
    weights.grad = torch.tensor([0.0, -3.0, 1e-30])
    optimizer.step()
    assert weights.tolist() == [1.0, 1.5, 1.0]


def by_hand(
    fetch_every: int,
    push_every: int,
    period: int,
    rounds: int,
    alpha: float,
    decay: float = 0.0,
    rate: Callable[[int], float] = lambda step: 1.0,
) -> Tensor:
    """The weights of the server after one replica without overlap: the rule, written as a loop."""
    task = small_task(lr=0.3)
    model = seeded_model(task, 0)
    batches = Batches(len(task.train), 8, 0)
    there = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    own = there.clone()
    accrued = torch.zeros_like(there)
    count = 0
    for step in range(period * rounds):
        if step % fetch_every == 0 or step % period == 0:
            own = there.clone()
        nn.utils.vector_to_parameters(own, model.parameters())
        inputs, targets = task.train.batch(batches.at(step))
        loss = F.cross_entropy(model(inputs), targets)
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([each.reshape(-1) for each in found])
        accrued = accrued + gradient
        count += 1
        own = own - alpha * rate(step) * gradient
        if step % push_every == 0 or (step + 1) % period == 0:
            there = there - 0.3 * rate(step) * (accrued + count * decay * there)
            accrued = torch.zeros_like(there)
            count = 0
    return there


def difference(run: dure.Run, expected: Tensor) -> float:
    """Return the largest difference of the run's weights from those expected."""
    weights = torch.cat([each.reshape(-1) for each in run.model.state_dict().values()])
    return float((weights - expected).abs().max())


@given(fetch_every=st.integers(1, 5), push_every=st.integers(1, 5), period=st.sampled_from([4, 7]))
@settings(max_examples=15, deadline=None)
def test_it_keeps_to_the_rule(fetch_every: int, push_every: int, period: int) -> None:
    run = simulated(
        fetch_every=fetch_every,
        push_every=push_every,
        period=period,
        alpha=0.2,
        servers=2,
        overlap=False,
    )
    assert difference(run, by_hand(fetch_every, push_every, period, 2, alpha=0.2)) < 1e-12


def halved(step: int) -> float:
    return float(0.5 ** (step // 3))


@given(push_every=st.integers(1, 6), period=st.sampled_from([4, 7]))
@settings(max_examples=10, deadline=None)
def test_a_push_has_the_rate_of_its_step_and_the_decay_of_each_of_its_gradients(
    push_every: int, period: int
) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.3, weight_decay=0.02)
    task = small_task(optimizer=optimizer, lr_schedule=halved)
    run = simulated(
        task,
        fetch_every=100,
        push_every=push_every,
        period=period,
        alpha=0.2,
        servers=2,
        overlap=False,
    )
    assert (
        difference(run, by_hand(100, push_every, period, 2, alpha=0.2, decay=0.02, rate=halved))
        < 1e-12
    )


@pytest.mark.parametrize(("fetch_every", "push_every"), [(1, 1), (2, 1), (3, 5)])
@pytest.mark.parametrize("overlap", [True, False])
def test_it_sends_gradients_and_weights_every_so_many_steps(
    fetch_every: int, push_every: int, overlap: bool
) -> None:
    run = simulated(
        small_task(n=90),
        dure.Stop(rounds=1),
        replicas=3,
        servers=2,
        period=30,
        fetch_every=fetch_every,
        push_every=push_every,
        overlap=overlap,
    )
    last = 1 if 29 % push_every else 0  # where all meet, what is left
    for line in run.summary["per_worker"]:
        if line["name"].startswith("worker"):
            assert line["bytes_sent"] == (30 // push_every + last) * 8 * PARAMETERS
            assert line["bytes_received"] == 30 // fetch_every * 8 * PARAMETERS


def test_messages_and_gradients_go_on_at_the_same_time() -> None:
    # A gradient of 8 examples takes 1 s, and so do the weights in each direction.
    mbit = 8 * PARAMETERS / 125_000
    devices = f"equal:8:{mbit}:{mbit}"

    def seconds(overlap: bool) -> float:
        run = simulated(small_task(n=160), dure.Stop(rounds=1), overlap=overlap, devices=devices)
        return float(run.summary["numbers"]["virtual_seconds"])

    apart = seconds(False)
    assert apart > 3 * 20
    # A fetch still follows the push of the step before on the replica's link.
    assert seconds(True) < 0.6 * apart


def test_replicas_have_data_of_their_own_and_use_each_example_once_an_epoch() -> None:
    run = simulated(small_task(n=45), replicas=3, partition=LabelShards(1))
    assert run.summary["samples"] == 2 * 45
    assert run.summary["numbers"]["pushes"] == 3 * 2 * 2


def test_one_replica_begins_alone() -> None:
    def run(warm_start: int) -> dure.Run:
        return simulated(
            small_task(n=64),
            dure.Stop(rounds=1),
            replicas=2,
            warm_start=warm_start,
            devices="equal:8:1e9:1e9",
        )

    cold, warm = run(0), run(3)
    assert warm.summary["samples"] - cold.summary["samples"] == 3 * 8
    seconds = [one.summary["numbers"]["virtual_seconds"] for one in (cold, warm)]
    assert [round(one) for one in seconds] == [4, 7]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(
    overlap: bool, tmp_path: Path
) -> None:
    task = small_task(optimizer=ADAM)
    strategy = dure.Downpour(
        replicas=3,
        servers=2,
        batch_size=3,
        fetch_every=2,
        push_every=3,
        warm_start=4,
        overlap=overlap,
    )
    whole = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=4))
    dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=2), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=4))
    assert same_bits(whole, again)
    assert whole.summary["numbers"]["pushes"] == again.summary["numbers"]["pushes"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"partitions": 0}, "partitions is 0"),
        ({"fetch_every": 0}, "fetch_every is 0"),
        ({"push_every": 0}, "push_every is 0"),
        ({"warm_start": -1}, "warm_start is -1"),
        ({"gamma": 0.0}, "gamma is 0"),
        ({"alpha": -1.0}, "alpha is -1"),
        ({"copies": 1}, "copies is 1 with servers=1"),
        ({"replicas": 50}, "50 clients cannot share 41 examples"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_all(dure.Downpour(**fields), small_task(), None)


def test_adagrad_in_the_place_of_an_optimizer_that_does_more_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay would be ignored"):
        check_all(dure.Downpour(gamma=0.1), small_task(optimizer=MOMENTUM), None)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)).double()


def test_models_that_cannot_be_divided_are_refused() -> None:
    strategy = dure.Downpour(replicas=1, partitions=2)
    with pytest.raises(ValueError, match=r"buffers, such as 1\.running_mean"):
        check_all(strategy, small_task(model=with_batch_norm), None)

    def tied() -> nn.Module:
        model = network()
        assert isinstance(model, nn.Sequential)
        return nn.Sequential(model[0], nn.Tanh(), nn.Linear(12, 6).double(), model[0], model[1:])

    with pytest.raises(ValueError, match="is used by stages 0, 1"):
        check_all(strategy, small_task(model=tied), None)

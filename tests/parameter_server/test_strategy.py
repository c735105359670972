"""The parameter server as a system: what it equals, what it sends, what it refuses, how it goes
on."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dure
from dure.fleet.virtual_network import HEADER
from small import check_all, largest_difference, same_bits, small_task

ADAM = partial(torch.optim.Adam, lr=0.01)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
STOP = dure.Stop(rounds=2)


def simulated(task: dure.Task | None = None, stop: dure.Stop = STOP, **fields: Any) -> dure.Run:
    world = dure.Simulated(devices=fields.pop("devices", "equal"))
    return dure.train(
        task or small_task(), dure.ParameterServer(batch_size=8, **fields), world, stop
    )


def alone(task: dure.Task | None = None) -> dure.Run:
    return dure.train(task or small_task(), dure.SingleWorker(8), stop=dure.Stop(epochs=2))


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.3), MOMENTUM, ADAM])
@given(servers=st.integers(1, 4), staleness=st.sampled_from([0, 2, None]))
@settings(max_examples=6, deadline=None)
def test_one_worker_has_the_bits_of_a_single_worker(
    optimizer: Any, servers: int, staleness: int | None
) -> None:
    task = small_task(optimizer=optimizer)
    run = simulated(task, servers=servers, workers=1, staleness=staleness)
    assert same_bits(run, alone(task))


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
@pytest.mark.parametrize("replicas", [0, 1])
def test_synchronous_workers_walk_the_path_of_one(optimizer: Any, replicas: int) -> None:
    task = small_task(optimizer=optimizer)
    run = simulated(task, servers=2, workers=3, replicas=replicas)
    assert largest_difference(run, alone(task)) < 1e-12


def test_learning_rates_follow_the_schedule() -> None:
    task = small_task(lr_schedule=lambda step: 1 / (1 + step))
    assert same_bits(simulated(task, workers=1), alone(task))
    assert largest_difference(simulated(task, workers=2), alone(task)) < 1e-12


def test_it_sends_the_weights_once_each_way_for_every_step_and_worker() -> None:
    task = small_task(n=40)
    run = simulated(task, servers=3, workers=2)
    steps = 2 * 5
    weights = 8 * run.summary["parameters"]
    for line in run.summary["per_worker"]:
        if line["name"].startswith("worker"):
            assert (line["bytes_sent"], line["bytes_received"]) == (steps * weights,) * 2
    servers = [line for line in run.summary["per_worker"] if line["name"].startswith("server")]
    assert sum(line["bytes_sent"] for line in servers) == 2 * steps * weights


def test_a_copy_costs_one_more_way_for_each_step_of_all_workers() -> None:
    task = small_task(n=40)
    sent = [
        sum(
            line["bytes_sent"]
            for line in simulated(task, servers=2, workers=4, replicas=replicas).summary[
                "per_worker"
            ]
            if line["name"].startswith("server")
        )
        for replicas in (0, 1)
    ]
    assert sent[1] - sent[0] == 2 * 5 * 8 * 215


def test_a_straggler_holds_up_those_who_wait_and_nobody_else() -> None:
    def seconds(staleness: int | None) -> float:
        run = simulated(
            small_task(n=400),
            workers=4,
            staleness=staleness,
            devices="stragglers:0.3:5:100:1e9:1e9",
            stop=dure.Stop(rounds=1),
        )
        return float(run.summary["numbers"]["virtual_seconds"])

    synchronous, bounded, free = seconds(0), seconds(4), seconds(None)
    # In the long run a bound helps nobody against one who is always slow.
    assert bounded > 0.8 * synchronous
    assert free < synchronous / 1.8


def test_steps_that_are_slow_now_and_then_hold_up_the_synchronous_most() -> None:
    def seconds(devices: str, staleness: int | None = 0) -> float:
        run = simulated(
            small_task(n=800),
            workers=4,
            staleness=staleness,
            devices=f"{devices}:100:1e9:1e9",
            stop=dure.Stop(rounds=1),
        )
        return float(run.summary["numbers"]["virtual_seconds"])

    assert seconds("jitter:1:5") == pytest.approx(seconds("stragglers:1:5"))
    assert seconds("jitter:0:5") == pytest.approx(seconds("stragglers:0:5"))
    synchronous = seconds("jitter:0.2:5")
    assert seconds("jitter:0.2:5", 4) < synchronous / 1.4
    assert seconds("jitter:0.2:5", None) < synchronous / 1.4


@pytest.mark.parametrize("staleness", [0, None])
def test_a_worker_computes_or_waits_and_the_account_of_it_is_whole(staleness: int | None) -> None:
    run = simulated(small_task(n=80), workers=3, staleness=staleness, devices="jitter:0.3:4")
    whole = run.summary["numbers"]["virtual_seconds"]
    spans = run.summary["facts"][0]["parameter_server"]["spans"]
    for line in run.summary["per_worker"]:
        if line["name"].startswith("worker"):
            assert line["compute_seconds"] + line["idle_seconds"] == pytest.approx(whole)
            own = [(began, seconds) for who, _, began, seconds, _ in spans if who == line["name"]]
            assert sum(seconds for _, seconds in own) == pytest.approx(line["compute_seconds"])
            assert all(
                began + seconds <= after + 1e-9
                for (began, seconds), (after, _) in pairwise(sorted(own))
            )


def test_the_share_that_workers_wait_is_told_of_every_round() -> None:
    run = simulated(small_task(n=80), workers=3, devices="jitter:0.3:4")
    steps, shares = run.history.series("waiting")
    _, clock = run.history.series("virtual_seconds")
    lasted = [now - before for before, now in pairwise([0.0, *clock])]
    waited = sum(share * 3 * seconds for share, seconds in zip(shares, lasted, strict=True))
    workers = [line for line in run.summary["per_worker"] if line["name"].startswith("worker")]
    assert steps == [1, 2]
    assert waited == pytest.approx(sum(line["idle_seconds"] for line in workers))


def test_the_link_of_a_server_is_busy_for_as_long_as_its_bytes_take() -> None:
    world = dure.Simulated(devices="equal:100:1e9:1e9", server_mbit=1)
    strategy = dure.ParameterServer(servers=2, workers=3, batch_size=9)
    run = dure.train(small_task(), strategy, world, STOP)
    spans = run.summary["facts"][0]["parameter_server"]["spans"]
    for line in run.summary["per_worker"]:
        own = [span for span in spans if span[0] == line["name"] and span[1] == "communication"]
        messages = 2 * 5 * 3
        if line["name"].startswith("server"):
            assert len(own) == messages
            bits = 8 * (line["bytes_sent"] + messages * HEADER)
            assert sum(span[3] for span in own) == pytest.approx(bits / 1e6)
        else:
            assert own == []


def test_the_staleness_that_is_reported_is_within_the_bound_and_reaches_it() -> None:
    run = simulated(
        small_task(n=400), workers=4, staleness=2, devices="stragglers:0.3:5:100:1e9:1e9"
    )
    clocks = dict(run.summary["facts"][0]["parameter_server"]["staleness"])
    assert max(clocks) == 2


def test_groups_each_go_over_all_the_data() -> None:
    run = simulated(small_task(n=40), workers=4, groups=2, stop=dure.Stop(rounds=1))
    assert run.summary["samples"] == 2 * 40


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(
    staleness: int | None, tmp_path: Path
) -> None:
    task = small_task(optimizer=ADAM)
    strategy = dure.ParameterServer(servers=2, workers=3, batch_size=9, staleness=staleness)
    whole = dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=4))
    dure.train(task, strategy, dure.Simulated(), dure.Stop(rounds=2), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(rounds=4))
    assert same_bits(whole, again)
    assert whole.summary["facts"] == again.summary["facts"]
    assert whole.summary["per_worker"][2:] == again.summary["per_worker"][2:]
    numbers = ("virtual_seconds", "pushes", "staleness", "waiting")
    assert [whole.summary["numbers"][n] for n in numbers] == [
        again.summary["numbers"][n] for n in numbers
    ]


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 3)
    ).double()


def test_draws_are_those_of_the_ranks_of_data_parallel() -> None:
    task = small_task(model=with_dropout, n=40)
    run = simulated(task, workers=2)
    ranks = dure.train(task, dure.DataParallel(8), dure.Processes(2), dure.Stop(epochs=2))
    assert largest_difference(run, ranks) < 1e-12


class WithOneUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3).double()
        self.unused = nn.Linear(2, 2).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(inputs)
        return result


def test_what_has_no_gradient_stays_as_it_is_or_is_named() -> None:
    task = small_task(model=WithOneUnused)
    assert same_bits(simulated(task, workers=1), alone(task))
    with pytest.raises(ValueError, match=r"unused\.weight has no gradient"):
        simulated(small_task(model=WithOneUnused, optimizer=MOMENTUM), workers=1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"servers": 0}, "servers is 0"),
        ({"staleness": -1}, "staleness is -1"),
        ({"workers": 3, "groups": 2}, "3 workers cannot be divided into 2 groups"),
        ({"replicas": 1}, "replicas is 1 with servers=1"),
        ({"servers": 2, "replicas": 2}, "replicas is 2"),
        ({"period": 0}, "period is 0"),
        ({"slows_stale": True}, "with staleness=0 no gradient is"),
        ({"workers": 9, "batch_size": 8}, "joint batch of 8 cannot be divided over 9"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_all(dure.ParameterServer(**fields), small_task(), None)


def test_optimizers_that_look_at_whole_parameters_are_refused_by_name() -> None:
    task = small_task(optimizer=partial(torch.optim.LBFGS, lr=0.1))
    with pytest.raises(ValueError, match="whether LBFGS updates every element independently"):
        check_all(dure.ParameterServer(), task, None)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_optimizer_begins_with_the_state_that_its_arguments_make(workers: int) -> None:
    adagrad = partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.7, lr_decay=0.01)
    task = small_task(optimizer=adagrad)
    run = simulated(task, servers=2, workers=workers)
    assert largest_difference(run, alone(task)) < 1e-12
    other = small_task(optimizer=partial(torch.optim.Adagrad, lr=0.1))
    assert largest_difference(run, alone(other)) > 1e-3


def with_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def with_history(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adagrad(parameters, lr=0.1)
    for state in optimizer.state.values():
        state["sum"].fill_(3.0)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "said"), [(with_hook, "SGD has hooks"), (with_history, "loaded a state")]
)
def test_an_optimizer_with_more_than_its_settings_is_refused(optimizer: Any, said: str) -> None:
    for strategy in (dure.ParameterServer(), dure.Downpour()):
        with pytest.raises(ValueError, match=said):
            check_all(strategy, small_task(optimizer=optimizer), None)


def test_conditions_of_clients_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="drop out applies to clients"):
        dure.train(small_task(), dure.ParameterServer(), dure.Simulated(drop_out=0.1), STOP)


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"need 4 ranks including the leader, but the world has 3"):
        dure.train(small_task(), dure.ParameterServer(), dure.Processes(3), STOP)

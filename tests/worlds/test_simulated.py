"""A federation under a virtual clock: what happens when, and that it is the same again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.errors import TooFewClientsError
from dure.federated.engines import processes
from dure.federated.engines.batched import BatchedEngine
from dure.federated.engines.loop import LoopEngine
from dure.fleet.devices import parse_devices
from small import largest_difference, network, same_bits, small_task

K = 8


def train(strategy: Any, rounds: int = 4, seed: int = 0, **world: Any) -> dure.Run:
    return dure.train(
        small_task(),
        strategy,
        dure.Simulated(engine="loop", **world),
        dure.Stop(rounds=rounds),
        seed=seed,
    )


def numbers(run: dure.Run, name: str) -> list[float]:
    return [float((step.numbers or {})[name] or 0.0) for step in run.history.steps]


def facts(run: dure.Run) -> dict[str, Any]:
    told: dict[str, Any] = run.summary["facts"][0]
    return told


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    devices = parse_devices("lognormal:1")
    run = train(dure.FedAvg(clients=K, batch_size=4), rounds=1, devices=devices)
    sizes = [len(part) for part in dure.FedAvg(clients=K).divide(small_task(), 0)]
    model = sum(p.numel() for p in run.model.parameters()) * 8
    expected = max(
        sum(devices.of(client, 0).seconds(size, model, model)) for client, size in enumerate(sizes)
    )
    assert numbers(run, "virtual_seconds") == [pytest.approx(expected, rel=1e-12)]


@pytest.mark.parametrize("selection", ["uniform", "uniform:1:5:1"])
def test_work_that_is_always_slow_takes_as_long_as_on_a_slow_device(selection: str) -> None:
    def clock(devices: str) -> list[float]:
        # With a deadline clients of FedProx do as much as they can until then.
        epochs = 5 if selection == "uniform" else 50
        strategy = dure.FedProx(clients=K, batch_size=4, local_epochs=epochs, selection=selection)
        return numbers(train(strategy, rounds=2, devices=devices), "virtual_seconds")

    slow, quick, now_and_then = map(clock, ("jitter:1:6", "jitter:0:6", "jitter:0.5:6"))
    assert slow == pytest.approx(clock("stragglers:1:6"))
    assert quick[-1] < slow[-1]
    assert quick[-1] <= now_and_then[-1] <= slow[-1]


def test_a_round_in_which_nobody_was_asked_has_no_loss(tmp_path: Path) -> None:
    strategy = dure.FedAvg(clients=K, fraction=0.125, batch_size=4, selection="poisson")
    run = dure.train(
        small_task(),
        strategy,
        dure.Simulated(engine="loop"),
        dure.Stop(rounds=12),
        out=tmp_path / "run",
    )
    empty = [not updates for updates in numbers(run, "updates")]
    assert {True, False} == set(empty)
    assert [step.loss is None for step in run.history.steps] == empty
    assert [step.loss for step in dure.load_run(tmp_path / "run", network).history.steps] == [
        step.loss for step in run.history.steps
    ]
    assert (
        run.summary["train_loss"]
        == [step.loss for step in run.history.steps if step.loss is not None][-1]
    )


def test_every_byte_and_second_of_a_client_is_counted() -> None:
    run = train(dure.FedAvg(clients=4, batch_size=4), rounds=3, devices="stragglers:0.5:10")
    server, *clients = run.summary["per_worker"]
    size = sum(p.numel() for p in run.model.parameters()) * 8
    assert server["bytes_sent"] == server["bytes_received"] == 3 * 4 * size
    assert all(one["bytes_sent"] == one["bytes_received"] == 3 * size for one in clients)
    assert all(one["compute_seconds"] > 0 and one["communication_seconds"] > 0 for one in clients)


def test_stragglers_that_miss_the_deadline_are_refused_and_cost_their_bytes() -> None:
    strategy = dure.FedAvg(clients=K, batch_size=4, selection="uniform:1:0.2:1")
    run = train(strategy, rounds=6, devices="stragglers:0.5:1000")
    assert (
        sum(numbers(run, "late")) + facts(run)["outcomes"].get("late", 0) > 0
        or numbers(run, "updates")[0] < K
    )
    assert max(numbers(run, "updates")) < K
    assert numbers(run, "virtual_seconds")[0] == pytest.approx(0.2)


def test_fed_prox_takes_what_stragglers_have_done_by_then() -> None:
    options: dict[str, Any] = {
        "clients": K,
        "local_epochs": 4,
        "batch_size": 2,
        "selection": "uniform:1:0.5:1",
    }
    dropped = train(dure.FedAvg(**options), rounds=2, devices="stragglers:0.5:20")
    kept = train(dure.FedProx(mu=0.0, **options), rounds=2, devices="stragglers:0.5:20")
    assert numbers(dropped, "updates")[0] < K
    assert numbers(kept, "updates") == [K, K]
    full = train(dure.FedProx(mu=0.0, **options), rounds=2)
    assert dropped.summary["samples"] < kept.summary["samples"] < full.summary["samples"]


def test_clients_that_drop_out_are_replaced_and_their_work_is_lost() -> None:
    run = train(dure.FedAvg(clients=20, fraction=0.25, batch_size=4), rounds=8, drop_out=0.4)
    assert numbers(run, "updates") == [5.0] * 8
    outcomes = facts(run)["outcomes"]
    assert outcomes["accepted"] == 40
    assert outcomes["dropped out"] == sum(numbers(run, "failed")) > 5
    assert (
        run.summary["per_worker"][0]["bytes_sent"] > run.summary["per_worker"][0]["bytes_received"]
    )


def test_clients_are_asked_when_they_are_there_and_lost_when_they_leave() -> None:
    run = train(
        dure.FedAvg(clients=10, fraction=0.5, batch_size=4),
        rounds=12,
        availability="probability:0.5:1",
        devices="equal:30",
    )
    flights = facts(run)["flights"]
    assert {flight[4] for flight in flights} >= {"accepted", "went offline"}
    settings = dure.Simulated(availability="probability:0.5:1").availability
    for client, _, began, ended, outcome in flights:
        assert settings.next(client, began, 0) == pytest.approx(began, abs=1e-5)
        if outcome == "accepted":
            assert settings.until(client, began, 0) >= ended - 1e-5


def test_where_nobody_ever_comes_the_run_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dure.federated.server.coordinator.ATTEMPTS", 20)
    path = tmp_path / "away.csv"
    path.write_text("client,start,end\n" + "".join(f"{client},1e15,1e16\n" for client in range(4)))
    with pytest.raises(TooFewClientsError, match="no client answered"):
        train(dure.FedAvg(clients=4), availability=f"file:{path}")


@pytest.mark.parametrize(
    "strategy",
    [dure.FedAvg(clients=4, fraction=0.5), dure.FedBuff(clients=4, fraction=0.5, buffer=3)],
)
def test_where_all_have_left_for_the_last_time_the_run_ends_at_once(
    strategy: Any, tmp_path: Path
) -> None:
    path = tmp_path / "left.csv"
    path.write_text(
        "client,start,end\n" + "".join(f"{client},0,{1 + client}\n" for client in range(4))
    )
    world = dure.Simulated(engine="loop", availability=f"file:{path}")
    with pytest.raises(TooFewClientsError, match="no client is available after"):
        dure.train(
            small_task(),
            strategy,
            world,
            dure.Stop(rounds=1000),
            out=tmp_path / "run",
            checkpoint_every=1,
        )
    with pytest.raises(TooFewClientsError, match="no client is available after"):
        dure.resume(tmp_path / "run", task=small_task())


def test_data_that_arrive_later_are_trained_on_later() -> None:
    run = train(
        dure.FedAvg(clients=2, batch_size=None),
        rounds=9,
        arrival="arriving:0.1:1",
        devices="equal:40",
    )
    samples = [step.samples for step in run.history.steps]
    each = [after - before for before, after in zip([0, *samples], samples, strict=False)]
    assert each[0] < each[-1] == 41
    assert each == sorted(each)


def test_asynchronous_clients_do_not_wait_for_stragglers() -> None:
    world: dict[str, Any] = {"devices": "stragglers:0.25:50"}
    rounds = train(dure.FedAvg(clients=K, batch_size=4), rounds=4, **world)
    updates = train(dure.FedAsync(clients=K, fraction=1.0, batch_size=4), rounds=4 * K, **world)
    assert numbers(updates, "virtual_seconds")[-1] < numbers(rounds, "virtual_seconds")[-1] / 2
    assert max(value for value, _ in facts(updates)["staleness"]) >= 3


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=K, fraction=0.5, batch_size=4, selection="uniform:1.5:2:2"),
        dure.Scaffold(clients=K, fraction=0.5, batch_size=4),
        dure.FedYogi(clients=K, fraction=0.5, batch_size=4),
        dure.FedAsync(clients=K, fraction=0.5, batch_size=4),
        dure.FedAsync(clients=K, batch_size=4, stale=3),
        dure.FedBuff(clients=K, fraction=0.5, batch_size=4, buffer=3),
        dure.FedPer(clients=K, fraction=0.5, batch_size=4),
        dure.Ditto(clients=K, fraction=0.5, batch_size=4),
        dure.PerFedAvg(clients=K, fraction=0.5, batch_size=4),
        dure.ByzantineGD(clients=K, groups=3),
        dure.FedAvg(clients=K, batch_size=4, aggregate="centred-clipping:1"),
    ],
    ids=lambda strategy: strategy.label,
)
def test_ended_at_any_round_and_gone_on_with_it_has_the_same_bits(
    strategy: Any, tmp_path: Path
) -> None:
    world = dure.Simulated(
        devices="lognormal:1", availability="probability:0.8:5", drop_out=0.1, engine="loop"
    )
    whole = dure.train(small_task(), strategy, world, dure.Stop(rounds=6))
    dure.train(small_task(), strategy, world, dure.Stop(rounds=1), out=tmp_path)
    for rounds in (4, 6):
        again = dure.resume(tmp_path, task=small_task(), stop=dure.Stop(rounds=rounds))
    assert same_bits(whole, again)
    assert numbers(whole, "virtual_seconds") == numbers(again, "virtual_seconds")
    assert facts(whole) == facts(again)
    assert whole.history.evaluations[-1].metrics == again.history.evaluations[-1].metrics
    assert [one["bytes_sent"] for one in whole.summary["per_worker"]] == [
        one["bytes_sent"] for one in again.summary["per_worker"]
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"drop_out": 1.0}, "drop_out is 1.0, but it has to be in .0, 1."),
        ({"attack": "sign-flip"}, "an attack needs attackers, and attackers need an attack"),
        ({"attackers": 3}, "an attack needs attackers, and attackers need an attack"),
        (
            {"attack": "alie", "attackers": 2.5},
            "attackers is 2.5, but it has to be an integer",
        ),
        (
            {"attack": "alie", "attackers": math.inf},
            "attackers is inf, but it has to be an integer",
        ),
        ({"devices": "equall"}, "did you mean 'equal'"),
        ({"attack": "alie", "attackers": math.inf}, "attackers is inf"),
        ({"processes": 0}, "processes is 0, but it has to be 1 or more"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dure.Simulated(**changes)


def with_dropout() -> nn.Module:
    return nn.Sequential(network(), nn.Dropout(0.1))


@pytest.mark.parametrize(
    ("strategy", "world", "task", "complaint"),
    [
        (
            {},
            {"attack": "alie", "attackers": 11},
            {},
            "the run has 11 attackers, but only 10 clients",
        ),
        (
            {},
            {"attack": "alie", "attackers": 0.01},
            {},
            "0.01, but this share of 10 clients is less",
        ),
        (
            {},
            {"attack": "backdoor:3", "attackers": 1},
            {},
            "there is no class 3, classes are 0 to 2",
        ),
        (
            {},
            {"attack": "label-flip", "attackers": 1},
            {
                "train": (torch.zeros(20, 6).double(), torch.zeros(20, 3).double()),
                "loss": F.mse_loss,
            },
            "label-flip needs a task with classes, but this one has none",
        ),
        (
            {"clients": None, "partition": "natural-key"},
            {"attack": "alie", "attackers": 4},
            {},
            "the run has 4 attackers, but only 3 clients",
        ),
        (
            {},
            {"engine": "batched"},
            {"model": with_dropout},
            "batched cannot compute this: the model draws random",
        ),
        (
            {},
            {"engine": "batched-processes"},
            {"model": with_dropout},
            "cannot compute this: the model draws random",
        ),
        (
            {"selection": "uniform:1:1:400"},
            {},
            {},
            "minimum is 400, but a round asks at most 10 of the 10",
        ),
        (
            {"selection": "uniform:1.2:9:7", "fraction": 0.5},
            {},
            {},
            "minimum is 7, but a round asks at most 6",
        ),
        (
            {"selection": "poisson:1:9:11", "fraction": 0.5},
            {},
            {},
            "minimum is 11, but a round asks at most 10",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_folder_is_made(
    strategy: Any, world: Any, task: Any, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=complaint):
        dure.train(
            small_task(**task),
            dure.FedAvg(**strategy),
            dure.Simulated(**world),
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_engines_on_ray_are_refused_at_once_where_there_is_no_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dure.federated.engines.engine_choice.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the engine batched-ray needs the extra"):
        dure.train(
            small_task(), dure.FedAvg(), dure.Simulated(engine="batched-ray"), out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_as_many_as_there_are_can_be_asked_by_any_factor() -> None:
    run = train(dure.FedAvg(clients=K, fraction=0.5, selection="uniform:1e308"), rounds=1)
    assert len(facts(run)["flights"]) >= K / 2


def test_what_is_never_combined_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    trained = LoopEngine._train
    monkeypatch.setattr(
        LoopEngine, "_train", lambda self, job: done.append(job.client) or trained(self, job)
    )
    run = train(
        dure.FedAvg(clients=K, batch_size=None, selection="uniform:1:0.2:1"),
        devices="stragglers:0.5:1000",
    )
    assert len(done) == sum(numbers(run, "updates")) < 4 * K


@pytest.mark.parametrize("engine", ["batched", "batched-processes"])
def test_a_resumed_run_computes_the_same_clients_together(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[list[int]] = []

    def noting(does: Any, place: int) -> Any:
        return lambda *args: together.append([job.client for job in args[place]]) or does(*args)

    if engine == "batched":
        monkeypatch.setattr(BatchedEngine, "_cohort", noting(BatchedEngine._cohort, 1))
    else:
        monkeypatch.setattr(processes, "Chunk", noting(processes.Chunk, 0))
    strategy = dure.FedBuff(
        clients=20, fraction=0.5, buffer=3, batch_size=4, partition="quantity-skew:0.5"
    )
    world = dure.Simulated(devices="lognormal:1", engine=engine, processes=2)
    task = small_task(n=100)
    whole = dure.train(task, strategy, world, dure.Stop(rounds=6))
    expected, together[:] = list(together), []
    dure.train(task, strategy, world, dure.Stop(rounds=1), out=tmp_path)
    for rounds in range(2, 7):
        again = dure.resume(tmp_path, task=task, stop=dure.Stop(rounds=rounds))
    assert together == expected
    assert max(map(len, together)) > 3
    assert same_bits(whole, again)


def test_an_engine_that_gains_nothing_by_it_computes_nothing_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[int] = []
    trained = LoopEngine._train
    monkeypatch.setattr(
        LoopEngine, "_train", lambda self, job: done.append(job.client) or trained(self, job)
    )
    train(dure.FedBuff(clients=K, fraction=1.0, buffer=2), rounds=3)
    assert len(done) == 6


def test_attackers_are_not_told_to_the_server_and_robust_rules_stand_them() -> None:
    world: dict[str, Any] = {"attack": "large:1e30", "attackers": 2}
    clean = train(dure.FedSGD(clients=K), rounds=6)
    start = train(dure.FedAvg(clients=K, server_lr=1e-300), rounds=1)
    far = largest_difference(clean, start)
    mean = train(dure.FedSGD(clients=K), rounds=1, **world)
    assert (
        not math.isfinite(largest_difference(mean, clean)) or largest_difference(mean, clean) > 1e20
    )
    for rule in (
        "median",
        "krum:2",
        "geometric-median",
        "trimmed-mean:0.25",
        "geometric-median-of-means:8",
    ):
        run = train(dure.FedSGD(clients=K, aggregate=rule), rounds=6, **world)
        assert largest_difference(run, start) < 4 * far, rule
        updates = facts(run)["updates"]
        assert sum(lies for _, _, lies, *_ in updates) == 2 * 6
        assert len({client for _, client, lies, *_ in updates if lies}) == 2

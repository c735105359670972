"""What clients measure on their own data: over all of it, one by one, and on what has just come."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dure
from dure.collectives.group import Group
from dure.data.client_part import split_held_out
from dure.data.partition import NaturalKey
from dure.federated.client.clients import FederatedClients
from dure.federated.server.server import FederatedServer
from dure.federated.strategy import Federated
from dure.protocol.server_context import ServerContext
from dure.tasks.measurement import Measurement
from small import examples, small_task
from small import network as small_network

KEYED: dict[str, Any] = {"clients": None, "partition": "natural-key", "batch_size": 4}
LOOP = dure.Simulated(engine="loop")


def confusion(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    table = torch.zeros(3, 3, dtype=torch.float64)
    table.index_put_((targets, outputs.argmax(1)), torch.ones(len(targets)).double(), True)
    return {"table": table, "parts": (len(targets), [table.sum(0)])}


def f1(sums: dict[str, Any]) -> Tensor:
    right = sums["table"].diag()
    (columns,) = sums["parts"][1]
    score: Tensor = (2 * right / (sums["table"].sum(1) + columns).clamp(min=1)).mean()
    return score * sums["parts"][0] / sums["table"].sum()


def spread(outputs: Tensor, targets: Tensor) -> float:
    """A number of everything, which does not add."""
    return float(outputs.std() + targets.double().var())


METRICS = {
    "accuracy": lambda outputs, targets: ((outputs.argmax(1) == targets).sum(), len(targets)),
    "f1": dure.SumMetric(confusion, f1),
    "spread": spread,
}


def learner(
    strategy: Federated, task: dure.Task, **conditions: Any
) -> tuple[FederatedServer, FederatedClients]:
    world = dure.Simulated(engine="loop", **conditions)
    context = ServerContext(Group(), kind="clients", conditions=world)
    made = []

    def carrier(clients: Any, seed: int) -> Any:
        from dure.worlds.simulated import FederationSimulation

        made.append(clients)
        return FederationSimulation(world, clients, seed)

    context.carrier = carrier
    server = strategy.learner(task, context, 0)
    assert isinstance(server, FederatedServer)
    return server, made[0]


def over(task: dure.Task, server: FederatedServer, data: Any, indices: Tensor) -> dict[str, float]:
    """Every metric of the server's model on these examples."""
    server.weights()
    measurement = Measurement(task, len(indices), len(indices))
    inputs, targets = data.batch(indices)
    with torch.no_grad():
        measurement.add(server.model.eval()(inputs), targets, len(indices))
    return measurement.values(Group())


def test_a_metric_over_clients_is_that_over_all_their_examples() -> None:
    task = small_task(n=90, metrics=METRICS, eval_batch_size=5)
    server, clients = learner(
        dure.FedAvg(clients=4, held_out=0.4, partition="quantity-skew:0.5", batch_size=4), task
    )
    server.advance(0)
    found = server.evaluate()
    held = [clients.personal.held_out[client] for client in clients.personal.clients]
    assert len({len(part) for part in held}) > 1
    together = over(task, server, task.train, torch.cat(held))
    alone = [over(task, server, task.train, part) for part in held]
    for name in ("loss", "accuracy", "f1"):
        assert found[f"client_{name}"] == pytest.approx(together[name], abs=1e-12)
    # A function of everything does not add: it is the mean, weighted by examples.
    weighted = sum(len(part) * one["spread"] for part, one in zip(held, alone, strict=True))
    assert found["client_spread"] == pytest.approx(weighted / sum(map(len, held)), abs=1e-12)
    assert server.facts()["means_by_examples"] == ["client_spread"]
    for name in together:
        values = torch.tensor([one[name] for one in alone], dtype=torch.float64)
        assert found[f"client_{name}_mean"] == pytest.approx(float(values.mean()), abs=1e-12)
        assert found[f"client_{name}_p50"] == pytest.approx(float(values.quantile(0.5)), abs=1e-12)
        low, high = float(values.quantile(0.1)), float(values.quantile(0.9))
        falls = name == "loss"
        worst = float(values.max() if falls else values.min())
        assert found[f"client_{name}_worst"] == pytest.approx(worst, abs=1e-12)
        assert found[f"client_{name}_p10"] == pytest.approx(high if falls else low, abs=1e-12)
        assert found[f"client_{name}_p90"] == pytest.approx(low if falls else high, abs=1e-12)


def test_test_data_with_keys_are_divided_by_client() -> None:
    # Of the three owners, the first has most; none of the examples is left out.
    test = examples(30, seed=1)
    test.keys = ["owner 0"] * 14 + ["owner 2"] * 7 + ["owner 1"] * 9
    task = small_task(test=test, metrics=METRICS)
    server, _ = learner(dure.FedAvg(**KEYED), task)
    server.advance(0)
    found = server.evaluate()
    for name in ("loss", "accuracy", "f1"):
        assert found[f"client_{name}"] == pytest.approx(found[f"test_{name}"], abs=1e-12)
    parts = [range(14), range(21, 30), range(14, 21)]
    alone = [over(task, server, test, torch.tensor(part))["loss"] for part in parts]
    facts = server.facts()
    assert facts["by_client"]["client_loss"] == pytest.approx(alone, abs=1e-12)
    assert facts["examples_by_client"]["client_loss"] == [14, 9, 7]


def test_keys_that_no_client_has_and_clients_without_a_test_example_are_named() -> None:
    test = examples(20, seed=1)
    test.keys = ["owner 1"] * 12 + ["somebody else"] * 8
    with pytest.warns(UserWarning, match="cannot measure") as warned:
        run = dure.train(small_task(test=test), dure.FedAvg(**KEYED), LOOP, dure.Stop(rounds=2))
    texts = [str(one.message) for one in warned]
    assert any("1 keys of the test data belong to no client (somebody else)" in t for t in texts)
    assert sum('client 0 ("owner 0") cannot measure' in text for text in texts) == 1
    (facts,) = run.summary["facts"]
    assert facts["measured_clients"] == [1]
    assert facts["not_measured"] == [[k, "it has no examples to measure with", 3] for k in (0, 2)]
    assert run.summary["client_failures"] == 2


@pytest.mark.parametrize("changes", [{"clients": 3, "partition": "iid"}, {"clients": 1}])
def test_keys_of_test_data_mean_nothing_to_other_partitions(changes: dict[str, Any]) -> None:
    run = dure.train(small_task(), dure.FedAvg(**{**KEYED, **changes}), LOOP, dure.Stop(rounds=1))
    assert set(run.history.evaluations[-1].metrics) == {"test_loss", "test_accuracy"}


def test_what_is_held_out_goes_before_the_test_data_and_keeps_its_bits() -> None:
    run = dure.train(small_task(), dure.FedAvg(**KEYED, held_out=0.2), LOOP, dure.Stop(rounds=1))
    (facts,) = run.summary["facts"]
    assert facts["examples_by_client"]["client_loss"] == [3, 3, 3]


def test_the_newest_examples_of_each_client_are_held_out() -> None:
    parts = [torch.arange(0, 20, 2), torch.tensor([1]), torch.arange(21, 40, 3)]
    own, kept = split_held_out(parts, 0.3, 0, "newest")
    assert [part.tolist() for part in own] == [
        [0, 2, 4, 6, 8, 10, 12],
        [1],
        [21, 24, 27, 30, 33],
    ]
    assert [part.tolist() for part in kept] == [[14, 16, 18], [], [36, 39]]
    drawn, _ = split_held_out(parts, 0.3, 0)
    assert drawn[0].tolist() != own[0].tolist()
    assert len(drawn[0]) == len(own[0])


def test_a_test_example_of_nobody_is_nobodys() -> None:
    parts = NaturalKey().divide_test(None, ["b", "a", "b"], ["b", "c", "a", "b"])
    assert parts is not None
    assert [part.tolist() for part in parts] == [[2], [0, 3]]
    assert NaturalKey().divide_test(1, ["b", "a"], ["b"]) is None
    assert NaturalKey().divide_test(None, ["a"], None) is None


def one_class_raises(outputs: Tensor, targets: Tensor) -> float:
    if len(set(targets.tolist())) < 2:
        raise RuntimeError("there is one class alone")
    return 0.5


def test_a_client_that_cannot_measure_ends_nothing_and_is_named() -> None:
    data = examples(60)
    data.keys = [
        f"has {int(target)}" if target < 2 and i % 3 else "has all"
        for i, target in enumerate(data.targets)
    ]
    metrics = {**METRICS, "auc": one_class_raises}
    strategy = dure.FedAvg(**KEYED, held_out=0.4)
    task = small_task(train=data, metrics=metrics)
    with pytest.warns(UserWarning, match="cannot measure: the metric 'auc' failed") as warned:
        run = dure.train(task, strategy, LOOP, dure.Stop(rounds=2))
    assert len([one for one in warned if "cannot measure" in str(one.message)]) == 1
    assert run.summary["ended"] == "rounds"
    (facts,) = run.summary["facts"]
    wrong = "the metric 'auc' failed: RuntimeError: there is one class alone"
    by_client = facts["by_client"]
    failed = [client for client, reason, times in facts["not_measured"] if reason == wrong]
    assert failed
    assert len(failed) < 3
    for client in range(3):
        assert (by_client["client_auc"][client] is None) == (client in failed)
        # The other metrics of such a client are there.
        assert by_client["client_accuracy"][client] is not None
    assert run.summary["client_failures"] == len(failed)
    assert run.summary["client_auc"] == 0.5


def test_a_model_that_fails_on_a_clients_examples_fails_for_that_client_alone() -> None:
    class Refuses(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_network()

        def forward(self, inputs: Tensor) -> Tensor:
            if not self.training and bool((inputs[:, 0] > 1e6).any()):
                raise IndexError("index 7 is out of range")
            return self.inner(inputs)  # type: ignore[no-any-return]

    test = examples(12, seed=1)
    test.keys = [f"owner {i % 3}" for i in range(12)]
    test.inputs[1, 0] = 1e7
    task = small_task(model=Refuses, test=None)
    server, clients = learner(dure.FedAvg(**KEYED, held_out=0.3), task)
    clients.personal.examples = test
    clients.personal.held_out = [torch.arange(k, 12, 3) for k in range(3)]
    with pytest.warns(UserWarning, match='client 1 \\("owner 1"\\) cannot measure: IndexError'):
        server.evaluate()
    assert server.facts()["measured_clients"] == [0, 2]


def test_a_number_that_is_not_finite_spoils_no_other_clients() -> None:
    data = examples(30)
    data.inputs[0, 0] = float("nan")
    task = small_task(train=data, test=None)
    server, clients = learner(dure.FedAvg(**KEYED, held_out=0.3), task)
    clients.personal.held_out[0] = torch.tensor([0, 3])
    found = server.evaluate()
    assert math.isfinite(found["client_loss"])
    assert not math.isfinite(server.facts()["by_client"]["client_loss"][0])


ARRIVAL = "arriving:0.3:1"


def test_the_newest_data_are_those_that_nobody_has_trained_on() -> None:
    server, clients = learner(
        dure.FedAvg(**KEYED, freeze_at=1), small_task(test=None, n=90), arrival=ARRIVAL
    )
    seen: list[set[int]] = [set(), set(), set()]
    rounds = 0
    while server.carrier.now < 0.8:
        now = server.carrier.now
        come = [set(clients._come(client, now).tolist()) for client in range(3)]
        there = [set(clients.data.indices(client, now).tolist()) for client in range(3)]
        for client in range(3):
            assert come[client] == there[client] - seen[client]
        found = server.evaluate()
        assert ("newest_loss" in found) == any(come)
        assert ("frozen_newest_loss" in found) == (any(come) and rounds >= 1)
        if any(come):
            union = torch.tensor(sorted(set().union(*come)))
            task = server.task
            expected = over(task, server, task.train, union)["loss"]
            assert found["newest_loss"] == pytest.approx(expected, abs=1e-12)
        if rounds == 1 and any(come):
            assert found["frozen_newest_loss"] == found["newest_loss"]
        # All of them begin a round together, with what they have then.
        seen = there
        server.advance(0)
        rounds += 1
    assert rounds >= 2
    assert any(come)


STREAM = dure.FedAvg(**KEYED, held_out=0.2, held_out_order="newest", freeze_at=1)
STREAM_WORLD: dict[str, Any] = {"arrival": "window:0.4:1", "devices": "lognormal:1"}


@pytest.mark.parametrize(
    ("strategy", "every"),
    [(STREAM, 1), (STREAM, 3), (dure.FedBuff(**KEYED, fraction=0.6, buffer=2, freeze_at=2), 2)],
)
def test_a_resumed_run_measures_the_same_to_the_bit(
    strategy: Federated, every: int, tmp_path: Path
) -> None:
    task = small_task(n=60)
    world = dure.Simulated(engine="loop", **STREAM_WORLD)
    whole = dure.train(task, strategy, world, dure.Stop(rounds=6), evaluate_every=every)
    folder = tmp_path / "run"
    dure.train(task, strategy, world, dure.Stop(rounds=4), out=folder, evaluate_every=every)
    resumed = dure.resume(folder, task=task, stop=dure.Stop(rounds=6))
    for key in ("newest_loss", "frozen_newest_loss"):
        assert any(key in one.metrics for one in whole.history.evaluations)
    last = resumed.history.evaluations[-1]
    assert last.metrics == whole.history.evaluations[-1].metrics
    told, other = (run.summary["facts"][0] for run in (whole, resumed))
    for key in ("by_client", "examples_by_client", "measured_clients"):
        assert str(told[key]) == str(other[key])


@pytest.mark.parametrize("engine", ["batched", "loop-processes"])
def test_engines_measure_the_same(engine: Any) -> None:
    task = small_task(n=60, metrics=METRICS)
    runs = [
        dure.train(
            task,
            STREAM,
            dure.Simulated(engine=one, processes=2, **STREAM_WORLD),
            dure.Stop(rounds=3),
        )
        for one in ("loop", engine)
    ]
    for one, other in zip(*(run.history.evaluations for run in runs), strict=True):
        assert one.metrics == pytest.approx(other.metrics, abs=1e-9, nan_ok=True)
    told = [run.summary["facts"][0]["examples_by_client"] for run in runs]
    assert told[0] == told[1]


def test_a_state_of_an_older_dure_is_read() -> None:
    server, _ = learner(dure.FedAvg(**KEYED, held_out=0.2), small_task())
    server.advance(0)
    server.evaluate()
    state, weights = server.state(), server.weights()
    measured = state["server"]["measured"]
    state["server"] = {
        **{key: value for key, value in state["server"].items() if key != "frozen"},
        "measured": {"clients": measured["clients"], "values": measured["values"]},
    }
    del state["carrier"]["clients"]["trained"]
    other, _ = learner(dure.FedAvg(**KEYED, held_out=0.2), small_task())
    other.restore(weights, state)
    assert other.facts()["by_client"] == server.facts()["by_client"]
    assert other.evaluate() == server.evaluate()


def test_a_target_may_be_what_clients_measure_also_without_test_data() -> None:
    task = small_task(test=None)
    run = dure.train(
        task,
        dure.FedAvg(**KEYED, held_out=0.2),
        LOOP,
        dure.Stop(rounds=60, target={"client_accuracy": 0.5, "client_accuracy_worst": 0.2}),
    )
    assert run.summary["ended"] == "target"
    assert run.summary["client_accuracy"] >= 0.5
    assert run.summary["to_target"]["client_accuracy"]["reached"] is not None


@pytest.mark.parametrize(
    ("strategy", "conditions", "target"),
    [
        (dure.FedAvg(**KEYED), {}, "newest_accuracy"),
        (dure.FedAvg(**KEYED), {}, "client_precision"),
        (dure.FedAvg(clients=3), {}, "client_accuracy"),
        (dure.FedAvg(**KEYED), {}, "personal_accuracy"),
        (dure.FedAvg(**KEYED), {"arrival": ARRIVAL}, "frozen_newest_accuracy"),
    ],
)
def test_a_target_that_no_client_measures_is_refused_before_training(
    strategy: Federated, conditions: dict[str, Any], target: str
) -> None:
    world = dure.Simulated(**conditions)
    with pytest.raises(
        ValueError, match=f"the target '{target}' is not measured; available metrics:"
    ):
        dure.train(small_task(), strategy, world, dure.Stop(rounds=1, target={target: 0.5}))


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(**KEYED, fine_tune=1),
        dure.FedPer(**KEYED),
        dure.Ditto(**KEYED),
        dure.PerFedAvg(**KEYED),
    ],
)
def test_all_that_is_announced_is_measured(strategy: Federated) -> None:
    task = small_task()
    world = dure.Simulated(engine="loop", arrival=ARRIVAL)  # type: ignore[arg-type]
    run = dure.train(task, strategy, world, dure.Stop(rounds=1))
    announced = set(strategy.measures(task, small_network(), world))
    assert {name for one in run.history.evaluations for name in one.metrics} == announced


@pytest.mark.parametrize(
    ("strategy", "conditions", "message"),
    [
        (dure.FedAvg(freeze_at=2), {}, "no data arrive in this run"),
        (dure.FedAvg(freeze_at=-1), {"arrival": ARRIVAL}, "freeze_at is -1"),
        (dure.FedPer(freeze_at=2), {"arrival": ARRIVAL}, "has only a part of it"),
        (dure.FedAvg(held_out_order="oldest"), {}, "held_out_order is 'oldest'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_measured_is_refused(
    strategy: Federated, conditions: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dure.train(small_task(), strategy, dure.Simulated(**conditions), dure.Stop(rounds=1))


@pytest.mark.parametrize(
    ("names", "meets"),
    [(["hits", "hits_mean"], "client_hits_mean"), (["failures"], "client_failures")],
)
def test_two_numbers_of_one_name_are_refused(names: list[str], meets: str) -> None:
    task = small_task(metrics=dict.fromkeys(names, METRICS["accuracy"]))
    with pytest.raises(ValueError, match=f"two numbers would be reported as {meets}"):
        dure.train(task, dure.FedAvg(held_out=0.2), LOOP, dure.Stop(rounds=1))
    dure.train(task, dure.FedAvg(), LOOP, dure.Stop(rounds=1))

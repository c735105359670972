"""A federation's server whose link is finite: times by the rule, bytes unchanged, resumed alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dure
from dure.fleet.devices import parse_devices
from dure.fleet.energy import Joules, NoEnergy, parse_energy
from dure.fleet.server_link import ServerLink
from dure.fleet.upload import upload
from small import same_bits, small_task

K = 6
JOULES = "joules:1e-9:2e-6:9e-6"


def train(rounds: int, strategy: dure.Strategy | None = None, **world: Any) -> dure.Run:
    strategy = strategy or dure.FedAvg(clients=K, batch_size=4)
    place = dure.Simulated(engine="loop", **world)
    return dure.train(small_task(), strategy, place, dure.Stop(rounds=rounds))


def facts(run: dure.Run) -> dict[str, Any]:
    told: dict[str, Any] = run.summary["facts"][0]
    return told


def test_messages_queue_at_the_servers_link_each_way() -> None:
    mbit = 0.01
    devices = parse_devices("lognormal:1:1000")
    run = train(1, devices=devices, server_mbit=mbit)
    sizes = [len(part) for part in dure.FedAvg(clients=K).divide(small_task(), 0)]
    model = sum(p.numel() for p in run.model.parameters()) * 8
    speed = mbit * 1e6 / 8
    # All assignments are sent at 0, in the order in which clients are asked, which is not told:
    # only the order of the queue is not known, so each possible one is looked for.
    flights = facts(run)["flights"]
    order = [flight[0] for flight in flights]
    turns = {tuple(order), tuple(range(K))}
    found = run.history.series("virtual_seconds")[1]
    assert any(
        found == [pytest.approx(_round(turn, devices, sizes, model, speed))] for turn in turns
    )


def _round(order: Any, devices: Any, sizes: list[int], model: int, speed: float) -> float:
    left = []
    for place, client in enumerate(order):
        down, compute, up = devices.of(client, 0).seconds(sizes[client], model, model)
        left.append((place + 1) * model / speed + down + compute + up)
    free = 0.0
    for when in sorted(left):
        free = max(free, when) + model / speed
    return free


def test_a_finite_link_changes_times_and_neither_bytes_nor_weights() -> None:
    free, wide, narrow = (train(3, server_mbit=mbit) for mbit in (math.inf, 1e12, 0.01))
    assert same_bits(free, wide)
    assert same_bits(free, narrow)
    assert free.summary["bytes_sent"] == narrow.summary["bytes_sent"]
    assert "server_link" not in facts(free)
    seconds = [run.summary["numbers"]["virtual_seconds"] for run in (free, wide, narrow)]
    assert seconds[0] == pytest.approx(seconds[1])
    # A model for each of K clients and rounds, each way.
    model = sum(p.numel() for p in free.model.parameters()) * 8
    link = facts(narrow)["server_link"]
    assert link["busy_seconds"] == pytest.approx(2 * 3 * K * model / 1250)
    assert link["waited_seconds"] > 0
    assert seconds[2] > 3 * (K + 1) * model / 1250


@pytest.mark.parametrize(
    "strategy",
    [
        dure.FedAvg(clients=K, batch_size=4),
        dure.FedAsync(clients=K, batch_size=4, fraction=0.5),
        dure.FedProx(clients=K, batch_size=4, local_epochs=4, selection="uniform:1.3:8:2"),
    ],
)
def test_a_run_that_goes_on_has_the_same_queue(strategy: dure.Strategy, tmp_path: Path) -> None:
    world = {"server_mbit": 0.02, "devices": "lognormal:1", "drop_out": 0.2, "energy": JOULES}
    whole = train(6, strategy, **world)
    dure.train(
        small_task(),
        strategy,
        dure.Simulated(engine="loop", **world),
        dure.Stop(rounds=2),
        out=tmp_path / "run",
    )
    run = dure.resume(tmp_path / "run", task=small_task(), stop=dure.Stop(rounds=6))
    assert same_bits(run, whole)
    assert facts(run)["server_link"] == facts(whole)["server_link"]
    assert facts(run)["cost"] == facts(whole)["cost"]
    assert run.history.series("virtual_seconds") == whole.history.series("virtual_seconds")


def test_the_batched_engine_has_the_same_times() -> None:
    def clock(engine: str) -> Any:
        place = dure.Simulated(engine=engine, server_mbit=0.02, devices="lognormal:1")  # type: ignore[arg-type]
        strategy = dure.FedAvg(clients=K, batch_size=4)
        run = dure.train(small_task(), strategy, place, dure.Stop(rounds=2))
        return run.history.series("virtual_seconds")

    assert clock("loop") == clock("batched")


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000)), min_size=1, max_size=20))
def test_the_link_is_busy_with_one_message_at_a_time(messages: list[tuple[float, int]]) -> None:
    link = ServerLink(0.01)
    before = 0.0
    for when, size in sorted(messages):
        ends = link.enters(when, size)
        assert ends == max(when, before) + size / 1250
        before = ends
    assert link.busy == pytest.approx(sum(size for _, size in messages) / 1250)


def test_what_a_federation_costs_and_where_it_passes_its_data() -> None:
    run = train(4, energy=JOULES, devices="equal:100:6:2", server_mbit=1)
    cost = facts(run)["cost"]
    task = small_task()
    examples = len(task.train)
    model = sum(p.numel() for p in run.model.parameters()) * 8
    data = task.train.inputs.nbytes + task.train.targets.nbytes
    assert cost["raw_data"]["bytes"] == data
    assert cost["raw_data"]["joules"] == pytest.approx(9e-6 * data)
    # Each client's last byte has left it, and the server's link takes them one after another.
    sizes = [len(part) * data / examples for part in dure.FedAvg(clients=K).divide(task, 0)]
    assert cost["raw_data"]["seconds"] == pytest.approx(min(sizes) / 250e3 + data / 125e3)
    assert cost["bytes"] == 4 * 2 * K * model
    assert cost["examples"] == 4 * examples
    assert cost["break_even"] == min(r for r in range(1, 99) if 2 * K * model * r > data)
    operations = cost["joules"] - 4 * K * model * (2e-6 + 9e-6)
    assert operations == pytest.approx(1e-9 * 4 * examples * _operations(run), rel=1e-6)


def _operations(run: dure.Run) -> float:
    """Two for each weight of a linear layer and pass, of which a step has three."""
    return 6 * sum(p.numel() for p in run.model.parameters() if p.ndim == 2)


def test_without_energy_no_joules_are_told() -> None:
    cost = facts(train(1))["cost"]
    assert cost["joules"] is None
    assert cost["raw_data"]["joules"] is None


def test_uploads_share_the_servers_link() -> None:
    devices = parse_devices("equal:100:6:2")
    free = upload([1000, 3000], devices, 0, math.inf, NoEnergy())
    assert free == (4000, pytest.approx(3000 / 250e3), None)
    shared = upload([1000, 3000], devices, 0, 0.8, NoEnergy())
    assert shared.seconds == pytest.approx(max(1000 / 250e3 + 0.01, 3000 / 250e3) + 0.03)


def test_energy_is_read_as_it_is_written() -> None:
    assert parse_energy(JOULES) == Joules(1e-9, 2e-6, 9e-6)
    assert str(parse_energy("none")) == "none"
    with pytest.raises(ValueError, match=r"per_operation is -1\.0, but it has to be 0 or more"):
        parse_energy("joules:-1")


@pytest.mark.parametrize("strategy", [dure.SplitLearning(clients=2), dure.ParameterServer()])
def test_systems_that_do_not_count_energy_refuse_it(strategy: dure.Strategy) -> None:
    with pytest.raises(ValueError, match="energy"):
        dure.train(small_task(), strategy, dure.Simulated(energy=JOULES), dure.Stop(rounds=1))

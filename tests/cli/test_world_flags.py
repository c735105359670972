"""The worlds that systems with settings name, as `dure compare` takes them."""

from __future__ import annotations

import pytest

import dure
from dure.cli.flags import parse_flags
from dure.cli.worlds import entry
from dure.fleet.devices import Stragglers
from dure.run.train import prepare
from small import small_task


def test_settings_of_a_world_stand_beside_those_of_the_system() -> None:
    strategy, world = entry(
        "fed-avg,clients=20,devices=stragglers:0.2:5,drop_out=0.3,partition=label-shards:2", 3
    )
    assert strategy == dure.FedAvg(clients=20, partition="label-shards:2")
    assert world == dure.Simulated(devices=Stragglers(0.2, 5.0), drop_out=0.3)
    assert entry("fed-avg", 3)[1] == dure.Simulated()
    assert entry("data-parallel,world=threads", 3)[1] == dure.Threads(3)
    assert entry("data-parallel,batch_size=8", 3)[1] == dure.Processes(3)
    assert entry("single-worker", 3)[1] == dure.Processes(1)


def test_one_number_of_workers_serves_systems_that_count_them_themselves() -> None:
    strategy, world = entry("parameter-server,staleness=2", 3)
    assert strategy == dure.ParameterServer(workers=3, staleness=2)
    assert world == dure.Processes(1 + 1 + 3)
    assert entry("parameter-server,workers=4", 3)[0] == dure.ParameterServer(workers=4)
    assert entry("downpour", 3)[0] == dure.Downpour(replicas=3)
    assert entry("downpour,replicas=4", 3)[0] == dure.Downpour(replicas=4)
    assert entry("parameter-server", None)[0] == dure.ParameterServer()


def test_a_system_that_can_be_simulated_takes_conditions_beside_its_settings() -> None:
    strategy, world = entry(
        "parameter-server,servers=2,world=simulated,devices=stragglers:0.25:5,server_mbit=100", 4
    )
    assert strategy == dure.ParameterServer(servers=2, workers=4)
    assert world == dure.Simulated(devices=Stragglers(0.25, 5.0), server_mbit=100.0)


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("data-parallel,attack=nan", "DataParallel has no field 'attack'"),
        ("data-parallel,world=mars", "the world has to be threads, processes"),
        ("data-parallel,world=simulated", "the world has to be threads, processes"),
        ("parameter-server,world=mars", "the world has to be threads, processes"),
        ("parameter-server,world=simulated,snails=2", "ParameterServer has no field 'snails'"),
        ("fed-avg,attack=sign-flip", "an attack needs attackers"),
        ("fed-avg,drop_out=often", "drop_out cannot be 'often'"),
        ("fed-avg,devices=snails", "there is no device setting 'snails'"),
        ("fed-avg,devices", "write a setting as field=value"),
    ],
)
def test_what_does_not_fit_is_said(system: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        entry(system, None)


def test_labels_say_what_is_not_ideal() -> None:
    def label(system: str) -> str:
        return prepare(small_task(), *entry(system, 2), dure.Stop(epochs=1), 0)[0].label

    assert label("fed-avg,clients=4") == "FedAvg iid K=4"
    assert label("fed-avg,clients=4,devices=stragglers:0.2,drop_out=0.1") == (
        "FedAvg iid K=4, devices stragglers:0.2, drop out 0.1"
    )
    assert label("data-parallel").endswith("×2")


def test_a_setting_that_may_be_left_out_is_a_flag_with_a_text() -> None:
    def parsed(*arguments: str) -> dure.Strategy:
        return parse_flags("dure", {"strategy": dure.SingleWorker}, list(arguments))["strategy"]

    strategy = parsed("--privacy", "dp-sgd:1:1.1", "--epsilon", "3")
    assert strategy == dure.SingleWorker(privacy="dp-sgd:1:1.1", epsilon=3.0)
    # Of the very class, by which run folders and others know it.
    assert type(strategy) is dure.SingleWorker
    assert parsed() == parsed("--privacy", "None") == dure.SingleWorker()
    with pytest.raises(ValueError, match="dp-sgd"):
        parsed("--privacy", "dp-sgd:x")

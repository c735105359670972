"""Systems and worlds by name, written down and read back."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure import Mesh, Parallel, Pipeline, catalog
from dure.data.partition import IID, Dirichlet, LabelShards, NaturalKey, QuantitySkew
from dure.federated.algorithms.fed_avg import FedAvg
from dure.parallel.data.strategy import DataParallel
from dure.parallel.single_worker import SingleWorker
from dure.parallel.zero.strategy import ZeRO
from dure.privacy.dp_sgd import DPSGD
from dure.run.registry import (
    decode_strategy,
    decode_world,
    default_world,
    encode,
    parse_strategy,
    strategy_class,
    world_class,
)
from dure.split.in_turn import SplitLearning
from dure.worlds.processes.world import Processes
from dure.worlds.simulated import Simulated
from dure.worlds.torchrun.world import Torchrun

BATCH_SIZES = st.none() | st.integers(1, 10**6)
POSITIVE = st.floats(1e-6, 1e6)
PARTITIONS = st.one_of(
    st.just(IID()),
    st.just(NaturalKey()),
    st.builds(LabelShards, st.integers(1, 100)),
    st.builds(Dirichlet, POSITIVE, st.integers(1, 100)),
    st.builds(QuantitySkew, POSITIVE, st.integers(1, 100)),
)
STRATEGIES = st.one_of(
    st.builds(SingleWorker, BATCH_SIZES),
    st.builds(DataParallel, BATCH_SIZES, st.sampled_from(["ring", "master", "native"])),
    st.builds(
        FedAvg,
        clients=st.none() | st.integers(1, 1000),
        fraction=st.floats(0.001, 1.0),
        local_epochs=st.integers(1, 100),
        local_steps=st.none() | st.integers(1, 100),
        batch_size=BATCH_SIZES,
        partition=PARTITIONS,
        server_lr=POSITIVE,
    ),
)
WORLDS = st.just(Simulated()) | st.builds(
    Processes, st.integers(1, 64), st.floats(0.1, 1e4), st.sampled_from(["gloo", "dure"])
)


@given(STRATEGIES)
def test_a_strategy_is_read_back_from_json(strategy):
    written = json.loads(json.dumps(encode(strategy)))
    assert decode_strategy(written) == strategy
    assert list(written) == ["name", *(field.name for field in dataclasses.fields(strategy))]


@given(WORLDS)
def test_a_world_is_read_back_from_json(world):
    assert decode_world(json.loads(json.dumps(encode(world)))) == world


def test_a_torchrun_world_is_read_back_inside_its_job(monkeypatch):
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert decode_world(encode(Torchrun(12.5, "dure"))) == Torchrun(12.5, "dure")
    assert default_world(SingleWorker()) == Torchrun()
    for world in (Simulated, Processes):
        with pytest.raises(ValueError, match="torchrun has started 2 ranks"):
            world()


@pytest.mark.parametrize("name", catalog.SYSTEMS)
def test_every_system_of_the_catalog_is_there_and_says_what_it_is(name):
    kind = strategy_class(name)
    assert kind.name == name
    assert (kind.__doc__ or "").strip()
    strategy = kind()
    assert decode_strategy(encode(strategy)) == strategy
    assert parse_strategy(name) == strategy
    assert default_world(strategy).kind == strategy.traits.kind
    assert strategy.label


@pytest.mark.parametrize("name", catalog.WORLDS)
def test_every_world_of_the_catalog_is_there(name):
    assert world_class(name).name == name


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("single-worker,batch_size=null", SingleWorker(None)),
        ("data-parallel,all_reduce=master,batch_size=8", DataParallel(8, "master")),
        ("fed-avg,clients=20,fraction=0.5", FedAvg(clients=20, fraction=0.5)),
        (
            "fed-avg,partition=dirichlet:0.3:2,server_lr=2",
            FedAvg(partition=Dirichlet(0.3, 2), server_lr=2.0),
        ),
        ("zero,stage=3,algorithm=ring", ZeRO(3, algorithm="ring")),
        ("pipeline,schedule=gpipe,microbatches=2", Pipeline(schedule="gpipe", microbatches=2)),
        ("single-worker,device=cuda", SingleWorker(device="cuda")),
        ("split,cut=2,clients=3", SplitLearning(cut=("2",), clients=3)),
        ('split,cut=["1","2"],clients=3', SplitLearning(cut=("1", "2"), clients=3)),
        ("parallel,data=2,tensor=2,zero=1", Parallel(Mesh(data=2, tensor=2), zero=1)),
        (
            "fed-avg,clients=null,partition=natural-key",
            FedAvg(clients=None, partition=NaturalKey()),
        ),
    ],
)
def test_a_text_says_a_strategy(text, strategy):
    assert parse_strategy(text) == strategy


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fedavg", "there is no strategy 'fedavg', did you mean 'fed-avg'?"),
        ("zzz", "there are: single-worker, data-parallel, "),
        ("fed-avg,clints=20", "FedAvg has no field 'clints', did you mean 'clients'?"),
        (
            "data-parallel,all_reduc=ring",
            "DataParallel has no field 'all_reduc', did you mean 'all_reduce'?",
        ),
        ("data-parallel,all_reduce=rng", "Invalid enum value 'rng'"),
        ("parallel,mesh=null,data=2", "give a mesh either by its degrees or by mesh=, not both"),
        ("fed-avg,clients", "write a setting as field=value, not 'clients'"),
        ("fed-avg,clients=many", "clients cannot be 'many'"),
        ("fed-avg,clients=2.5", "FedAvg: Expected `int | null`, got `float`"),
        ("fed-avg,clients=true", "FedAvg: Expected `int | null`, got `bool`"),
        ("fed-avg,partition=iidd", "there is no partition 'iidd', did you mean 'iid'?"),
    ],
)
def test_a_text_that_says_none_is_refused(text, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse_strategy(text)


@pytest.mark.parametrize(
    ("decode", "written", "complaint"),
    [
        (decode_strategy, {"name": "fed-avg", "partition": 3}, "Expected `str`, got `int`"),
        (
            decode_strategy,
            {"name": "fed-avg", "fraction": "a tenth"},
            "Expected `float`, got `str`",
        ),
        (
            decode_world,
            {"name": "proceses"},
            "there is no world 'proceses', did you mean 'processes'?",
        ),
        (
            decode_world,
            {"name": "processes", "rank": 2},
            "Processes has no field 'rank', did you mean 'ranks'?",
        ),
        (decode_world, {"name": "processes", "ranks": 0}, "it has to be 1 or more"),
    ],
)
def test_what_was_written_wrongly_is_refused(decode, written, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        decode(written)


def test_a_lone_worker_lives_in_this_process_and_ranks_in_several():
    assert default_world(SingleWorker()) == Processes(1)
    assert default_world(DataParallel()).workers >= 2


@given(st.none() | st.builds(DPSGD, POSITIVE, POSITIVE, st.sampled_from(["system", "seed"])))
def test_a_setting_that_may_be_left_out_is_written_as_text_or_none(privacy: DPSGD | None) -> None:
    for kind in (SingleWorker, DataParallel):
        strategy = kind(privacy=privacy, epsilon=None if privacy is None else 3.0)
        written = json.loads(json.dumps(encode(strategy)))
        assert decode_strategy(written) == strategy
    assert parse_strategy("single-worker,privacy=dp-sgd:1:1.1") == SingleWorker(
        privacy=DPSGD(1.0, 1.1)
    )
    assert parse_strategy("single-worker,privacy=None") == SingleWorker()

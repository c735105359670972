"""Who computes: by a rule, or as asked for."""

from __future__ import annotations

import math
import os
import time
from functools import partial

import pytest
import torch
from clients_at_work import jobs_of, results, same, weights_of
from torch import nn

import dure
from dure.federated.engines import batched, engine_choice
from dure.federated.engines.batched import BatchedEngine
from dure.federated.engines.engine_choice import NAMES, EngineInputs, engine_for, parts_of
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.processes import ProcessesEngine
from process_tree import descendants
from small import network, same_bits, small_task

HERE = [name for name in NAMES if not name.endswith("ray")]
SIZES, STEPS = [9, 4, 1, 12, 7, 8], [3, 1, 2, 9, 4, 2]


def chosen(wanted: str = "auto", processes: int | None = 2, **changes):
    task = small_task(**changes)
    jobs = jobs_of(SIZES, STEPS, weights_of(task.model))
    setting = EngineInputs(task, task.model(), task.train, 4, 3, jobs, processes, wanted)
    return engine_for(setting), jobs


@pytest.mark.parametrize(
    ("changes", "long", "expected"),
    [
        ({}, False, "batched"),
        ({}, True, "batched-processes"),
        ({"optimizer": torch.optim.Adam}, False, "loop"),
        ({"optimizer": torch.optim.Adam}, True, "loop-processes"),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_model_and_the_length_of_a_round_choose(
    monkeypatch, changes, long, expected, processes
):
    monkeypatch.setattr(engine_choice, "LONG_ROUND", 0.0 if long else math.inf)
    before = descendants(os.getpid())
    engine, _ = chosen(processes=processes, **changes)
    assert engine.name == expected
    assert descendants(os.getpid()) <= before, "nothing is tried"
    engine.close()


def test_no_clock_is_looked_at(monkeypatch):
    def never():
        raise AssertionError("a clock was read")

    for name in ("perf_counter", "monotonic", "process_time", "time"):
        monkeypatch.setattr(time, name, never)
    engine, jobs = chosen()
    results(engine, jobs)
    assert not any(digit in engine.why for digit in "0123456789")


def test_what_cannot_be_batched_is_computed_by_the_loop_and_said_why():
    engine, _ = chosen(optimizer=torch.optim.Adam)
    assert "the optimizer is Adam, not SGD" in engine.why


@pytest.mark.parametrize("engine", ["auto", "batched-processes"])
def test_the_number_of_processes_changes_no_bit(monkeypatch, engine):
    monkeypatch.setattr(engine_choice, "LONG_ROUND", 0.0)
    strategy = dure.FedAvg(clients=7, batch_size=3)

    def run(processes):
        world = dure.Simulated(engine=engine, processes=processes)
        return dure.train(small_task(), strategy, world, dure.Stop(rounds=2))

    one, three = run(1), run(3)
    assert same_bits(one, three)
    assert one.summary["facts"] == three.summary["facts"]
    assert one.summary["facts"][0]["chunk"] == 4, "half of a round"


def test_the_number_of_processes_changes_no_bit_of_a_long_step(monkeypatch):
    monkeypatch.setattr(batched, "SMALL_STEP", 0.0)
    monkeypatch.setattr(engine_choice, "LONG_ROUND", math.inf)

    def threads(processes):
        world = dure.Simulated(processes=processes)
        run = dure.train(small_task(), dure.FedSGD(clients=4), world, dure.Stop(rounds=1))
        return run.summary["facts"][0]["threads"]

    assert threads(1) == threads(2) == torch.get_num_threads()


def test_a_round_is_divided_into_an_even_number_of_parts():
    assert [parts_of(clients) for clients in (1, 10, 20, 39, 40, 80, 100_000)] == [
        *(2, 2, 2, 2, 4, 8, 8)
    ]


@pytest.mark.parametrize("wanted", [*HERE, "auto"])
def test_every_engine_gives_the_loop_s_result(wanted):
    engine, jobs = chosen(wanted)
    assert wanted in (engine.name, "auto")
    task = small_task()
    expected = results(LoopEngine(task, network(), task.train, 4, 3), jobs)
    got = results(engine, jobs)
    engine.close()
    if engine.name.startswith("loop"):
        assert same(got, expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one.delta[0], other.delta[0], rtol=1e-11, atol=1e-14)


def test_wanted_engines_are_of_the_kind_they_are_called():
    kinds = {"loop": LoopEngine, "batched": BatchedEngine}
    for name in HERE:
        engine, _ = chosen(name)
        assert isinstance(engine, kinds.get(name, ProcessesEngine))


def test_an_engine_that_cannot_do_it_is_refused_in_one_line():
    for name in ("batched", "batched-processes"):
        with pytest.raises(
            ValueError, match=f"the engine {name} cannot compute this: the optimizer is Adam"
        ):
            chosen(name, optimizer=torch.optim.Adam)
    with pytest.raises(
        ValueError, match="there is no engine 'fast'; choose auto or one of loop, batched"
    ):
        chosen("fast")


def test_an_engine_that_is_gone_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="there is no engine 'batched-threads'; choose auto or"):
        engine_choice.check_engine(small_task(), "batched-threads")


def test_where_nothing_can_be_forked_processes_are_not_taken_and_are_refused(monkeypatch):
    monkeypatch.setattr(engine_choice, "forks_here", lambda: False)
    monkeypatch.setattr(engine_choice, "fork_objection", lambda **_: "this system does not have")
    monkeypatch.setattr(engine_choice, "LONG_ROUND", 0.0)
    assert chosen()[0].name == "batched"
    with pytest.raises(ValueError, match="the engine loop-processes needs forked processes"):
        chosen("loop-processes")


def test_the_choice_leaves_a_model_that_draws_as_it_is():
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()  # noqa: E731
    engine, jobs = chosen(model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    task = small_task(model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert same(results(engine, jobs), results(LoopEngine(task, model(), task.train, 4, 3), jobs))
    engine.close()

"""Who computes: by a trial, or as asked for."""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch
from clients_at_work import jobs_of, results, same, weights_of
from torch import nn

from dure.federated.engines import choose
from dure.federated.engines.batched import BatchedEngine
from dure.federated.engines.choose import NAMES, Setting, engine_for
from dure.federated.engines.loop import LoopEngine
from dure.federated.engines.processes import ProcessesEngine
from process_tree import descendants
from small import network, small_task

HERE = [name for name in NAMES if not name.endswith("ray")]
SIZES, STEPS = [9, 4, 1, 12, 7, 8], [3, 1, 2, 9, 4, 2]


def chosen(wanted: str = "auto", processes: int | None = 2, **changes):
    task = small_task(**changes)
    jobs = jobs_of(SIZES, STEPS, weights_of(task.model))
    setting = Setting(task, task.model(), task.train, 4, 3, jobs, processes, wanted)
    return engine_for(setting), jobs


@pytest.fixture
def rates(monkeypatch):
    """Rates of engines in the place of measured ones."""

    def say(**of: float):
        monkeypatch.setattr(choose, "_rate", lambda engine, jobs: of[engine.name.replace("-", "_")])

    return say


@pytest.mark.parametrize(
    ("of", "long", "expected"),
    [
        ({"loop": 100.0, "batched": 90.0, "batched_processes": 60.0}, True, "batched-processes"),
        ({"loop": 100.0, "batched": 300.0, "batched_processes": 400.0}, True, "batched-processes"),
        ({"loop": 100.0, "batched": 49.0, "loop_processes": 90.0}, True, "loop-processes"),
        ({"loop": 100.0, "batched": 300.0, "batched_processes": 140.0}, True, "batched"),
        ({"loop": 100.0, "batched": 49.0, "loop_processes": 49.0}, True, "loop"),
        ({"loop": 100.0, "batched": 51.0}, False, "batched"),  # a round too short for processes
    ],
)
def test_only_what_is_clearly_slower_is_not_taken(rates, monkeypatch, of, long, expected):
    rates(**of)
    monkeypatch.setattr(choose, "LONG_ROUND", 0.0 if long else math.inf)
    before = descendants(os.getpid())
    engine, _ = chosen()
    assert engine.name == expected
    assert "times as fast" in engine.why
    engine.close()
    assert descendants(os.getpid()) <= before


def test_one_process_is_not_divided(rates):
    rates(loop=100.0, batched=49.0)
    assert chosen(processes=1)[0].name == "loop"


def test_what_cannot_be_batched_is_computed_by_the_loop_and_said_why(rates):
    rates(loop=1e9)
    engine, _ = chosen(optimizer=torch.optim.Adam)
    assert engine.name == "loop"
    assert "the optimizer is Adam, not SGD" in engine.why


@pytest.mark.parametrize("wanted", [*HERE, "auto"])
def test_every_engine_gives_the_loop_s_result_and_the_trial_leaves_no_trace(wanted):
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
        choose.check_engine(small_task(), "batched-threads")


def test_where_nothing_can_be_forked_processes_are_not_tried_and_are_refused(monkeypatch, rates):
    monkeypatch.setattr(choose, "forks_here", lambda: False)
    rates(loop=100.0, batched=49.0)
    assert chosen()[0].name == "loop"
    with pytest.raises(ValueError, match="the engine loop-processes needs forked processes"):
        chosen("loop-processes")


def test_an_error_in_the_trial_is_the_run_s_to_raise():
    def fails(outputs, targets):
        raise KeyError("no such class")

    engine, jobs = chosen(loss=fails)
    with pytest.raises(Exception, match="client 0 failed in round 3: KeyError"):
        results(engine, jobs)


def test_the_first_jobs_are_not_changed_by_a_trial_of_a_model_that_draws():
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()  # noqa: E731
    engine, jobs = chosen(model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    task = small_task(model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert same(results(engine, jobs), results(LoopEngine(task, model(), task.train, 4, 3), jobs))
    engine.close()

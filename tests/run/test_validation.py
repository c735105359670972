"""A validation set in every system, and what a run does by it: best model, early end, resuming."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dure
from dure.contracts.strategy import Strategy
from dure.data.conversion import as_examples
from dure.data.validation_split import split_validation
from dure.errors import RunFolderError
from dure.parameter_server.strategy import ParameterServer
from dure.record.best import BEFORE, BEST, best_weights
from small import small_task

EVERY: list[tuple[Strategy, Any]] = [
    (dure.SingleWorker(batch_size=8), None),
    (dure.DataParallel(batch_size=8), dure.Processes(2)),
    (dure.ZeRO(stage=3, batch_size=8), dure.Processes(2)),
    (dure.Pipeline(batch_size=8, microbatches=2), dure.Processes(2)),
    (dure.LocalSGD(batch_size=8, period=2), dure.Processes(2)),
    (dure.Hogwild(batch_size=8), dure.Threads(2)),
    (ParameterServer(batch_size=4), None),
    (dure.FedAvg(clients=2, batch_size=8), None),
    (dure.SplitLearning(clients=2, batch_size=8), None),
]


def task(**fields: Any) -> dure.Task:
    return dataclasses.replace(small_task(), **fields)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(("strategy", "world"), EVERY, ids=lambda each: getattr(each, "name", ""))
def test_every_system_measures_the_set_and_keeps_the_best_model(
    strategy: Strategy, world: Any
) -> None:
    run = dure.train(task(validation=0.25), strategy, world, dure.Stop(epochs=2))
    steps, losses = run.history.curve("validation_loss")
    best = run.summary["best_model"]
    assert len(losses) >= 2
    assert (best["step"], best["value"]) == (steps[losses.index(min(losses))], min(losses))
    assert run.best_model is not None
    assert run.best_model is not run.model
    if best["step"] == run.summary["steps"]:
        assert same(run.best_model.state_dict(), run.model.state_dict())


def test_what_is_measured_is_the_loss_of_those_who_were_held_apart() -> None:
    asked = task(validation=0.25)
    run = dure.train(asked, dure.SingleWorker(batch_size=8), stop=dure.Stop(epochs=3))
    train, kept = split_validation(asked.train, 0.25, 0)
    assert (len(train), len(kept)) == (run.summary["samples"] / 3, 11), "a quarter of 41"
    inputs, targets = kept.batch(torch.arange(len(kept)))
    with torch.no_grad():
        loss = float(asked.loss(run.model(inputs), targets))
    assert run.summary["validation_loss"] == pytest.approx(loss, rel=1e-6)


def test_the_set_needs_no_test_data_and_may_be_given() -> None:
    inputs, targets = small_task().train.batch(torch.arange(5))
    run = dure.train(
        task(test=None, validation=(inputs, targets)),
        dure.DataParallel(batch_size=8),
        dure.Threads(2),
        dure.Stop(epochs=1),
    )
    metrics = run.history.evaluations[-1].metrics
    assert set(metrics) == {"validation_loss", "validation_accuracy"}


def test_shares_are_the_same_under_a_seed_and_hold_of_each_class_its_part() -> None:
    examples = dure.Examples(torch.arange(40.0)[:, None], torch.arange(40) % 4)
    (train, kept), (again, _) = (
        split_validation(examples, 0.2, 3),
        split_validation(examples, 0.2, 3),
    )
    assert torch.equal(train.inputs, again.inputs)
    assert torch.bincount(kept.targets).tolist() == [2, 2, 2, 2]
    both = torch.cat([train.inputs, kept.inputs]).flatten().sort().values
    assert torch.equal(both, torch.arange(40.0))
    dataset = [(torch.tensor([float(i)]), i) for i in range(10)]
    parts = split_validation(as_examples(dataset), 0.3, 0)
    seen = [int(one) for part in parts for one in part.batch(torch.arange(len(part)))[1]]
    assert sorted(seen) == list(range(10))


def test_a_run_that_gets_no_better_ends_and_one_that_was_interrupted_ends_there_too(
    tmp_path: Path,
) -> None:
    still = task(validation=0.25, lr_schedule=_for_a_while)
    stop = dure.Stop(epochs=50, patience=3)
    system = dure.DataParallel(batch_size=8)
    whole = dure.train(still, system, dure.Processes(2), stop, out=tmp_path / "whole")
    assert whole.summary["ended"] == "patience"
    best = whole.summary["best_model"]["step"]
    evaluated = [one.step for one in whole.history.evaluations]
    assert evaluated.index(whole.summary["steps"]) == evaluated.index(best) + 3

    part = tmp_path / "part"
    half = dataclasses.replace(stop, steps=evaluated[2])
    dure.train(still, system, dure.Processes(2), half, out=part)
    _as_if_newer(part)
    run = dure.resume(part, task=still, stop=stop)
    assert run.summary["best_model"] == whole.summary["best_model"]
    assert run.summary["steps"] == whole.summary["steps"]
    assert (part / BEST).read_bytes() == (tmp_path / "whole" / BEST).read_bytes()
    loaded = dure.load_run(part, still.model).best_model
    assert loaded is not None
    assert run.best_model is not None
    assert same(loaded.state_dict(), run.best_model.state_dict())


def test_a_run_that_is_trained_further_chooses_by_the_metric_that_it_began_with(
    tmp_path: Path,
) -> None:
    accurate = dure.Stop(steps=4, monitor="validation_accuracy")
    measured = task(validation=0.25)
    dure.train(measured, dure.SingleWorker(8), stop=accurate, out=tmp_path / "run")
    on = dure.resume(tmp_path / "run", task=measured, stop=dure.Stop(steps=8))
    assert on.summary["best_model"]["monitor"] == "validation_accuracy"
    with pytest.raises(
        ValueError, match="chooses its best model by validation_accuracy: leave monitor out"
    ):
        dure.resume(
            tmp_path / "run",
            task=measured,
            stop=dure.Stop(steps=9, monitor="validation_loss"),
        )


def _for_a_while(step: int) -> float:
    """At a rate of zero nothing gets better."""
    return 1.0 if step < 12 else 0.0


def _as_if_newer(folder: Path) -> None:
    """As after a kill: a better model was measured after the checkpoint."""
    (folder / "summary.json").unlink()
    (folder / BEST).rename(folder / BEFORE)
    (folder / BEST).write_bytes((folder / "model.safetensors").read_bytes())


def test_a_best_model_that_is_gone_is_told_before_training(tmp_path: Path) -> None:
    asked = task(validation=0.25)
    dure.train(asked, dure.SingleWorker(), stop=dure.Stop(epochs=1), out=tmp_path / "run")
    (tmp_path / "run" / BEST).write_bytes(b"damaged")
    with pytest.raises(RunFolderError, match=r"best\.safetensors is not the model of step"):
        dure.resume(tmp_path / "run", task=asked, stop=dure.Stop(epochs=2))
    with pytest.raises(RunFolderError, match=r"cannot read .*best\.safetensors"):
        best_weights(tmp_path / "run")


def _own(rank: int, world: int) -> Any:
    return small_task().train


REFUSED: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"stop": dure.Stop(patience=2)}, "test data are only for the final measurement"),
    (
        lambda: {"stop": dure.Stop(epochs=1, monitor="test_loss")},
        "test data are only for the final measurement",
    ),
    (
        lambda: {"task": task(validation=0.1), "stop": dure.Stop(epochs=1, monitor="test_loss")},
        "can end a run or choose its model: validation_loss, validation_accuracy",
    ),
    (lambda: {"stop": dure.Stop(epochs=1, min_delta=0.1)}, "no patience is given"),
    (lambda: {"stop": dure.Stop(epochs=1, min_delta=-1)}, "min_delta is -1"),
    (lambda: {"stop": dure.Stop(patience=0)}, "patience is 0"),
    (lambda: {"task": task(validation=1.5)}, "a fraction of the training data between 0 and 1"),
    (lambda: {"task": task(validation=True)}, "a fraction of the training data between 0 and 1"),
    (lambda: {"task": task(validation=0.9999)}, "leaves none to train on"),
    (lambda: {"task": task(train=_own, validation=0.1)}, "only the ranks hold"),
    (
        lambda: {
            "task": task(validation=0.1),
            "strategy": dure.FedAvg(clients=2),
            "world": dure.Network(access="open"),
        },
        "only the clients hold",
    ),
    (
        lambda: {
            "task": task(validation=small_task().test),
            "strategy": dure.SplitLearning(clients=2),
            "world": dure.Network(access="open"),
        },
        "cannot use a validation set",
    ),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_cannot_be_is_said_before_any_work(
    given: Callable[[], dict[str, Any]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        _asked(given)


def _asked(given: Callable[[], dict[str, Any]]) -> None:
    asked = {"task": small_task(), "strategy": dure.DataParallel(), **given()}
    world = asked.get("world") or dure.Processes(2)
    dure.train(asked["task"], asked["strategy"], world, asked.get("stop"))

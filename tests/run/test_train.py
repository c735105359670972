"""One run in this process, from the first evaluation to its folder."""

from __future__ import annotations

import json
import os
import random
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.stop import Stop
from dure.errors import LossNotFiniteError, RunFolderError, WorkerFailedError
from dure.federated.algorithms.fed_avg import FedAvg
from dure.parallel.single_worker import SingleWorker
from dure.run.train import _check_devices
from small import network, same_bits, small_task, weights_of
from written import files_in, unpacked

FILES = {
    "config.json",
    "history.jsonl",
    "checkpoint",
    "model.safetensors",
    "summary.json",
    "trace.json",
    "answers.json",
}
CONFIG = {
    "run",
    "checksums",
    *(
        "label",
        "task",
        "strategy",
        "world",
        "stop",
        "seed",
        "evaluate_every",
        "checkpoint_every",
        "parameters",
    ),
    *("train_examples", "test_examples", "classes", "partition", "versions"),
}
STEP = {
    *(
        "kind",
        "step",
        "epoch",
        "samples",
        "loss",
        "seconds",
        "bytes_sent",
        "bytes_received",
        "compute_seconds",
    ),
    *("communication_seconds", "idle_seconds"),
}
EVALUATION = STEP | {"metrics", "peak_memory"}
SUMMARY = {
    "model_checksum",
    "baseline",
    *(
        "label",
        "proofs",
        "strategy",
        "world",
        "unit",
        "seed",
        "ended",
        "steps",
        "epochs",
        "samples",
        "seconds",
        "test_loss",
    ),
    *(
        "test_accuracy",
        "best",
        "train_loss",
        "numbers",
        "parameters",
        "workers",
        "bytes_sent",
        "bytes_received",
    ),
    *(
        "bytes_sent_per_worker",
        "compute_seconds",
        "communication_seconds",
        "idle_seconds",
        "peak_memory",
    ),
    *(
        "per_worker",
        "to_target",
        "training_amount",
        "hidden_seconds",
        "shuffle_bytes",
        "shuffle_seconds",
    ),
    *("idle_share", "idle_over_busy"),
}
WORKER = {
    *(
        "name",
        "compute_seconds",
        "communication_seconds",
        "idle_seconds",
        "bytes_sent",
        "bytes_received",
    ),
    *("peak_memory", "hidden_seconds", "inside_seconds", "inside_steps"),
    *("shuffle_bytes", "shuffle_seconds"),
}


def train(steps: int = 5, *, task=None, out=None, **options) -> dure.Run:
    stop = options.pop("stop", Stop(steps=steps))
    return dure.train(task or small_task(), SingleWorker(10), stop=stop, out=out, **options)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def steps_of(run: dure.Run) -> list[tuple[int, float]]:
    return [(step.step, step.loss) for step in run.history.steps]


@pytest.mark.parametrize(
    ("strategy", "stop"),
    [(SingleWorker(10), Stop(steps=6)), (FedAvg(clients=3), Stop(rounds=2))],
)
def test_the_run_folder_holds_what_its_page_says(tmp_path, strategy, stop):
    target = {"test_accuracy": 2.0}
    run = dure.train(
        small_task(),
        strategy,
        stop=Stop(steps=stop.steps, rounds=stop.rounds, target=target),
        out=tmp_path,
    )
    assert {p.name for p in tmp_path.iterdir()} == FILES
    config, summary = (
        json.loads((tmp_path / name).read_text()) for name in ("config.json", "summary.json")
    )
    assert set(config) == CONFIG
    assert set(config["task"]) == {"name", "options", "title"}
    assert config["task"]["name"] is None
    assert set(config["stop"]) == {
        *("epochs", "steps", "rounds", "seconds", "target", "bytes"),
        *("patience", "monitor", "min_delta"),
    }
    assert set(config["versions"]) == {"dure", "torch", "python"}
    assert (config["parameters"], config["train_examples"], config["test_examples"]) == (
        215,
        41,
        20,
    )
    federated = strategy.traits.kind == "clients"
    assert set(summary) == SUMMARY | ({"facts"} if federated else set())
    assert summary == run.summary
    assert {frozenset(worker) for worker in summary["per_worker"]} == {frozenset(WORKER)}
    assert summary["to_target"] == {"test_accuracy": {"target": 2.0, "reached": None}}
    history = lines(tmp_path)
    step = STEP | ({"numbers"} if federated else set())
    assert {line["kind"]: set(line) for line in history} == {"step": step, "evaluation": EVALUATION}
    assert config["partition"] is None if not federated else len(config["partition"]["counts"]) == 3
    if federated:
        assert set(config["partition"]) == {"description", "counts", "label_histograms"}
    (checkpoint,) = (tmp_path / "checkpoint").iterdir()
    assert checkpoint.name == f"{summary['steps']:08d}"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} <= {
        *("compute", "communication", "idle", "evaluation", "checkpoint")
    }
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_every_step_is_a_line_and_every_epoch_an_evaluation(tmp_path):
    train(12, out=tmp_path)
    history = lines(tmp_path)
    assert [line["step"] for line in history if line["kind"] == "step"] == list(range(1, 13))
    assert [line["step"] for line in history if line["kind"] == "evaluation"] == [0, 5, 10, 12]
    samples = [line["samples"] for line in history if line["kind"] == "step"]
    assert samples[:6] == [10, 20, 30, 40, 41, 51]
    assert history[0]["loss"] is None
    seconds = [line["seconds"] for line in history]
    assert seconds == sorted(seconds)


def test_an_evaluation_measures_the_model_that_the_run_returns():
    run = train(7)
    outputs, targets = run.model(small_task().test.inputs), small_task().test.targets
    assert run.summary["test_loss"] == pytest.approx(F.cross_entropy(outputs, targets).item())
    assert run.summary["test_accuracy"] == float((outputs.argmax(1) == targets).double().mean())
    assert run.history.evaluations[-1].metrics["test_loss"] == run.summary["test_loss"]


def test_evaluations_come_as_often_as_asked_and_never_twice_for_a_step():
    assert [e.step for e in train(6, evaluate_every=2).history.evaluations] == [0, 2, 4, 6]
    assert [e.step for e in train(5, evaluate_every=3).history.evaluations] == [0, 3, 5]


def test_checkpoints_come_as_often_as_asked(tmp_path):
    seen = []

    def look(event):
        seen.extend(p.name for p in (tmp_path / "checkpoint").glob("[0-9]*"))

    train(7, out=tmp_path, checkpoint_every=2, evaluate_every=1, on_progress=look)
    assert sorted(set(seen)) == ["00000002", "00000004", "00000006"]
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["00000007"]


def test_a_run_may_have_a_name_of_its_own(tmp_path):
    run = train(1, label="mine", out=tmp_path)
    assert run.label == json.loads((tmp_path / "config.json").read_text())["label"] == "mine"
    assert train(1).label == "single worker"


@pytest.mark.parametrize(
    ("stop", "ended"),
    [
        (Stop(steps=3), "steps"),
        (Stop(epochs=1), "epochs"),
        (Stop(epochs=100, target={"test_accuracy": 0.0}), "target"),
        (Stop(epochs=10**6, seconds=1e-9), "seconds"),
    ],
)
def test_the_summary_says_which_limit_ended_the_run(stop, ended):
    run = train(stop=stop)
    assert run.summary["ended"] == ended
    assert run.summary["steps"] == {"steps": 3, "epochs": 5, "target": 0, "seconds": 1}[ended]


def test_a_run_ends_at_the_evaluation_that_reaches_the_target():
    start = train(1).history.evaluations[0].metrics["test_loss"]
    run = train(stop=Stop(epochs=200, target={"test_loss": 0.7 * start}))
    before, last = [e.metrics["test_loss"] for e in run.history.evaluations[-2:]]
    assert run.summary["ended"] == "target"
    assert last <= 0.7 * start < before
    assert 0 < run.summary["to_target"]["test_loss"]["reached"] <= run.summary["steps"]


def test_a_model_without_test_data_trains_without_measures():
    run = train(3, task=small_task(test=None))
    assert run.history.evaluations[-1].metrics == {}
    assert run.summary["best"] == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_trains_in_its_own_dtype(dtype):
    run = train(3, task=small_task(model=partial(network, dtype), dtype=dtype))
    assert {p.dtype for p in run.model.parameters()} == {dtype}


def test_a_full_batch_is_gradient_descent():
    run = dure.train(small_task(), SingleWorker(None), stop=Stop(steps=3))
    model = dure.train(small_task(), SingleWorker(None), stop=Stop(steps=2)).model
    F.cross_entropy(model(small_task().train.inputs), small_task().train.targets).backward()
    for after, before in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(after, before - 0.3 * before.grad, atol=1e-12)


def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before():
    first = train(7, seed=3)
    torch.rand(5)
    assert same_bits(first, train(7, seed=3))
    assert not same_bits(first, train(7, seed=4))


def test_the_user_s_own_draws_go_on_as_if_there_had_been_no_run():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(2)
    dure.train(small_task(), FedAvg(clients=2), stop=Stop(rounds=1))
    assert torch.equal(torch.rand(3), expected)


def nan_at(step: int):
    """A loss that is NaN in one training step."""
    calls = []

    def loss(outputs, targets):
        calls.append(outputs.requires_grad)
        return F.cross_entropy(outputs, targets) * (
            float("nan") if sum(calls) == step and calls[-1] else 1.0
        )

    return loss


def test_a_loss_that_is_not_finite_names_step_and_rank_and_keeps_the_last_good_weights(tmp_path):
    with pytest.raises(
        LossNotFiniteError, match="the loss is nan at step 4 on rank 0: lower the learning rate"
    ):
        train(9, task=small_task(loss=nan_at(4)), out=tmp_path)
    good = train(3)
    weights, state = unpacked(files_in(tmp_path / "checkpoint"))
    assert state["position"]["step"] == 3
    assert all(torch.equal(value, good.model.state_dict()[name]) for name, value in weights.items())
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "step"] == [1, 2, 3]
    assert same_bits(dure.resume(tmp_path, task=small_task()), train(9))


def test_weights_that_are_spoilt_are_not_kept(tmp_path):
    huge = small_task(optimizer=partial(torch.optim.SGD, lr=torch.tensor(float("inf"))))
    with pytest.raises(LossNotFiniteError, match="at step 2"):
        train(9, task=huge, out=tmp_path)
    assert not (tmp_path / "checkpoint").exists()


def test_a_measure_that_is_not_finite_is_null_and_the_run_goes_on(tmp_path):
    task = small_task(metrics={"odd": lambda outputs, targets: torch.tensor(float("nan"))})
    run = train(2, task=task, out=tmp_path)
    assert run.summary["test_odd"] is None
    assert "test_odd" not in run.summary["best"]
    assert (
        "NaN"
        not in (tmp_path / "summary.json").read_text() + (tmp_path / "history.jsonl").read_text()
    )
    again = dure.resume(tmp_path, task=task, stop=Stop(steps=4))
    assert [e.metrics["test_odd"] for e in again.history.evaluations] == [None] * 3


def test_the_user_s_own_error_names_rank_and_step_and_is_its_cause(tmp_path):
    def loss(outputs, targets):
        if outputs.requires_grad and len(targets) == 1:
            raise KeyError("the last example")
        return F.cross_entropy(outputs, targets)

    with pytest.raises(
        WorkerFailedError, match="rank 0 failed in step 5: KeyError: 'the last example'"
    ) as caught:
        train(9, task=small_task(loss=loss), out=tmp_path)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in loss" in caught.value.traceback
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]


def with_momentum_and_dropout() -> dure.Task:
    """A task in which everything that a checkpoint has to hold matters."""

    def model():
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
        ).double()

    def loss(outputs, targets):
        noise = random.random() if outputs.requires_grad else 1.0
        return F.cross_entropy(outputs, targets) * noise

    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return small_task(model=model, loss=loss, optimizer=optimizer, n=42)


@pytest.mark.parametrize("first", [1, 4, 5, 7])
def test_a_run_trained_further_has_the_bits_of_one_long_run(tmp_path, first):
    random.seed(0)
    whole = train(11, task=with_momentum_and_dropout())
    random.seed(0)
    train(first, task=with_momentum_and_dropout(), out=tmp_path)
    random.seed(99)
    more = dure.resume(tmp_path, task=with_momentum_and_dropout(), stop=Stop(steps=11))
    assert same_bits(more, whole)
    assert steps_of(more) == steps_of(whole)
    assert more.summary["test_loss"] == whole.summary["test_loss"]
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "step"] == list(
        range(1, 12)
    )
    assert json.loads((tmp_path / "config.json").read_text())["stop"]["steps"] == 11


def test_a_federation_trained_further_has_the_bits_and_bytes_of_one_long_run(tmp_path):
    strategy = FedAvg(clients=4, fraction=0.5, batch_size=5)
    whole = dure.train(small_task(), strategy, stop=Stop(rounds=5))
    dure.train(small_task(), strategy, stop=Stop(rounds=2), out=tmp_path)
    more = dure.resume(tmp_path, task=small_task(), stop=Stop(rounds=5))
    assert same_bits(more, whole)
    sent = [[worker["bytes_sent"] for worker in run.summary["per_worker"]] for run in (more, whole)]
    assert sent[0] == sent[1]


def test_a_history_that_is_ahead_of_the_checkpoint_or_cut_off_is_taken_back(tmp_path):
    train(6, out=tmp_path)
    (tmp_path / "history.jsonl").open("a").write('{"kind":"step","step":7,"ep')
    more = dure.resume(tmp_path, task=small_task(), stop=Stop(steps=8))
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "step"] == list(range(1, 9))
    assert steps_of(more) == steps_of(train(8))


def test_a_run_without_checkpoint_starts_again(tmp_path):
    with pytest.raises(LossNotFiniteError):
        train(5, task=small_task(loss=nan_at(1)), out=tmp_path)
    assert not (tmp_path / "checkpoint").exists()
    assert same_bits(dure.resume(tmp_path, task=small_task()), train(5))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5, 5]


def test_a_resumed_run_that_has_reached_its_limit_is_left_as_it_is(tmp_path):
    run = train(5, out=tmp_path)
    before = lines(tmp_path)
    again = dure.resume(tmp_path, task=small_task())
    assert same_bits(again, run)
    assert lines(tmp_path) == before


def test_a_task_made_in_python_has_to_be_given_again(tmp_path):
    train(2, out=tmp_path)
    with pytest.raises(RunFolderError, match=r"was created in Python: give it with dure\.resume\("):
        dure.resume(tmp_path)


def test_a_task_with_a_name_is_found_again(tmp_path):
    task = dure.load_task("digits", model="logistic", lr=0.05)
    dure.train(task, SingleWorker(None), stop=Stop(steps=1), out=tmp_path)
    more = dure.resume(tmp_path, stop=Stop(steps=2))
    assert (more.summary["steps"], more.summary["parameters"]) == (2, 650)
    assert same_bits(more, dure.train(task, SingleWorker(None), stop=Stop(steps=2)))


@pytest.mark.parametrize("damage", ["{", "{}", "[]", '{"label": 3}'])
def test_a_damaged_config_is_refused_by_its_name(tmp_path, damage):
    train(1, out=tmp_path)
    (tmp_path / "config.json").write_text(damage)
    with pytest.raises(RunFolderError, match=r"config\.json"):
        dure.resume(tmp_path, task=small_task())


def test_ctrl_c_ends_the_run_after_its_step_with_what_was_done(tmp_path):
    def interrupt(event):
        if event["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    run = train(10**6, out=tmp_path, evaluate_every=1, on_progress=interrupt)
    assert run.summary["ended"] == "interrupt"
    assert signal.getsignal(signal.SIGINT) is handler
    done = run.summary["steps"]
    assert 3 <= done < 10
    assert {p.name for p in tmp_path.iterdir()} == FILES
    more = dure.resume(tmp_path, task=small_task(), stop=Stop(steps=done + 2))
    assert torch.equal(weights_of(more), weights_of(train(done + 2)))


def test_progress_is_told_with_all_that_a_display_needs():
    events = []
    train(6, on_progress=events.append)
    told = {"unit", "step", "epoch", "samples", "seconds", "loss", "metrics", "bytes"}
    told |= {"evaluated", "numbers", "proofs"}
    assert all(set(e) == told for e in events)
    assert (events[0]["step"], events[0]["loss"], events[-1]["step"]) == (0, None, 6)
    assert events[-1]["metrics"].keys() == {"test_loss", "test_accuracy"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"stop": Stop(target={"test_f1": 1.0})},
            "the target 'test_f1' is not measured; available metrics: test_accuracy, test_loss",
        ),
        ({"stop": Stop(rounds=3)}, "this run has no stopping condition"),
        (
            {"evaluate_every": 0},
            "evaluate_every is 0, but it is a number of steps: 1 or more",
        ),
        ({"checkpoint_every": -1}, "checkpoint_every is -1"),
        ({"world": dure.Processes(2)}, "SingleWorker has one worker, but the world has 2"),
        (
            {"world": dure.Simulated()},
            "SingleWorker does not run in Simulated; it needs a world of ranks",
        ),
        ({"task": small_task(model=nn.Flatten)}, "the model has no trainable parameter"),
        (
            {"task": small_task(model=lambda: 3)},
            "the task's model function returned a int, not an nn.Module",
        ),
        (
            {"task": small_task(test=None), "stop": Stop(target={"test_loss": 1.0})},
            "available metrics: no test data",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        train(3, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    train(1, out=tmp_path)
    with pytest.raises(RunFolderError, match="is not empty"):
        train(1, out=tmp_path)


def test_functions_stay_functions_when_their_modules_are_imported():
    import dure.run.compare
    import dure.run.train

    assert callable(dure.train)
    assert callable(dure.compare)


def test_the_users_own_draws_go_on_as_if_there_had_been_no_run():
    import random

    import numpy as np

    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    for generator in (random, np.random):
        generator.seed(5)
    torch.manual_seed(5)
    expected = draws()
    for generator in (random, np.random):
        generator.seed(5)
    torch.manual_seed(5)
    train(4)
    assert draws() == expected


def test_draws_from_numpy_in_a_loss_follow_from_the_seed():
    import numpy as np

    def loss(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs, targets) * float(np.random.rand())

    first, second = (
        dure.train(small_task(loss=loss), SingleWorker(8), stop=Stop(steps=4)) for _ in range(2)
    )
    assert same_bits(first, second)


def model_on(*devices: str) -> Any:
    """As much of a model as tells where its parameters are: a machine may have no GPU."""
    places = [torch.device(name) for name in devices]
    parameters = [SimpleNamespace(device=at, dtype=torch.float32) for at in places]
    return SimpleNamespace(parameters=lambda: parameters, buffers=list)


@pytest.mark.parametrize(
    ("strategy", "world", "devices", "complaint"),
    [
        (SingleWorker(8), dure.Processes(1), ["cuda:0"], "a model on cuda:0, but this system"),
        (dure.DataParallel(8), dure.Processes(2), ["cpu", "cuda:1"], "a model on cuda:1"),
        (
            dure.DataParallel(8),
            dure.Threads(2, ("cpu",)),
            ["cuda:0"],
            "this system computes on the CPU",
        ),
        (FedAvg(3), dure.Network(), ["cuda:0"], "this system computes on the CPU"),
        (dure.ParameterServer(), dure.Simulated(), ["cuda:0"], "this system computes on the CPU"),
        (FedAvg(3), dure.Simulated(), ["cuda:0", "cpu"], "move the whole model to one device"),
        (FedAvg(3), dure.Simulated(), ["cuda:0", "cuda:1"], "on cuda:0 and cuda:1"),
    ],
)
def test_a_model_on_a_gpu_is_refused_where_nothing_computes_there(
    strategy: Any, world: Any, devices: list[str], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        _check_devices(strategy, world, model_on(*devices))


@pytest.mark.parametrize(
    ("strategy", "world", "devices"),
    [
        (SingleWorker(8), dure.Processes(1), ["cpu", "cpu"]),
        (SingleWorker(8, device="cuda"), dure.Processes(1), ["cuda:0"]),
        (FedAvg(3), dure.Simulated(), ["cuda:0", "cuda:0"]),
    ],
)
def test_a_model_is_taken_where_something_computes(
    strategy: Any, world: Any, devices: list[str]
) -> None:
    _check_devices(strategy, world, model_on(*devices))

"""A run whose best model was chosen shows both models, and answers with the best."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import dure
from dure.cli.main import main
from dure.cli.seed_table import table_over_seeds
from dure.cli.show import table
from dure.report.read import read_runs
from dure.report.table import table as report_table
from dure.run.predict import predict


def classes() -> dure.Task:
    """Return a task whose rate is too large: 30 of 40 training examples are of class 1, 2 of 8 test
    examples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 4, generator=generator)
    labels = (torch.arange(40) % 4 > 0).long()
    test = (torch.randn(8, 4, generator=generator), torch.tensor([1, 1, 0, 0, 0, 0, 0, 0]))
    validation = (torch.randn(12, 4, generator=generator), torch.arange(12) % 2)
    return dure.Task(
        partial(nn.Linear, 4, 2),
        F.cross_entropy,
        (inputs, labels),
        test,
        partial(torch.optim.SGD, lr=0.2),
        validation=validation,
        name="classes",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "stopped"


@pytest.fixture(scope="module")
def run(folder: Path) -> dure.Run:
    run = dure.train(
        classes(), dure.SingleWorker(8), stop=dure.Stop(epochs=20, patience=3), out=folder
    )
    assert run.summary["best_model"]["step"] < run.summary["steps"]
    return run


def accuracy(model: nn.Module) -> float:
    inputs, labels = classes().test.batch(torch.arange(8))  # type: ignore[union-attr]
    return float((model(inputs).argmax(1) == labels).double().mean())


def printed(content: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(content)
    return captured.get()


def test_the_summary_measures_both_models(run: dure.Run) -> None:
    assert run.best_model is not None
    assert run.summary["best_model"]["metrics"]["test_accuracy"] == accuracy(run.best_model)
    assert run.summary["test_accuracy"] == accuracy(run.model)


def test_the_baseline_is_what_the_most_frequent_class_reaches(run: dure.Run) -> None:
    assert run.summary["baseline"] == {"test_accuracy": 2 / 8}


def test_the_table_has_a_row_for_each_model(run: dure.Run) -> None:
    text = printed(table([run.summary]))
    best, last = run.summary["best_model"]["step"], run.summary["steps"]
    assert f"single worker: best, step {best}" in text
    assert f"single worker: last, step {last}" in text
    assert "majority class: test accuracy 0.2500" in text


def test_over_seeds_the_best_models_count(run: dure.Run) -> None:
    best = run.summary["best_model"]["metrics"]["test_loss"]
    assert f"{best:.4f}" in printed(table_over_seeds([[run.summary]]))


def test_show_and_the_report_say_which_is_which(
    run: dure.Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folder)]) == 0
    text = capsys.readouterr().out
    step, last = run.summary["best_model"]["step"], run.summary["steps"]
    assert f"from step {step}, chosen by validation loss; the last is from step {last}" in text
    assert "best model, " in text
    page = report_table(read_runs([folder]))
    assert f"<small>step {step}</small>" in page
    assert f"<small>step {last}</small>" in page
    assert "Always predicting the most frequent class reaches accuracy 25.00" in page


def test_predict_takes_the_best_model_and_last_the_other(run: dure.Run, folder: Path) -> None:
    inputs, _ = classes().test.batch(torch.arange(3))  # type: ignore[union-attr]
    assert run.best_model is not None
    chosen = predict(folder, "test:0:3", classes())
    last = predict(folder, "test:0:3", classes(), last=True)
    assert torch.equal(chosen.outputs, run.best_model(inputs))
    assert torch.equal(last.outputs, run.model(inputs))
    assert chosen.of == (
        f"the best model, from step {run.summary['best_model']['step']}; --last uses that from "
        f"{run.summary['steps']}"
    )


def test_a_mean_of_models_that_never_met_is_the_best_of_no_metric() -> None:
    summaries = []
    for strategy in (dure.LocalOnly(clients=2), dure.FedSGD(clients=2)):
        task = dure.Task(
            partial(nn.Linear, 4, 2), F.cross_entropy, (torch.randn(20, 4), torch.arange(20) % 2)
        )
        summaries.append(dict(dure.train(task, strategy, stop=dure.Stop(rounds=1)).summary))
    alone, together = summaries
    assert alone["mean_of"] == "models that never met"
    for summary in summaries:
        summary["best"] = {"test_accuracy": 0.0}
    alone["test_accuracy"], together["test_accuracy"] = 0.9, 0.8
    console = Console(width=300, force_terminal=True)
    with console.capture() as captured:
        console.print(table(summaries))
    text = captured.get()
    assert "\x1b[1m0.9000" not in text
    assert "the mean of models that never met, a model that no client has" in text

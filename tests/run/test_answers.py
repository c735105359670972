"""What a trained model answers, in the run folder: counted once, and shown only where it may be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.data.examples import Examples
from dure.record.png import SIGNATURE
from dure.run import model_predictions as module
from dure.run.model_predictions import may_show

STOP = dure.Stop(epochs=1)


def answers_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "answers.json").read_text()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dure.Run, Path]:
    folder = tmp_path_factory.mktemp("answers") / "run"
    return dure.train(dure.load_task("digits"), dure.SingleWorker(), stop=STOP, out=folder), folder


def test_the_diagonal_is_the_accuracy(trained: tuple[dure.Run, Path]) -> None:
    run, folder = trained
    told = answers_in(folder)
    right = sum(row[at] for at, row in enumerate(told["confusion"]))
    assert sum(map(sum, told["confusion"])) == told["examples"] == told["of"] == 360
    assert right / 360 == pytest.approx(run.summary["test_accuracy"], abs=1e-12)


def test_pictures_are_the_first_examples_and_some_that_were_wrong(
    trained: tuple[dure.Run, Path],
) -> None:
    _, folder = trained
    pictures = answers_in(folder)["pictures"]
    assert [one["example"] for one in pictures[: module.FIRST]] == list(range(module.FIRST))
    assert all(one["label"] != one["said"] for one in pictures[module.FIRST :])
    labels = dure.load_task("digits").test.targets
    for one in pictures:
        assert one["label"] == int(labels[one["example"]])
        assert (folder / "answers" / one["file"]).read_bytes().startswith(SIGNATURE)


def test_what_is_measured_is_bounded_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_EXAMPLES", 100)
    dure.train(dure.load_task("digits"), dure.SingleWorker(), stop=STOP, out=tmp_path / "run")
    told = answers_in(tmp_path / "run")
    assert (told["examples"], told["of"]) == (100, 360)
    assert sum(map(sum, told["confusion"])) == 100


def test_examples_are_shown_only_where_nobody_owns_them() -> None:
    task = dure.load_task("digits")
    alone = dure.SingleWorker()
    here = dure.Processes(1)
    assert may_show(task, alone, here)
    assert not may_show(replace(task, show_examples=False), alone, here)
    owned = Examples(task.train.inputs, task.train.targets, keys=["a"] * len(task.train))
    assert not may_show(replace(task, train=owned), alone, here)
    assert not may_show(task, dure.SingleWorker(privacy="dp-sgd:1:1.1"), here)
    assert not may_show(task, dure.DataParallel(privacy="dp-sgd:1:1.1"), here)
    secure = dure.FedAvg(clients=4, privacy="secure-aggregation")
    assert not may_show(task, secure, dure.Simulated())
    assert not may_show(task, dure.SplitLearning(clients=2, defence="marvell:4"), dure.Simulated())
    assert not may_show(task, dure.FedAvg(clients=4), dure.Network())


def test_a_task_of_ones_own_shows_none_unless_it_says_so(tmp_path: Path) -> None:
    task = replace(dure.load_task("digits"), show_examples=False, reference=None)
    dure.train(task, dure.SingleWorker(), stop=STOP, out=tmp_path / "run")
    assert answers_in(tmp_path / "run")["pictures"] == []
    assert not (tmp_path / "run" / "answers").exists()


@pytest.mark.parametrize(
    ("outputs", "targets", "loss"),
    [
        (1, torch.randn(12, 1), F.mse_loss),
        (51, torch.arange(12), F.cross_entropy),
    ],
)
def test_what_is_no_classifier_of_few_classes_has_no_answers(
    tmp_path: Path, outputs: int, targets: torch.Tensor, loss: Any
) -> None:
    data = (torch.randn(12, 3), targets)
    task = dure.Task(lambda: nn.Linear(3, outputs), loss, data, data)
    dure.train(task, dure.SingleWorker(batch_size=4), stop=STOP, out=tmp_path / "run")
    assert not (tmp_path / "run" / "answers.json").exists()


def test_answers_draw_nothing_that_the_caller_would_have_drawn(tmp_path: Path) -> None:
    draws = []
    for folder in (None, tmp_path / "run"):
        torch.manual_seed(7)
        dure.train(dure.load_task("digits"), dure.SingleWorker(), stop=STOP, out=folder)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)

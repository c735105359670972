"""Many systems side by side."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import dure
from dure.contracts.stop import Stop
from dure.errors import RunFolderError, WorkerFailedError
from dure.federated.algorithms.fed_avg import FedAvg
from dure.parallel.data.strategy import DataParallel
from dure.parallel.single_worker import SingleWorker
from dure.run.compare import _slug, _unique
from small import same_bits, small_task, weights_of

SYSTEMS = [SingleWorker(10), SingleWorker(None), FedAvg(clients=3)]


def refuses_full_batches(outputs, targets):
    if outputs.requires_grad and len(targets) == 41:
        raise KeyError("too many")
    return F.cross_entropy(outputs, targets)


def test_every_system_gets_a_run_folder_and_all_one_report(tmp_path):
    done = dure.compare(small_task(), SYSTEMS, stop=Stop(epochs=2), out=tmp_path, seed=4)
    folders = ["single-worker", "gradient-descent", "fedavg-iid-k-3"]
    assert {p.name for p in tmp_path.iterdir()} == {*folders, "comparison.json", "report.html"}
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    keys = {"task", "seed", "seeds", "stop", "planned", "runs", "failed"}
    assert set(comparison) == keys
    assert comparison["planned"] == folders
    assert (comparison["task"], comparison["seed"], comparison["runs"]) == ("small", 4, folders)
    assert comparison["failed"] == {}
    assert [run.label for run in done.runs] == [
        "single worker",
        "gradient descent",
        "FedAvg iid K=3",
    ]
    for run, name in zip(done.runs, folders, strict=True):
        assert run.folder == tmp_path / name
        assert json.loads((run.folder / "config.json").read_text())["label"] == run.label
        assert (run.folder / "summary.json").exists()
    assert done.report == tmp_path / "report.html"


def test_a_run_of_a_comparison_is_the_run_alone_and_starts_where_the_others_do():
    loop = dure.Simulated(
        engine="loop"
    )  # which engine is the faster, a trial may say otherwise the second time
    entries = [(system, loop if system is SYSTEMS[2] else dure.Processes(1)) for system in SYSTEMS]
    done = dure.compare(small_task(), entries, stop=Stop(epochs=2), seed=4)
    for run, (strategy, world) in zip(done.runs, entries, strict=True):
        assert same_bits(
            run, dure.train(small_task(), strategy, world, stop=Stop(epochs=2), seed=4)
        )
    assert len({run.history.evaluations[0].metrics["test_loss"] for run in done.runs}) == 1
    assert done.report is None


def test_a_system_that_fails_does_not_end_the_others(tmp_path):
    done = dure.compare(
        small_task(loss=refuses_full_batches), SYSTEMS, stop=Stop(epochs=1), out=tmp_path
    )
    assert [run.label for run in done.runs] == ["single worker", "FedAvg iid K=3"]
    assert list(done.failed) == ["gradient descent"]
    assert isinstance(done.failed["gradient descent"], WorkerFailedError)
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert comparison["failed"] == {
        "gradient descent": "rank 0 failed in step 1: KeyError: 'too many'"
    }
    assert "too many" in (tmp_path / "report.html").read_text()


def test_systems_of_one_name_are_numbered(tmp_path):
    systems = [SingleWorker(5), SingleWorker(10), SingleWorker(20)]
    done = dure.compare(small_task(), systems, stop=Stop(steps=1), out=tmp_path)
    labels = ["single worker", "single worker (2)", "single worker (3)"]
    assert [run.label for run in done.runs] == labels
    assert all((tmp_path / name / "summary.json").exists() for name in map(_slug, labels))


@given(st.lists(st.sampled_from(["a", "A", "a ×2", "a x2", "a (2)", "b", "ring ×2"]), max_size=6))
def test_no_two_systems_share_a_label_or_a_folder(labels):
    unique = _unique(labels)
    assert len(set(map(_slug, unique))) == len(labels)


def test_a_world_may_be_given_with_its_system():
    entries = [SingleWorker(10), (DataParallel(10), dure.Processes(1))]
    alone, ranks = dure.compare(small_task(), entries, stop=Stop(steps=4)).runs
    assert (weights_of(alone) - weights_of(ranks)).abs().max() < 1e-12


def test_limits_that_a_system_does_not_count_do_not_concern_it():
    first, second = dure.compare(
        small_task(), [SingleWorker(10), FedAvg(clients=2)], stop=Stop(steps=3, rounds=2)
    ).runs
    assert (first.summary["ended"], first.summary["steps"]) == ("steps", 3)
    assert (second.summary["ended"], second.summary["steps"]) == ("rounds", 2)


@pytest.mark.parametrize(
    ("systems", "stop", "complaint"),
    [
        ([], Stop(steps=1), "there is nothing to compare"),
        ([SingleWorker(10), FedAvg(fraction=2.0)], Stop(epochs=1), "fraction is 2.0"),
        ([SingleWorker(10), FedAvg()], Stop(steps=1), "this run has no stopping condition"),
        ([(SingleWorker(10), dure.Simulated())], Stop(steps=1), "does not run in Simulated"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_folder_is_made(tmp_path, systems, stop, complaint):
    with pytest.raises(ValueError, match=complaint):
        dure.compare(small_task(), systems, stop=stop, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not empty"):
        dure.compare(small_task(), SYSTEMS, stop=Stop(epochs=1), out=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_ctrl_c_ends_the_comparison_and_reports_what_there_is(tmp_path):
    def interrupt(label, event):
        if label == "gradient descent" and event["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    done = dure.compare(
        small_task(),
        SYSTEMS,
        stop=Stop(epochs=9),
        out=tmp_path,
        on_progress=interrupt,
        evaluate_every=1,
    )
    assert [run.label for run in done.runs] == ["single worker", "gradient descent"]
    assert done.runs[-1].summary["ended"] == "interrupt"
    assert json.loads((tmp_path / "comparison.json").read_text())["runs"] == [
        "single-worker",
        "gradient-descent",
    ]
    assert done.report.exists()


def test_progress_is_told_by_label():
    told = []
    dure.compare(
        small_task(),
        SYSTEMS,
        stop=Stop(epochs=1),
        on_progress=lambda label, event: told.append(label),
    )
    assert list(dict.fromkeys(told)) == ["single worker", "gradient descent", "FedAvg iid K=3"]
    assert torch.is_grad_enabled()

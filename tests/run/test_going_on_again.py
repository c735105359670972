"""Comparisons under several seeds, and those that go on from their folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest

import dure
from dure.contracts.stop import Stop
from dure.errors import RunFolderError
from dure.report.formatting import metric_value
from dure.report.read import read_runs
from dure.report.seeds import groups, over_seeds
from small import same_bits, small_task

STOP = Stop(epochs=3)
SYSTEMS = [dure.SingleWorker(10), dure.FedAvg(clients=2)]


def digits(**options):
    return dure.load_task("digits", model="logistic", **options)


def test_each_seed_has_a_run_of_its_own_and_its_bits(tmp_path):
    done = dure.compare(small_task(), SYSTEMS[:1], stop=STOP, seed=3, seeds=2, out=tmp_path)
    assert [run.summary["seed"] for run in done.runs] == [3, 4]
    assert {run.label for run in done.runs} == {"single worker"}
    names = ["single-worker-seed-3", "single-worker-seed-4"]
    assert [run.folder.name for run in done.runs] == names
    alone = dure.train(small_task(), SYSTEMS[0], stop=STOP, seed=4)
    assert same_bits(done.runs[1], alone)
    assert not same_bits(*done.runs)
    assert "Over seeds" in (tmp_path / "report.html").read_text()


def test_without_test_data_seeds_are_told_apart_by_the_loss_of_training(tmp_path):
    task = small_task(test=None, metrics={})
    done = dure.compare(task, SYSTEMS[:1], stop=STOP, seeds=2, out=tmp_path)
    section = over_seeds(read_runs([tmp_path]).runs)
    mean = sum(run.summary["train_loss"] for run in done.runs) / 2
    heads = re.findall(r'<th scope="col">([^<]*)</th>', section)
    assert heads[:3] == ["system", "seeds", "train loss"]
    assert metric_value("loss", mean) in section


def test_a_system_may_have_a_task_of_its_own_and_is_called_by_what_differs():
    task = digits(lr=0.1)
    entries = [dure.SingleWorker(), (dure.SingleWorker(), None, digits(lr=0.01))]
    first, second = dure.compare(task, entries, stop=Stop(steps=2)).runs
    assert (first.label, second.label) == ("single worker", "single worker, lr 0.01")
    alone = dure.train(digits(lr=0.01), dure.SingleWorker(), stop=Stop(steps=2))
    assert same_bits(second, alone)
    named = [(dure.SingleWorker(), None, task, "mine")]
    assert dure.compare(task, named, stop=Stop(steps=1)).runs[0].label == "mine"


@pytest.mark.parametrize("seeds", [0, -1, True, 1.5])
def test_what_is_no_number_of_seeds_is_refused(tmp_path, seeds):
    with pytest.raises(ValueError, match="seeds is"):
        dure.compare(small_task(), SYSTEMS, stop=STOP, seeds=seeds, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_comparison_goes_on_to_the_same_bits(tmp_path):
    def interrupt(label, event):
        if label == "single worker, seed 1" and event["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    how = {"stop": Stop(epochs=1), "seeds": 2}
    whole = dure.compare(digits(), SYSTEMS, **how)
    broken = dure.compare(
        digits(), SYSTEMS, **how, out=tmp_path / "all", on_progress=interrupt, evaluate_every=1
    )
    assert [run.summary["ended"] for run in broken.runs] == ["epochs", "interrupt"]
    kept = (tmp_path / "all" / "single-worker-seed-0" / "summary.json").stat().st_mtime_ns
    told = []
    done = dure.resume_comparison(
        tmp_path / "all", on_progress=lambda label, event: told.append(label)
    )
    assert [run.summary["ended"] for run in done.runs] == ["epochs"] * 4
    assert all(same_bits(*pair) for pair in zip(done.runs, whole.runs, strict=True))
    # What had ended was neither trained nor written again.
    assert "single worker, seed 0" not in told
    after = (tmp_path / "all" / "single-worker-seed-0" / "summary.json").stat().st_mtime_ns
    assert after == kept
    comparison = json.loads((tmp_path / "all" / "comparison.json").read_text())
    assert comparison["runs"] == comparison["planned"]


def test_the_report_of_a_killed_comparison_shows_what_was_begun(tmp_path):
    out = tmp_path / "all"
    dure.compare(small_task(), SYSTEMS[:1], stop=STOP, seeds=3, out=out)
    comparison = json.loads((out / "comparison.json").read_text())
    del comparison["runs"], comparison["failed"]
    (out / "comparison.json").write_text(json.dumps(comparison))
    shutil.rmtree(out / "single-worker-seed-2")
    (out / "single-worker-seed-1" / "history.jsonl").unlink()
    assert [run.folder.name for run in read_runs([out]).runs] == ["single-worker-seed-0"]


def test_runs_of_several_seeds_are_found_in_any_folders(tmp_path):
    for seed in (0, 1):
        out = tmp_path / f"run{seed}"
        dure.train(small_task(), SYSTEMS[0], stop=STOP, seed=seed, out=out)
    dure.train(small_task(), dure.SingleWorker(5), stop=STOP, out=tmp_path / "other")
    folders = [tmp_path / name for name in ("run0", "other", "run1")]
    (group,) = groups(read_runs(folders).runs)
    assert [run.folder.name for run in group] == ["run0", "run1"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "does not contain a comparison"),
        ({"runs": []}, "does not list the planned runs"),
        ({"planned": ["../elsewhere"], "seeds": 1}, "it has no folder"),
    ],
)
def test_a_folder_that_holds_no_comparison_is_refused(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "comparison.json").write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match=complaint):
        dure.resume_comparison(tmp_path)


def test_a_run_is_told_in_a_line(tmp_path):
    run = dure.train(small_task(), SYSTEMS[0], stop=Stop(steps=2), out=tmp_path / "run")
    assert repr(run).startswith("Run('single worker', 2 steps, test_loss=")
    assert f"folder='{tmp_path / 'run'}'" in repr(run)
    assert len(repr(run).splitlines()) == 1

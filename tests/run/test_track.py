"""Trackers: what the real ones read back of a run."""

from __future__ import annotations

import json
import posixpath
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dure
from dure.contracts.strategy import Strategy
from dure.run.track import FAILURES, MLflowNames, TensorBoard, Tracker, settings, tracker
from small import small_task


def trained(track: str, system: Strategy | None = None, **how: Any) -> dure.Run:
    system = system or dure.SingleWorker(batch_size=8)
    stop = how.pop("stop", dure.Stop(epochs=2))
    return dure.train(small_task(), system, stop=stop, track=track, **how)


class Notes(Tracker):
    """A tracker of ours, for what all of them are told."""

    def __init__(self) -> None:
        super().__init__("here")
        self.told: list[tuple[int, dict[str, float]]] = []
        self.ended = ""

    def begin(self, config: Any) -> None:
        self.told.clear()

    def log(self, step: int, numbers: Any) -> None:
        self.told.append((step, dict(numbers)))

    def close(self, how: str, run: dure.Run | None) -> None:
        self.ended = how


def test_a_tracker_is_told_every_loss_and_every_metric() -> None:
    notes = Notes()
    run = dure.train(
        small_task(),
        dure.DataParallel(batch_size=8),
        dure.Processes(2),
        dure.Stop(epochs=2),
        callbacks=[notes],
    )
    losses = [(one.step, one.loss) for one in run.history.steps]
    assert [(step, told["loss"]) for step, told in notes.told if "loss" in told] == losses
    metrics = {step: told for step, told in notes.told if "test_loss" in told}
    assert {step: told["test_accuracy"] for step, told in metrics.items()} == {
        one.step: one.metrics["test_accuracy"] for one in run.history.evaluations
    }
    assert notes.ended == "done"


class Broken(Notes):
    def log(self, step: int, numbers: Any) -> None:
        super().log(step, numbers)
        raise ConnectionError("no server")


def test_a_tracker_that_fails_ends_no_run_and_is_told_no_more() -> None:
    broken = Broken()
    with pytest.warns(UserWarning, match="ConnectionError: no server") as warned:
        run = dure.train(
            small_task(),
            dure.SingleWorker(batch_size=8),
            stop=dure.Stop(steps=6),
            callbacks=[broken],
        )
    assert len(run.history.steps) == 6
    assert len(broken.told) == FAILURES
    assert "it receives no more events" in str(warned[-1].message)


@given(st.lists(st.text(max_size=300), unique=True, max_size=8))
def test_names_are_such_as_mlflow_takes_and_differ(names: list[str]) -> None:
    spelled = MLflowNames()
    found = [spelled.of(name) for name in names]
    assert found == [spelled.of(name) for name in names]
    assert len(set(found)) == len(names)
    for name in found:
        assert re.fullmatch(r"[/\w.\- :]+", name)
        assert len(name) <= 250
        assert name == posixpath.normpath(name)
        assert not name.startswith(("/", "."))


def test_plain_names_stay_as_they_are() -> None:
    for name in ("test_accuracy", "task.learning.lr", "group 1/loss", "정확도"):
        assert MLflowNames().of(name) == name


@pytest.mark.parametrize("label", ["a" * 256, "한" * 256])
def test_tensorboard_takes_labels_of_any_length(label: str, tmp_path: Path) -> None:
    reads = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    dure.train(
        small_task(),
        dure.SingleWorker(batch_size=8),
        stop=dure.Stop(steps=2),
        label=label,
        track=f"tensorboard:{tmp_path}",
    )
    (folder,) = tmp_path.iterdir()
    assert reads.EventAccumulator(str(folder)).Reload().Tags()["scalars"]


def test_settings_are_one_level_of_names() -> None:
    config = {"seed": 0, "task": {"title": "small", "options": {}}}
    assert settings(config) == {"seed": "0", "task.title": "small"}


def test_tensorboard_reads_back_what_it_was_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained(f"tensorboard:{tmp_path}", dure.FedAvg(clients=2, batch_size=8))
    (folder,) = tmp_path.iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    read = [(one.step, one.value) for one in events.Scalars("test_loss")]
    steps, losses = run.history.curve("test_loss")
    assert [step for step, _ in read] == steps
    assert [value for _, value in read] == pytest.approx(losses, rel=1e-6)
    assert [one.step for one in events.Scalars("loss")] == [1, 2]


def test_mlflow_has_the_run_its_settings_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    # Beside a database it keeps files where the program runs.
    monkeypatch.chdir(tmp_path)
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = trained(f"mlflow:{uri}", out=tmp_path / "run", stop=dure.Stop(epochs=1))
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    (told,) = client.search_runs([experiment.experiment_id])
    assert told.info.status == "FINISHED"
    assert told.data.params["strategy.batch_size"] == "8"
    read = client.get_metric_history(told.info.run_id, "loss")
    assert [(one.step, one.value) for one in read] == [(s.step, s.loss) for s in run.history.steps]
    files = {one.path for one in client.list_artifacts(told.info.run_id)}
    assert {"config.json", "model.safetensors", "summary.json"} <= files
    # What goes on goes on there.
    dure.resume(
        tmp_path / "run", task=small_task(), stop=dure.Stop(epochs=2), track=f"mlflow:{uri}"
    )
    (again,) = client.search_runs([experiment.experiment_id])
    assert again.info.run_id == told.info.run_id
    read = client.get_metric_history(told.info.run_id, "loss")
    assert [one.step for one in read] == list(range(1, 2 * len(run.history.steps) + 1))


def test_weights_and_biases_has_the_run_in_its_own_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = trained("wandb:small", stop=dure.Stop(epochs=1))
    (written,) = tmp_path.rglob("run-*.wandb")
    assert _losses_in(written) == [step.loss for step in run.history.steps]


def _losses_in(file: Path) -> list[float]:
    from wandb.proto import wandb_internal_pb2

    losses: dict[int, float] = {}
    for content in _records_in(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        items = {(one.key or one.nested_key[0]): one.value_json for one in record.history.item}
        if "loss" in items:
            losses[int(items["_step"])] = json.loads(items["loss"])
    return [losses[step] for step in sorted(losses)]


def _records_in(content: bytes) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, which has 7 bytes of W&B's in front.

    Each piece has a checksum of 4 bytes, its length in 2, and a type in 1: whole, or the first, a
    middle or the last one of a record. A block has 32,768 bytes, and no piece leaves it.
    """
    at = 7
    record = b""
    while at + 7 <= len(content):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.parametrize(
    ("track", "said"),
    [
        ("tensorbord:x", "did you mean 'tensorboard'"),
        ("mlflow", "lacks the destination: write mlflow:URI"),
        (7, "give a str"),
    ],
)
def test_what_is_no_tracker_is_refused_before_any_work(track: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trained(track)


def test_one_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"pip install 'dure\[mlflow\]'"):
        tracker("mlflow:here")


def test_the_command_line_names_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    asked = ["train", "digits", "single-worker", "--steps", "2", "--validation", "0.1"]
    where = ["--track", f"tensorboard:{tmp_path / 'board'}", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "dure", *asked, *where, "--patience", "3", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    summary = json.loads(done.stdout)
    assert summary["best_model"]["monitor"] == "validation_loss"
    assert len(list((tmp_path / "board").rglob("events.out*"))) == 1
    assert isinstance(tracker(f"tensorboard:{tmp_path}"), TensorBoard)

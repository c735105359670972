"""The folder of a run on disk."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dure
from dure.errors import RunFolderError
from dure.record.history import Evaluation, Step
from dure.record.run import RunFolder, load_run
from small import small_task


def step(number: int) -> Step:
    return Step(number, 0.0, 0, 1.0, 0.0, 0, 0, 0.0, 0.0, 0.0)


def lines(path) -> int:
    file = path / "history.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_new_folder_holds_what_was_asked_with_its_parents_made(tmp_path):
    path = tmp_path / "a" / "b"
    folder = RunFolder.create(path, {"label": "größer", "seed": 3})
    assert folder.config(whole=True) == {"label": "größer", "seed": 3}
    assert [p.name for p in path.iterdir()] == ["config.json"]
    assert len(RunFolder.open(path).history().records) == 0


def test_an_empty_folder_will_do(tmp_path):
    RunFolder.create(tmp_path, {})


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match=r"is not empty: choose another with --out") as caught:
        RunFolder.create(tmp_path, {})
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(RunFolderError):
            RunFolder.create(path, {})


def test_a_run_enters_its_own_folder_again_whatever_its_ranks(tmp_path):
    asked = {
        "task": {"name": "digits"},
        "seed": 3,
        "world": {"ranks": 2},
        "label": "data parallel ×2",
    }
    RunFolder.enter(tmp_path / "run", asked)
    RunFolder(tmp_path / "run").write_json("summary.json", {})
    again = RunFolder.enter(
        tmp_path / "run", {**asked, "world": {"ranks": 1}, "label": "data parallel"}
    )
    assert again.read_json("config.json")["world"] == {"ranks": 1}
    assert [path.name for path in again.path.iterdir()] == ["config.json"], "it has not ended yet"
    with pytest.raises(
        RunFolderError,
        match="contains another run, which differs in task, seed: choose another folder",
    ):
        RunFolder.enter(tmp_path / "run", {**asked, "seed": 4, "task": {"name": "mnist"}})
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="is not empty"):
        RunFolder.enter(tmp_path, asked)


def test_a_folder_without_config_is_no_run(tmp_path):
    with pytest.raises(RunFolderError, match=r"is not a run folder: it has no config\.json"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("content", ["", '{"label": "cut o', "[1, 2]", "\xff"])
def test_a_damaged_config_is_told_by_its_name(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(RunFolderError, match=r"config\.json"):
        RunFolder.open(tmp_path).read_json("config.json")


def test_the_history_grows_while_the_run_goes(tmp_path):
    folder = RunFolder(tmp_path, flush_seconds=0.0)
    for number in range(3):
        folder.append(step(number))
        assert lines(tmp_path) == number + 1
    assert [record.step for record in folder.history().records] == [0, 1, 2]
    folder.close()


def test_lines_that_wait_are_written_at_the_latest_when_the_folder_is_closed(tmp_path):
    folder = RunFolder(tmp_path, flush_seconds=1e9)
    folder.flush()
    folder.append(step(1))
    assert lines(tmp_path) == 0
    folder.close()
    assert lines(tmp_path) == 1
    again = RunFolder(tmp_path)
    again.append(step(2))
    again.close()
    assert [record.step for record in again.history().records] == [1, 2]


def test_a_history_that_was_taken_back_goes_on(tmp_path):
    folder = RunFolder(tmp_path, flush_seconds=0.0)
    for number in range(5):
        folder.append(step(number))
    folder.close()
    (tmp_path / "history.jsonl").open("ab").write(b'{"kind":"step","st')
    folder.rewrite_history(folder.history().until(2))
    folder.append(step(3))
    folder.close()
    assert [record.step for record in folder.history().records] == [0, 1, 2, 3]


def test_a_damaged_line_in_the_middle_is_told_by_the_file_s_name(tmp_path):
    (tmp_path / "history.jsonl").write_bytes(b'{"kind":"st\n{"kind":"step"}\n')
    with pytest.raises(RunFolderError, match=r"cannot read .*history\.jsonl"):
        RunFolder(tmp_path).history()


def ended_run(path) -> nn.Linear:
    model = nn.Linear(2, 2)
    folder = RunFolder.create(path, {"label": "x"})
    folder.append(Evaluation(0, 0.0, 0, None, 0.0, {"test_loss": 2.0}, 0, 0, 0.0, 0.0, 0.0, 0))
    folder.finish(model.state_dict(), {"label": "x", "test_loss": 2.0}, [])
    return model


def test_an_ended_run_is_loaded_with_its_weights(tmp_path):
    model = ended_run(tmp_path)
    run = load_run(str(tmp_path), lambda: nn.Linear(2, 2))
    assert all(map(torch.equal, run.model.state_dict().values(), model.state_dict().values()))
    assert (run.label, run.summary["test_loss"], run.folder) == ("x", 2.0, tmp_path)
    assert run.history.best() == {"test_loss": 2.0}
    assert {p.name for p in tmp_path.iterdir()} == {
        *("config.json", "history.jsonl", "model.safetensors", "summary.json", "trace.json")
    }


def test_a_run_that_has_not_ended_is_not_loaded(tmp_path):
    RunFolder.create(tmp_path, {})
    with pytest.raises(RunFolderError, match=r"summary\.json"):
        load_run(tmp_path, lambda: nn.Linear(2, 2))


def test_weights_that_are_missing_damaged_or_another_model_s_are_refused(tmp_path):
    ended_run(tmp_path)
    with pytest.raises(RunFolderError, match=r"model\.safetensors into this model"):
        load_run(tmp_path, lambda: nn.Linear(3, 2))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(RunFolderError, match=r"model\.safetensors"):
        load_run(tmp_path, lambda: nn.Linear(2, 2))
    file.unlink()
    with pytest.raises(RunFolderError, match=r"model\.safetensors"):
        load_run(tmp_path, lambda: nn.Linear(2, 2))


def test_the_weights_are_a_plain_state_dict_that_others_can_read(tmp_path):
    model = ended_run(tmp_path)
    save_file(model.state_dict(), tmp_path / "by_hand.safetensors")
    assert (tmp_path / "by_hand.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()
    json.loads((tmp_path / "trace.json").read_text())


def test_one_holds_it_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.record.lock.MOMENT", 0.05)
    one, other = RunFolder.create(tmp_path, {}), RunFolder.open(tmp_path)
    one.hold()
    with pytest.raises(RunFolderError, match="another process is training in"):
        other.hold()
    one.close()
    other.hold()
    other.close()


def test_what_is_left_of_who_was_killed_does_not_hold_it(tmp_path, monkeypatch):
    RunFolder.create(tmp_path, {})
    waiting, end = os.pipe()
    killed = os.fork()
    if killed == 0:
        RunFolder.open(tmp_path).hold()
        if os.fork() == 0:
            os.close(end)
            os.read(waiting, 1)  # until the test has closed it
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    monkeypatch.setattr("dure.record.lock.MOMENT", 0.05)
    held = RunFolder.open(tmp_path)
    held.hold()
    held.close()
    os.close(end)
    os.close(waiting)


def test_it_is_let_go_of_when_it_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.record.lock.MOMENT", 0.05)
    held = RunFolder.create(tmp_path, {})

    def full(*_):
        raise OSError("No space left on device")

    held.hold()
    held.append(step(1))
    monkeypatch.setattr(RunFolder, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        held.close()
    monkeypatch.undo()
    monkeypatch.setattr(RunFolder, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        RunFolder.open(tmp_path).begin_again({})
    again = RunFolder.open(tmp_path)
    again.hold()
    again.close()


def test_a_run_at_work_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.record.lock.MOMENT", 0.05)
    said: list[str] = []

    def resume(event):
        if not said:
            with pytest.raises(RunFolderError) as caught:
                dure.resume(tmp_path, task=small_task())
            said.append(str(caught.value))

    dure.train(
        small_task(), dure.SingleWorker(), stop=dure.Stop(steps=3), out=tmp_path, on_progress=resume
    )
    assert "another process is training in" in said[0]
    assert dure.resume(tmp_path, task=small_task(), stop=dure.Stop(steps=4)).summary["steps"] == 4

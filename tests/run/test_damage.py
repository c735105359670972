"""Damage to a run folder is noticed before the run goes on, told by the file's name, and changes
nothing; what is not dure's own stays where it is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dure
from dure.errors import RunFolderError, RunFolderWriteError
from dure.record import disk
from small import same_bits, small_task
from written import files_in

LONGER = dure.Stop(steps=9)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of six steps, and of another seed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("run", 0), ("other", 5)):
        begin(folder / name, seed=seed)
    return folder


def begin(out: Path, **how: Any) -> dure.Run:
    stop = how.pop("stop", dure.Stop(steps=6))
    strategy = dure.SingleWorker(8)
    return dure.train(small_task(), strategy, stop=stop, out=out, checkpoint_every=2, **how)


def go_on(folder: Path, **given: Any) -> dure.Run:
    return dure.resume(folder, **{"task": small_task(), "stop": LONGER, **given})


def newest(folder: Path) -> Path:
    (found,) = (folder / "checkpoint").glob("0*6")
    return found


def flip(file: Path, place: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 0x40
    file.write_bytes(bytes(content))


def of_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return changed


def without_seal(folder: Path) -> None:
    """As an older dure has written it."""
    state = files_in(folder / "checkpoint")[2]
    (newest(folder) / "state.json").write_bytes(state)


def state_is(text: str) -> Callable[[Path], None]:
    return lambda folder: (newest(folder) / "state.json").write_text(text) and None


def of_weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        without_seal(folder)
        file = newest(folder) / "model.safetensors"
        save_file({name: change(value) for name, value in load_file(file).items()}, file)

    return changed


def of_state(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Of the mapping in state.json, whose entries are pairs."""

    def changed(folder: Path) -> None:
        without_seal(folder)
        file = newest(folder) / "state.json"
        state = json.loads(file.read_bytes())
        entries = dict(state["$dict"])
        change(entries)
        file.write_text(json.dumps({"$dict": list(map(list, entries.items()))}))

    return changed


def without_lines(folder: Path) -> None:
    lines = (folder / "history.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "history.jsonl").write_bytes(b"".join([*lines[:3], *lines[4:]]))


def other_line(folder: Path) -> None:
    text = (folder / "history.jsonl").read_text()
    (folder / "history.jsonl").write_text(text.replace('"samples":16', '"samples":17', 1))


def checkpoint_of_other(folder: Path) -> None:
    shutil.rmtree(newest(folder))
    shutil.copytree(newest(folder.parent / "other"), folder / "checkpoint" / "00000006")


DEEP = "[" * 100_000 + "]" * 100_000
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda run: flip(newest(run) / "model.safetensors"), "checksum of model.safet"),
    "tensors": (lambda run: flip(newest(run) / "state.safetensors"), "checksum of state.safet"),
    "state": (lambda run: flip(newest(run) / "state.json"), "damaged .state.json: its checksum"),
    "lines": (without_lines, r"history\.jsonl does not contain the lines"),
    "a line": (other_line, r"history\.jsonl does not contain the lines"),
    "no history": (
        lambda run: (run / "history.jsonl").unlink(),
        r"history\.jsonl does not contain",
    ),
    "lines, old": (lambda run: (without_seal(run), without_lines(run)), r"history\.jsonl does not"),
    "other run": (checkpoint_of_other, "00000006 belongs to another run than"),
    "other step": (
        lambda run: newest(run).rename(run / "checkpoint" / "00000016"),
        "00000016 is damaged .it contains step 6",
    ),
    "seed": (of_config(lambda config: config.update(seed=9)), "seed is 9 but was 0"),
    "batch size": (
        of_config(lambda config: config["strategy"].update(batch_size=4)),
        "strategy.batch_size is 4 but was 8",
    ),
    "run": (of_config(lambda config: config.update(run="0" * 16)), "belongs to another run than"),
    "a list": (state_is("[]"), "00000006 is damaged"),
    "a number": (state_is("1" + "0" * 5000), "00000006 is damaged"),
    "deep": (state_is(DEEP), "00000006 is damaged"),
    "deep, in a tree": (state_is(f'{{"$dict": [["version", {DEEP}]]}}'), "00000006 is damaged"),
    "an object": (state_is('{"a": 1, "b": 2}'), "00000006 is damaged"),
    "no tensor": (state_is('{"$tensor": "no such"}'), "00000006 is damaged"),
    "other type": (
        of_weights(lambda weight: weight.float()),
        r"is torch\.float32 of .* torch\.float64 of",
    ),
    "other shape": (of_weights(lambda weight: weight[:1].clone()), "00000006 is damaged"),
    "no learner": (of_state(lambda state: state.pop("learner")), "does not match the training"),
    "no position": (of_state(lambda state: state.pop("position")), "contains step None"),
    "generators": (of_state(lambda state: state.update(generators=3)), "does not match the"),
    "deep config": (lambda run: (run / "config.json").write_text(DEEP), r"config\.json"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told_and_nothing_is_changed(what: str, runs: Path, tmp_path: Path) -> None:
    change, said = DAMAGE[what]
    shutil.copytree(runs, tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    change(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with warnings.catch_warnings():
        # Of a checkpoint without a seal.
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(RunFolderError, match=said):
            go_on(folder)
    # What does not fit shows only to the rank that goes on with it.
    if "does not match the" not in said:
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_is_whole_goes_on_to_the_same_bits(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    whole = begin(tmp_path / "whole", stop=LONGER)
    # What a full disk or a kill left after the checkpoint: half a line, and another one after it.
    with open(tmp_path / "run" / "history.jsonl", "ab") as history:
        history.write(b'{"kind":"step","st{"kind":"step"}\n{"kind":')
    again = go_on(tmp_path / "run")
    assert same_bits(whole, again)
    assert [step.step for step in again.history.steps] == list(range(1, 10))
    # And once more from the checkpoint of the resumed part.
    assert go_on(tmp_path / "run", stop=dure.Stop(steps=11)).summary["steps"] == 11


def test_a_checkpoint_without_a_seal_goes_on_and_says_so(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    without_seal(tmp_path / "run")
    of_config(lambda config: config.pop("run"))(tmp_path / "run")
    with pytest.warns(UserWarning, match="has no checksums, because an older dure wrote it"):
        again = go_on(tmp_path / "run")
    assert same_bits(begin(tmp_path / "whole", stop=LONGER), again)
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["00000009"]


@pytest.mark.parametrize("sealed", [True, False])
def test_a_link_in_a_folder_leads_to_no_file_of_the_user_s(
    sealed: bool, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    history = tmp_path / "run" / "history.jsonl"
    mine = tmp_path / "mine"
    shutil.move(history, mine)
    with open(mine, "a") as file:
        file.write("of the user's\n")
    history.symlink_to(mine)
    before = mine.read_bytes()
    if not sealed:
        shutil.rmtree(tmp_path / "run" / "checkpoint")
    with pytest.raises(RunFolderError, match=r"history\.jsonl is a link"):
        go_on(tmp_path / "run")
    assert mine.read_bytes() == before


def test_other_versions_are_told_and_the_run_goes_on(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    of_config(lambda config: config.update(versions={"dure": "9.9", "torch": "1.0"}))(
        tmp_path / "run"
    )
    with pytest.warns(UserWarning, match=r"written by dure 9\.9 .* and torch 1\.0"):
        assert go_on(tmp_path / "run").summary["steps"] == 9


def test_what_may_change_may_be_edited(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    of_config(lambda config: config.update(label="mine", checkpoint_every=3))(tmp_path / "run")
    assert go_on(tmp_path / "run").summary["label"] == "mine"


def test_other_data_than_those_of_the_run_are_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    with pytest.raises(RunFolderError, match="train_examples is 30 but was 41"):
        go_on(tmp_path / "run", task=small_task(n=30))


def test_what_is_not_of_this_run_is_neither_read_nor_removed(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint"
    mine = ("00000006.bak", "9-backup", "7", "my-good-weights", "٠٠٠٠٠٠٠٩")
    for name in mine:
        shutil.copytree(newest(runs / "other"), folder / name)
    # An older one of another run, by dure's own name.
    shutil.copytree(newest(runs / "other"), folder / "00000003")
    (folder / "notes.txt").write_text("mine")
    (folder / ".00000004.partial").mkdir()
    again = go_on(tmp_path / "run")
    assert same_bits(begin(tmp_path / "whole", stop=LONGER), again)
    left = {path.name for path in folder.iterdir()}
    assert left == {*mine, "notes.txt", "00000003", "00000009"}


def test_the_newest_has_the_largest_number(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint"
    for step in ("99999999", "100000000"):
        shutil.copytree(newest(runs / "run"), folder / step)
    with pytest.raises(RunFolderError, match="100000000 is damaged"):
        go_on(tmp_path / "run")


def test_trained_weights_that_are_damaged_are_not_loaded(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")
    assert dure.load_run(tmp_path / "run", small_task().model).summary["steps"] == 6
    flip(tmp_path / "run" / "model.safetensors")
    with pytest.raises(RunFolderError, match=r"model\.safetensors is damaged"):
        dure.load_run(tmp_path / "run", small_task().model)


def test_a_peak_of_memory_before_the_interrupt_still_counts(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "run", tmp_path / "run")

    def larger(state: dict[str, Any]) -> None:
        workers = [dict(one["$dict"]) for one in state["workers"]]
        workers[0]["peak_memory"] = 1 << 50
        state["workers"] = [{"$dict": list(map(list, one.items()))} for one in workers]

    of_state(larger)(tmp_path / "run")
    with pytest.warns(UserWarning, match="has no checksums"):
        assert go_on(tmp_path / "run").summary["peak_memory"] == 1 << 50


class Disk:
    """Takes half of what it is given, then nothing, in turn for a number of writes."""

    def __init__(self, full_for: int) -> None:
        self.left = full_for

    def write(self, descriptor: int, content: bytes) -> int:
        self.left -= 1
        if self.left < 0:
            return write(descriptor, content)
        if self.left % 2:
            return write(descriptor, content[: len(content) // 2 or 1])
        return full(descriptor, content)


def full(descriptor: int, content: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


write = os.write


def test_a_disk_that_is_full_for_a_moment_costs_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.os, "write", Disk(full_for=8).write)
    begin(tmp_path / "run")
    monkeypatch.undo()
    steps = [
        step.step for step in dure.load_run(tmp_path / "run", small_task().model).history.steps
    ]
    assert steps == list(range(1, 7))


def test_a_disk_that_stays_full_fails_the_run_by_the_file_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MOMENT", 0.05)
    begin(tmp_path / "run", stop=dure.Stop(steps=4))
    monkeypatch.setattr(disk.os, "write", full)
    with pytest.raises(RunFolderWriteError, match=r"cannot write .*history\.jsonl: No space left"):
        go_on(tmp_path / "run")
    monkeypatch.undo()
    assert RunFolderWriteError.exit_code == 1
    assert same_bits(begin(tmp_path / "whole", stop=LONGER), go_on(tmp_path / "run"))

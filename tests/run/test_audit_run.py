"""`dure audit RUN`: from a simulation that keeps its updates to the report that shows them."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dure
from dure.cli.main import main
from dure.errors import RunFolderError
from dure.record.png import SIGNATURE
from dure.report.read import read_run
from dure.report.update_leakage import update_leaks
from dure.run.audit import audit

QUICK = ["--iterations", "20", "--groups", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("audited") / "run"
    task = dure.load_task("digits", model="logistic")
    world = dure.Simulated(keep_updates=1)
    dure.train(task, dure.FedSGD(clients=200), world, dure.Stop(rounds=1), out=out)
    return out


def test_a_recorded_run_is_attacked_and_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sums", "1", "8", "--noise", "0", "1", "--compression", "none", "int8"]
    assert main(["audit", str(run), *flags, *QUICK]) == 0
    said = capsys.readouterr().out
    for words in ("labels right", "PSNR", "AUC", "8 updates", "noise 1", "int8", "without any"):
        assert words in said
    content = json.loads((run / "audit.json").read_text())
    rows = content["rows"]
    cells = {(row["attack"], row["sum"], row["change"]) for row in rows}
    changes = ("as sent", "int8", "noise 1")
    attacks = ("labels", "first-layer", "dlg", "geiping", "membership")
    wanted = {(a, m, c) for a in attacks for m in (1, 8) for c in changes}
    assert cells == wanted | {("membership, global model", 200, "as sent")}
    for row in rows:
        for value, low, high in row["figures"].values():
            assert low <= value <= high
        if "picture" in row:
            assert (run / "audit" / row["picture"]).read_bytes().startswith(SIGNATURE)
    section = update_leaks([read_run(run)])
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', section)
    assert len(pictures) == sum("picture" in row for row in rows) > 0
    assert all(base64.b64decode(one).startswith(SIGNATURE) for one in pictures)
    assert "What an update gives away" in section


def test_the_same_seed_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--attacks", "labels", "geiping", "--sums", "4", "--json", *QUICK]
    said = []
    for seed in ("0", "0", "1"):
        assert main(["audit", str(run), *flags, "--seed", seed]) == 0
        said.append(json.loads(capsys.readouterr().out)["rows"])
    assert said[0] == said[1]
    assert said[0] != said[2]


def test_canaries_are_told_with_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--attacks", "labels", "--canaries", "40", *QUICK]
    assert main(["audit", str(run), *flags]) == 0
    assert "20 of 20 guesses right, so epsilon is at least 1.8" in capsys.readouterr().out
    assert "40 canary clients" in update_leaks([read_run(run)])


def test_a_run_without_recorded_updates_is_told_how_to_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dure.train(
        dure.load_task("digits", model="logistic"),
        dure.FedSGD(clients=2),
        stop=dure.Stop(rounds=1),
        out=tmp_path / "run",
    )
    assert main(["audit", str(tmp_path / "run")]) == 2
    assert "--keep-updates" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sums", "0"], "each has to be 1 or more"),
        (["--attacks", "magic"], "there is no attack 'magic'"),
        (["--compression", "zip"], "zip"),
        (["--noise", "-1"], "0 or more"),
        (["--canaries", "1000"], "can have 2 to"),
    ],
)
def test_bad_input_is_refused_in_a_line(
    run: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run), *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_what_is_neither_a_log_nor_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main(["audit", str(tmp_path / "log"), "--sums", "1"]) == 2
    assert "do not apply to a client's log" in capsys.readouterr().err
    assert main(["audit"]) == 2
    assert "the folder of a run" in capsys.readouterr().err


def test_updates_of_another_model_or_of_other_data_are_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="belong to another model"):
        audit(run, task=dure.load_task("digits", model="mlp"))
    task = dure.load_task("digits", model="logistic")
    few = (task.train.inputs[:100], task.train.targets[:100])
    with pytest.raises(ValueError, match="the task has 100"):
        audit(run, task=dure.Task(task.model, task.loss, few, task.test))


def of_truth(index: object) -> Callable[[Path], object]:
    return lambda run: (run / "updates" / "truth-000000.json").write_text(
        json.dumps({"steps": [[index]]})
    )


def of_tensors(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Path], object]:
    def changed(run: Path) -> None:
        file = run / name
        save_file({key: change(value) for key, value in load_file(file).items()}, file)

    return changed


UPDATE = "updates/update-000000.safetensors"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "an example before the first": of_truth(-1),
    "an example of many digits": of_truth(10**400),
    "an example of text": of_truth("x"),
    "a change of truths": of_tensors(UPDATE, torch.Tensor.bool),
    "a change of whole numbers": of_tensors(UPDATE, torch.Tensor.long),
    "a shorter change": of_tensors(UPDATE, lambda value: value.reshape(-1)[1:].clone()),
    "a shorter model": of_tensors(
        "updates/model-00000.safetensors", lambda value: value.reshape(-1)[1:].clone()
    ),
    "another model": of_tensors("model.safetensors", torch.Tensor.bool),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_to_what_was_recorded_is_an_error_of_the_folder(
    what: str, run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    DAMAGE[what](tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"\.json|\.safetensors"):
        audit(tmp_path / "run")


def test_a_report_takes_no_pictures_from_elsewhere(run: Path) -> None:
    """A folder is data: names that lead out of it, links and other files are left out."""
    before = (run / "audit.json").read_text()
    content = json.loads(before)
    names = ["../../secret.png", "/etc/passwd", "999.png", "998.png", 7]
    (run / "audit").mkdir(exist_ok=True)
    (run / "audit" / "998.png").write_bytes(b"<svg onload=alert(1)>")
    content["rows"] = [
        {"attack": "<script>", "sum": 1, "change": "x", "figures": {}, "picture": name}
        for name in names
    ]
    (run / "audit.json").write_text(json.dumps(content))
    try:
        section = update_leaks([read_run(run)])
    finally:
        (run / "audit.json").write_text(before)
    assert "<img" not in section
    assert "<script>" not in section

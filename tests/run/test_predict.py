"""What the model of a run says of files and examples."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy
import pytest
import torch
from safetensors.torch import save_file

import dure
from dure.contracts.stop import Stop
from dure.errors import RunFolderError
from dure.run.predict import predict
from small import small_task

TASK = small_task()
ROWS = TASK.test.inputs[:5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    run = dure.train(TASK, dure.SingleWorker(10), stop=Stop(steps=3), out=out)
    with torch.no_grad():
        return out, run.model.eval()(ROWS)


def test_examples_come_in_the_dtype_of_the_task(tmp_path):
    task = small_task(train=(ROWS.double().numpy(), torch.arange(5) % 3), test=None)
    task = dataclasses.replace(task, model=lambda: TASK.model().float(), dtype=torch.float32)
    run = dure.train(task, dure.SingleWorker(5), stop=Stop(steps=1), out=tmp_path / "run")
    found = predict(tmp_path / "run", "train:0:5", task)
    with torch.no_grad():
        assert torch.equal(found.outputs, run.model.eval()(ROWS.float()))


def written(path, kind):
    file = path / f"rows.{kind}"
    rows = ROWS.tolist()
    if kind == "npy":
        numpy.save(file, ROWS.numpy())
    elif kind == "safetensors":
        save_file({"inputs": ROWS.contiguous()}, file)
    elif kind == "json":
        file.write_text(json.dumps(rows))
    else:
        lines = [",".join(f"x{i}" for i in range(6))]
        file.write_text("\n".join([*lines, *(",".join(map(repr, row)) for row in rows)]))
    return str(file)


@pytest.mark.parametrize("kind", ["npy", "csv", "json", "safetensors"])
def test_a_file_holds_several_examples(folder, tmp_path, kind):
    out, expected = folder
    found = predict(out, written(tmp_path, kind), TASK)
    assert (found.outputs - expected).abs().max() < 1e-12
    probabilities = expected.softmax(dim=1)
    assert torch.allclose(found.probabilities, probabilities)
    name, value = found.best(0)[0]
    assert (int(name), value) == (int(probabilities[0].argmax()), float(probabilities[0].max()))


def test_examples_of_the_task_and_standard_input_are_named(folder, monkeypatch):
    out, expected = folder
    assert (predict(out, "test:1:3", TASK).outputs - expected[1:3]).abs().max() < 1e-12
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(ROWS[0].tolist())))
    assert (predict(out, "-", TASK).outputs - expected[:1]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (
            "short.json",
            "[[1, 2]]",
            r"has the shape \(1, 2\), but an example of the task has \(6,\)",
        ),
        ("words.json", '["a"]', "does not contain an array of numbers"),
        ("half.json", "[1, ", "is not JSON"),
        ("one.txt", "1", "is neither a file of"),
        ("rows.npy", "not contain an array", "cannot read"),
        ("rows.safetensors", "no tensors", "cannot read"),
        (None, "absent.csv", "cannot read absent.csv"),
        (None, "test:20", "the task has 20 test examples"),
        (None, "train:3:3", "does not exist"),
    ],
)
def test_what_is_no_input_is_refused_in_a_line(folder, tmp_path, name, content, complaint):
    if name is not None:
        (tmp_path / name).write_text(content)
    source = content if name is None else str(tmp_path / name)
    with pytest.raises(ValueError, match=complaint):
        predict(folder[0], source, TASK)


def test_code_in_a_file_is_not_run(folder, tmp_path):
    evil = numpy.array([dict], dtype=object)
    numpy.save(tmp_path / "evil.npy", evil, allow_pickle=True)
    with pytest.raises(ValueError, match="cannot read"):
        predict(folder[0], str(tmp_path / "evil.npy"), TASK)


def test_a_run_that_has_not_ended_has_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunFolderError, match=r"summary\.json"):
        predict(tmp_path, "test:0", TASK)

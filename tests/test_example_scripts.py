"""Every example runs, says something useful, and leaves nothing behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dure.cli.main import main
from scripts import run_here
from stand_ins import patients

EXAMPLES = Path(__file__).parents[1] / "examples"
LEAST_ACCURACY = {
    "single_worker": 0.8,
    "fed_avg": 0.6,
    "my_task": 0.9,
    "averaging": 0.8,
    "threads": 0.7,
    "parameter_server": 0.7,
    "federated": 0.6,
    "split_learning": 0.8,
    "lora": 0.7,
    "foreign_loop": 0.85,
    "four_hospitals": 0.9,
    "next_word_by_user": 0.9,
    "handwriting_by_writer": 0.8,
    "fed_nova": 0.9,
    "moon": 0.8,
    "power_of_choice": 0.8,
    "optuna_search": 0.7,
    "hugging_face": 0.6,
    "lightning_client": 0.9,
    "trl_adapters": 0.7,
}
SHORT = 40
WITH_A_SERVER = 56
"""Lines of an example that starts a server and its clients besides."""
WITH_AN_ALGORITHM = 84
"""Lines of an example that writes down an algorithm of a paper, its rule first."""


def longest(text: str) -> int:
    """The lines that an example may have."""
    if "dure.federated" in text:
        return WITH_AN_ALGORITHM
    joins = "dure.join" in text or "dure.client.patch" in text
    return WITH_A_SERVER if joins else SHORT


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_runs(script, tmp_path, monkeypatch):
    text = script.read_text()
    if "import optuna" in text:
        pytest.importorskip("optuna")
    assert len(text.splitlines()) <= longest(text)
    assert text.startswith('"""')
    arguments = []
    if script.stem == "four_hospitals":
        arguments = [str(patients(tmp_path / "heart"))]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    said = run_here(script, *arguments)
    assert list((tmp_path / "here").iterdir()) == []
    numbers = [float(number) for number in re.findall(r"\b[01]\.\d+", said)]
    if script.stem in ("data_parallel", "model_parallel", "zero"):
        losses = [float(loss) for loss in re.findall(r"test loss (\S+?)[,\n]", said)]
        assert len(losses) >= 3
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)
    else:
        assert max(numbers) >= LEAST_ACCURACY[script.stem]


def test_the_task_of_ones_own_trains_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = f"{EXAMPLES / 'my_task.py'}:task"
    assert main(["train", task, "fed-avg", "--points", "200", "--rounds", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["samples"]) == (2, 400)

"""An aggregator, a partition and an attack of a user's own: on the command line, in run folders,
resumed, and shown without being run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import dure
from dure.cli.main import main
from dure.data import partition
from dure.federated import aggregate
from dure.fleet.attacks import parse_attack
from small import same_bits, small_task

OWN = '''
from dataclasses import dataclass

import torch

from dure.data.partition import Partition, ClientParts
from dure.federated.aggregate import Collects
from dure.fleet.attacks import Attack


@dataclass(frozen=True)
class Middle(Collects):
    """The coordinates' mean without the `out` largest and smallest."""

    out: int = 1

    def combine_finite(self, rows, dropped, turn, state):
        sorted_rows = [torch.stack([row[0] for row in rows.updates]).sort(0).values]
        kept = [one[self.out : len(one) - self.out].mean(0) for one in sorted_rows]
        return kept, None


@dataclass(frozen=True)
class Twice(Collects):
    """Twice what another says."""

    wraps = True
    times: float = 2.0
    inner: Collects = Middle()

    def combine_finite(self, rows, dropped, turn, state):
        combined, state = self.inner.combine_finite(rows, dropped, turn, state)
        return [one * self.times for one in combined], state


@dataclass(frozen=True)
class EveryNth(Partition):
    """Example k is client k mod K's, shifted."""

    shift: int = 0

    def _divide(self, clients, examples, seed):
        return ClientParts((torch.arange(len(examples)) + self.shift) % clients, clients)

    @property
    def description(self):
        return "every so-many-th example"


@dataclass(frozen=True)
class Zero(Attack):
    """Sends nothing but zeros, or as little as said."""

    value: float = 0.0

    def _lies(self, updates, liars, random):
        return {one: [torch.full_like(t, self.value) for t in updates[one]] for one in liars}
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "my_rules.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (aggregate.parse, "{}:Middle:2"),
        (aggregate.parse, "clipped:3.0/{}:Middle:1"),
        (aggregate.parse, "{}:Twice:2.0/median"),
        (aggregate.parse, "{}:Twice:3.0/mixing:1/{}:Middle:1"),
        (partition.parse, "{}:EveryNth:0"),
        (parse_attack, "{}:Zero:0.5"),
    ],
)
def test_what_is_written_is_read_again(own: Path, parse, text) -> None:
    text = text.format(own, own)
    assert str(parse(text)) == text
    assert parse(text) == parse(text)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (aggregate.parse, "{}:Middle:1/mean", "Middle wraps no other; leave out '/mean'"),
        (aggregate.parse, "{}:Twice", "wraps another: write .*Twice/median"),
        (aggregate.parse, "{}:EveryNth", "is not a subclass of .*Aggregator"),
        (aggregate.parse, "{}:Middle:1:2", r"too many values: write .*my_rules.py:Middle:OUT$"),
        (partition.parse, "{}:EveryNth:x", "'x' is not an integer"),
        (partition.parse, "{}:EveryMth", "has no 'EveryMth', did you mean 'EveryNth'"),
        (partition.parse, "every-nth", "there is no partition .*or path/to/file.py:Class"),
        (parse_attack, "no_such_module:Zero", "no_such_module could not be imported"),
    ],
)
def test_what_is_none_is_refused_in_one_line(own: Path, parse, text, message) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse(text.format(own))
    assert "\n" not in str(refused.value)


def test_a_run_with_them_is_resumed_from_another_folder(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.parent)
    strategy = dure.FedAvg(
        clients=5, aggregate="my_rules.py:Middle:1", partition="my_rules.py:EveryNth:2"
    )
    world = dure.Simulated(attack="my_rules.py:Zero", attackers=1)
    whole = dure.train(small_task(), strategy, world, dure.Stop(rounds=3))
    dure.train(small_task(), strategy, world, dure.Stop(rounds=1), out="run")
    written = json.loads(Path("run/config.json").read_text())
    assert written["strategy"]["aggregate"] == f"{own}:Middle:1"
    assert written["partition"]["description"] == "every so-many-th example"
    folder = Path("run").resolve()
    monkeypatch.chdir("/")
    again = dure.resume(folder, task=small_task(), stop=dure.Stop(rounds=3))
    assert same_bits(whole, again)


def test_the_command_line_takes_them_and_a_report_runs_nothing(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own.parent)
    flags = ["--clients", "10", "--aggregate", "my_rules.py:Middle", "--rounds", "1"]
    arguments = ["train", "digits", "fed-avg", *flags, "--out", "run"]
    assert main([*arguments, "--partition", "my_rules.py:EveryNth:1"]) == 0
    # A folder that somebody sent: the file that it names does harm, or is not there at all.
    own.write_text("raise SystemExit('was run')\n")
    assert main(["report", "run"]) == 0
    own.unlink()
    shutil.rmtree("run/report", ignore_errors=True)
    assert main(["report", "run"]) == 0
    assert "my_rules.py:Middle" in Path("run/report.html").read_text()

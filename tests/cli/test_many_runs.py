"""Many runs on the command line: seeds, options of the task, sweeps; what there is, and help."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from dure import catalog
from dure.cli.main import main
from dure.cli.show import Display
from dure.record.lock import Lock
from dure.run.registry import strategy_class


@pytest.fixture
def said(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty folder; gives (exit status, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(line: str):
        status = main(line.split())
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison under two seeds, of which a system has a rate and a model of its own."""
    out = tmp_path_factory.mktemp("many") / "both"
    systems = ["single-worker", "fed-avg,clients=3,lr=0.01,model=logistic"]
    flags = ["--lr", "0.2", "--seeds", "2", "--epochs", "1", "--out", str(out)]
    assert main(["compare", "digits", *systems, *flags]) == 0
    return out


def test_a_system_has_options_of_the_task_for_itself(compared):
    configs = [json.loads(path.read_text()) for path in sorted(compared.glob("*/config.json"))]
    assert [config["task"]["options"] for config in configs] == [
        *[{"model": "logistic", "lr": 0.01}] * 2,
        *[{"model": "mlp", "lr": 0.2}] * 2,
    ]
    assert configs[0]["label"] == "FedAvg iid K=3 B=32, lr 0.01, model logistic"
    assert [config["seed"] for config in configs] == [0, 1, 0, 1]


def test_seeds_are_told_as_mean_deviation_and_interval(said):
    line = "train digits single-worker --model logistic --epochs 1 --seeds 3 --out runs/seeds"
    status, out, err = said(line)
    assert (status, out) == (0, "")
    assert re.search(r"single worker +3 +0\.\d{4} ±0\.\d{4} \[-?\d\.\d{4}, \d\.\d{4}\]", err)
    told = json.loads(said(f"{line}-again --json")[1])
    (system,) = told["over_seeds"]
    values = [run["test_accuracy"] for run in told["runs"]]
    assert system["test_accuracy"]["mean"] == pytest.approx(sum(values) / 3)
    assert system["seeds"] == [0, 1, 2]
    assert told["folder"] == "runs/seeds-again"
    assert [run["folder"] for run in told["runs"]] == [
        f"runs/seeds-again/single-worker-seed-{seed}" for seed in range(3)
    ]


def test_a_comparison_goes_on_from_its_folder(said, compared):
    again = json.loads(said(f"train --resume {compared} --json")[1])
    assert len(again["runs"]) == 4
    assert not again["failed"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("compare digits single-worker,mu=1", "SingleWorker has no field 'mu'"),
        ("compare digits single-worker,lr=fast", "Error parsing --lr"),
        ("compare digits single-worker --seeds 0", "seeds is 0"),
        ("train digits single-worker --seeds 2 --label mine", "--label is for a single run"),
        ("sweep digits single-worker", "at least one setting with several values"),
        ("sweep digits single-worker --grid lr", "write NAME=VALUE,VALUE"),
        ("sweep digits single-worker --grid lr=log:0.1:1", "give the number of trials to draw"),
        ("sweep digits single-worker --grid mu=1,2", "SingleWorker has no field 'mu'"),
        ("sweep digits single-worker --grid lr=1 lr=2", "names lr twice"),
        ("serve digits fed-avg --clients 2 --seeds 3", "a served run has one seed"),
        ("sweep digits", "name a task and a system"),
        ("list nowhere", "there is no folder nowhere"),
        ("show .", "is not a run folder"),
        ("show", "name one run folder"),
        ("predict runs", "name a run folder and at least one input"),
        ("predict . test:0", "is not a run folder"),
        ("predict . test:0 --out a.txt", "outputs are written as npy"),
        ("systems digits", "takes no options"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line_before_any_work(said, line, complaint):
    status, out, err = said(line)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert complaint in err
    assert not Path("runs").exists()


def test_a_sweep_tells_which_trial_was_the_best(said):
    line = "sweep digits single-worker,batch_size=128 --grid lr=0.2,0.001 --model logistic"
    told = json.loads(said(f"{line} --epochs 1 --json --out swept")[1])
    assert told["best"] == "lr 0.2"
    assert [run["label"] for run in told["runs"]] == ["lr 0.2", "lr 0.001"]
    config = json.loads(Path("swept/lr-0-2/config.json").read_text())
    assert config["strategy"]["batch_size"] == 128
    assert config["task"]["options"] == {"model": "logistic", "lr": 0.2}
    again = json.loads(said("sweep --resume swept --json")[1])
    assert again["best"] == "lr 0.2"


def test_an_interrupted_sweep_says_how_it_goes_on_and_by_which_metric_it_judges(said, monkeypatch):
    class Interrupts(Display):
        def __call__(self, *event):
            super().__call__(*event)
            signal.raise_signal(signal.SIGINT)

    line = "sweep digits single-worker --grid lr=0.2,0.001 --model logistic --epochs 1 --out swept"
    with monkeypatch.context() as patched:
        patched.setattr("dure.cli.show.Display", Interrupts)
        status, _, errors = said(f"{line} --metric test_loss")
    assert status == 130
    hint = "interrupted; resume with: dure sweep --metric test_loss --resume swept"
    assert hint in errors
    told = json.loads(said(f"{hint.partition('with: dure ')[2]} --json")[1])
    assert told["best"] == "lr 0.2"
    assert "test_loss" in told


def test_runs_are_listed_with_their_states(said, compared, tmp_path):
    killed = tmp_path / "runs" / "killed"
    killed.mkdir(parents=True)
    (killed / "config.json").write_text('{"label": "gone", "seed": 1}')
    (killed / "history.jsonl").write_text('{"kind": "step", "step": 7}\n{"kind": "st')
    listed = json.loads(said(f"list {compared} runs --json")[1])
    states = {Path(run["folder"]).name: (run["state"], run["step"]) for run in listed}
    assert states["killed"] == ("killed", 7.0)
    assert states["single-worker-seed-1"] == ("done (epochs)", 45.0)
    lock = Lock.take(killed, "held")
    assert "running" in said("list")[1]
    lock.release()
    (killed / "history.jsonl").unlink()
    assert "not begun" in said("list")[1]


def test_a_run_is_shown_and_its_model_asked(said, compared):
    run = compared / "fedavg-iid-k-3-b-32-lr-0-01-model-logistic-seed-0"
    status, out, _ = said(f"show {run}")
    assert status == 0
    assert re.search(r"^again +dure train digits fed-avg --clients 3 ", out, re.MULTILINE)
    assert "accuracy" in out
    assert "dure predict" in out
    assert json.loads(said(f"show {run} --json")[1])["config"]["label"].startswith("FedAvg")
    assert said(f"show {compared}")[1].count("done (epochs)") == 4
    status, out, _ = said(f"predict {run} test:0:2 --out outputs.npy")
    assert status == 0
    assert re.match(r"test:0:2 \[0\]: \d \d+\.\d %, ", out)
    (told,) = json.loads(said(f"predict {run} test:1 --json")[1])
    assert sum(told["probabilities"].values()) == pytest.approx(1)
    assert Path("outputs.npy").exists()


def leaves(families):
    for family in families:
        yield from ((name, family.worlds) for name in family.systems)
        yield from leaves(family.branches)


def test_the_family_tree_has_every_system_once_and_where_it_lives(said):
    found = list(leaves(catalog.FAMILIES))
    assert sorted(name for name, _ in found) == sorted(catalog.SYSTEMS)
    for name, worlds in found:
        homes = {catalog.WORLDS[world].lives for world in worlds}
        assert homes == set(strategy_class(name).traits.kinds), name
    out = said("systems")[1]
    for name, system in catalog.SYSTEMS.items():
        assert re.search(rf"[├└]─ {name} +{re.escape(system.summary)}$", out, re.MULTILINE)


HEADINGS = ["system", "task", "world", "limits", "run", "output"]


@pytest.mark.parametrize(
    ("system", "absent", "there"),
    [
        ("fed-avg", ["--steps", "--workers"], ["--rounds", "--attack", "--server-mbit"]),
        ("data-parallel", ["--rounds"], ["--steps", "--workers", "--devices", "--no-check"]),
        ("zero", ["--rounds", "--world", "--devices"], ["--deadline", "--backend"]),
        ("parameter-server", ["--steps"], ["--rounds", "--deadline", "--world"]),
        ("layers-per-core", ["--backend"], ["--devices"]),
        ("split", ["--attack", "--attackers", "--keep-updates"], ["--drop-out"]),
    ],
)
def test_help_comes_in_groups_of_what_applies(said, system, absent, there):
    status, out, _ = said(f"train digits {system} --help")
    assert status == 0
    assert [line for line in out.splitlines()[1:] if line in HEADINGS] == HEADINGS
    flags = set(re.findall(r"--[a-z-]+", out))
    assert not flags & set(absent)
    assert set(there) <= flags


def test_one_worker_has_no_world_to_choose(said):
    out = said("train digits single-worker --help")[1]
    assert "world" not in out.splitlines()
    assert "--workers" not in out
    # What the help does not offer is still understood, and told why it is no use.
    status, _, err = said("train digits single-worker --rounds 3")
    assert status == 2
    assert "rounds do not apply" in err


def test_dure_train_has_a_help_of_its_own(said):
    status, out, _ = said("train --help")
    assert status == 0
    assert out.startswith("dure train TASK SYSTEM")
    assert "dure compare" not in out

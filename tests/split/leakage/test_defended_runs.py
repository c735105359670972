"""Defences and meters in runs: what the server sees, and what the model learns."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.client_part import divide
from dure.data.conversion import as_examples
from dure.data.examples import Examples
from dure.data.partition import IID
from dure.split.in_turn import SplitLearning
from dure.split.leakage.distance_correlation import distance_correlation
from dure.split.leakage.guard import CutValue, Guard
from dure.split.leakage.marvell import Marvell
from dure.split.leakage.no_peek import NoPeek
from dure.split.parallel import ParallelSplit
from dure.split.split_fed import SplitFed
from dure.split.strategy import Split
from dure.tasks.models import TwoNN
from dure.worlds.simulated import Simulated


def rare() -> dure.Task:
    """Is a digit a three? One in ten is."""
    digits = dure.load_task("digits")

    def threes(examples: Examples) -> Examples:
        return Examples(examples.inputs, (examples.targets == 3).long(), classes=["no", "yes"])

    return dataclasses.replace(
        digits,
        model=partial(TwoNN, features=64, classes=2, width=64),
        train=threes(digits.train),
        test=threes(digits.test),
    )


def small(classes: int = 2) -> dure.Task:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 5, generator=draws, dtype=torch.float64)
    labels = torch.arange(60) % classes
    return dure.Task(
        lambda: nn.Sequential(
            nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, classes)
        ).double(),
        F.cross_entropy,
        (inputs, labels),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


def run(task: dure.Task, strategy: Split, rounds: int = 1, **more: object) -> dure.Run:
    return dure.train(task, strategy, world=Simulated(), stop=dure.Stop(rounds=rounds), **more)


def leaks(defence: str, rounds: int = 1) -> dict[str, float]:
    """What the meter says of the first epoch."""
    cut = SplitLearning(
        cut=("1", "2"), clients=2, batch_size=64, defence=defence, measure_leaks=True
    )
    found = run(rare(), cut, rounds, seed=0)
    return {name: found.history.series(name)[1][0] for name in found.history.steps[0].numbers}


def test_rare_labels_are_told_by_the_norm_in_the_first_epoch_and_not_under_marvell() -> None:
    bare, guarded = leaks("none"), leaks("marvell:16")
    assert bare["norm_leak_auc"] > 0.9
    assert bare["direction_leak_auc"] > 0.9
    assert guarded["norm_leak_auc"] < 0.6
    # It guards gradients, and not activations.
    assert guarded["distance_correlation"] > 0.5


def test_with_one_cut_there_are_no_gradients_to_guess_from() -> None:
    found = run(small(), SplitLearning(cut=("1",), clients=2, batch_size=8, measure_leaks=True))
    numbers = found.history.steps[0].numbers
    assert numbers is not None
    assert "norm_leak_auc" not in numbers
    assert "distance_correlation" in numbers


@pytest.mark.parametrize("kind", [SplitLearning, ParallelSplit, SplitFed])
def test_a_meter_changes_nothing(kind: type[Split]) -> None:
    cut = kind(cut=("1", "2"), clients=3, batch_size=8)
    bare = run(small(), cut).model.state_dict()
    metered = run(small(), dataclasses.replace(cut, measure_leaks=True)).model.state_dict()
    assert all(torch.equal(bare[name], metered[name]) for name in bare)


@pytest.mark.parametrize("kind", [SplitLearning, ParallelSplit, SplitFed])
@pytest.mark.parametrize("defence", ["marvell:1", "max-norm:1", "isotropic:0.1"])
def test_a_guard_of_gradients_changes_them_and_leaves_the_end_of_the_first_step_alone(
    kind: type[Split], defence: str
) -> None:
    cut = kind(cut=("1", "2"), clients=1, batch_size=60)
    bare = run(small(), cut).model.state_dict()
    guarded = run(small(), dataclasses.replace(cut, defence=defence)).model.state_dict()
    # The end of the model goes backward with the true gradients.
    assert torch.equal(bare["4.weight"], guarded["4.weight"])
    assert not torch.equal(bare["0.weight"], guarded["0.weight"])
    assert not torch.equal(bare["2.weight"], guarded["2.weight"])


def test_labels_that_are_written_as_numbers_are_guarded_and_guessed_as_well() -> None:
    task = small()
    inputs, labels = task.train.inputs, task.train.targets
    one_output = dataclasses.replace(
        task,
        model=lambda: nn.Sequential(
            nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)
        ).double(),
        loss=F.binary_cross_entropy_with_logits,
        train=(inputs, labels.double().unsqueeze(1)),
    )
    strategy = SplitLearning(cut=("1", "2"), clients=2, batch_size=30, measure_leaks=True)
    bare = run(one_output, strategy).history.steps[0].numbers
    guarded = run(one_output, dataclasses.replace(strategy, defence="marvell:100"))
    numbers = guarded.history.steps[0].numbers
    assert bare is not None
    assert numbers is not None
    assert bare["direction_leak_auc"] == 1
    assert numbers["direction_leak_auc"] < 0.8


def no_peek_by_hand(batches: list[list[torch.Tensor]], alpha: float) -> dict[str, torch.Tensor]:
    """SGD on the mean over clients of loss + alpha dCor, each of its own batch."""
    task = small(3)
    inputs, labels = task.train.inputs, task.train.targets
    model = seeded_model(task, 0)
    optimizer = task.optimizer(list(model.parameters()))
    for clients in batches:
        optimizer.zero_grad()
        of = sum(len(batch) for batch in clients)
        for batch in clients:
            left = model[:2](inputs[batch])
            loss = F.cross_entropy(model[2:](left), labels[batch])
            loss = loss + alpha * distance_correlation(inputs[batch], left)
            (len(batch) / of * loss).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("cut", [("1",), ("1", "2")])
@pytest.mark.parametrize("kind", [SplitLearning, ParallelSplit])
def test_no_peek_is_a_term_of_the_heads_loss(kind: type[Split], cut: tuple[str, ...]) -> None:
    strategy = kind(cut=("2",), clients=2, batch_size=10, defence="no-peek:0.7")
    strategy = dataclasses.replace(strategy, cut=cut)
    parts = divide(IID(), 2, as_examples(small(3).train), 10, 0, False)
    if kind is ParallelSplit:
        batches = [[part.at(step) for part in parts] for step in range(3)]
    else:
        batches = [[part.at(step)] for part in parts for step in range(3)]
    expected = no_peek_by_hand(batches, 0.7)
    found = run(small(3), strategy, seed=0).model.state_dict()
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-12), name


def test_randomised_labels_are_what_everybody_trains_with_and_the_meter_knows_the_true_ones() -> (
    None
):
    strategy = SplitLearning(cut=("1", "2"), clients=2, batch_size=8, measure_leaks=True)
    bare = run(small(), strategy).model.state_dict()
    near = dataclasses.replace(strategy, defence="randomised-response:60")
    assert all(torch.equal(bare[n], w) for n, w in run(small(), near).model.state_dict().items())
    none = dataclasses.replace(strategy, defence="randomised-response:0")
    found = run(rare(), dataclasses.replace(none, batch_size=64), seed=0)
    # Gradients are those of labels that say nothing of the true ones.
    assert found.history.series("direction_leak_auc")[1][0] == pytest.approx(0.5, abs=0.15)


def test_a_defended_run_that_was_interrupted_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    strategy = SplitLearning(cut=("1", "2"), clients=2, batch_size=4, defence="marvell:4")
    whole = run(small(), strategy, 3).model.state_dict()
    run(small(), strategy, 1, out=tmp_path / "run")
    gone_on = dure.resume(tmp_path / "run", task=small(), stop=dure.Stop(rounds=3))
    assert all(torch.equal(whole[n], w) for n, w in gone_on.model.state_dict().items())


@pytest.mark.parametrize(
    ("task", "cut", "defence", "why"),
    [
        (small(), ("1",), "marvell:4", "with one cut the labels are sent to the server"),
        (small(), ("1",), "isotropic:1", "with one cut the labels are sent to the server"),
        (small(3), ("1", "2"), "marvell:4", "two classes"),
        (
            dataclasses.replace(
                small(), train=(torch.arange(60).reshape(60, 1), torch.arange(60) % 2)
            ),
            ("1",),
            "no-peek:1",
            "floating-point",
        ),
        (
            dataclasses.replace(small(), train=(torch.randn(60, 5), torch.randn(60, 2))),
            ("1",),
            "randomised-response:1",
            "one class label",
        ),
    ],
)
def test_what_a_defence_cannot_guard_is_refused_before_any_work(
    task: dure.Task, cut: tuple[str, ...], defence: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        SplitLearning(cut=cut, clients=2, batch_size=8, defence=defence).check(
            task, dure.Simulated()
        )


def test_a_run_says_who_could_learn_what() -> None:
    strategy = SplitLearning(cut=("1", "2"), clients=2, batch_size=8, defence="marvell:4")
    peer = run(small(), strategy).summary["facts"][0]["leakage"]
    server = run(small(), dataclasses.replace(strategy, handover="server"))
    assert "noise of marvell:4" in peer["exposure"]
    assert "enrolled a client of its own" in peer["exposure"]
    assert "is handed the heads" in server.summary["facts"][0]["leakage"]["exposure"]
    once = run(small(), dataclasses.replace(strategy, cut=("1",), defence="none"))
    assert "sent all labels" in once.summary["facts"][0]["leakage"]["exposure"]


def test_examples_need_not_be_the_first_dimension_and_values_that_none_have_are_refused() -> None:
    crossing = [CutValue(1, True), CutValue(None, False), CutValue(0, True)]
    guard = Guard(Marvell(4.0), [], crossing, lambda step: torch.Generator().manual_seed(step))
    draws = torch.Generator().manual_seed(5)
    gradients = [torch.randn(3, 8, 2, generator=draws), torch.randn(8, 4, generator=draws)]
    seen = guard.gradients(gradients, torch.arange(8) % 2, 0)
    rows = torch.cat([gradients[0].transpose(0, 1).reshape(8, 6), gradients[1]], dim=1)
    expected, _ = Marvell(4.0).gradients(
        rows, torch.arange(8) % 2 == 1, torch.Generator().manual_seed(0), None
    )
    assert torch.equal(torch.cat([seen[0].transpose(0, 1).reshape(8, 6), seen[1]], 1), expected)
    with pytest.raises(ValueError, match="belongs to a whole batch"):
        Guard(NoPeek(), [CutValue(None, True)], [], lambda step: draws)

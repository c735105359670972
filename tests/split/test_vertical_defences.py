"""Vertical split learning: what parties and the holder of the labels could learn, and defences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.data.batches import Batches
from dure.data.examples import Examples
from dure.fleet.virtual_network import VirtualNetwork
from dure.split.leakage.distance_correlation import distance_correlation
from dure.split.leakage.labels import clusters_auc, direction_auc, norm_auc
from dure.split.parties.messages import ActivationGradients, Activations
from small import check_all, same_bits

SGD = partial(torch.optim.SGD, lr=0.1)
FEATURES = [[0, 1], [2, 3, 4]]
WIDTH = 4


def model_of(classes: int = 2, join: str = "concat") -> nn.Module:
    heads = [nn.Sequential(nn.Linear(len(own), WIDTH), nn.Tanh()) for own in FEATURES]
    tail = nn.Linear(WIDTH * (2 if join == "concat" else 1), classes)
    return dure.VerticalModel(heads, tail, join, FEATURES).double()  # type: ignore[arg-type]


def small(classes: int = 2, join: str = "concat", n: int = 60) -> dure.Task:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 5, generator=draws, dtype=torch.float64)
    return dure.Task(
        partial(model_of, classes, join),
        F.cross_entropy,
        (inputs, torch.arange(n) % classes),
        optimizer=SGD,
    )


def rare() -> dure.Task:
    """Is a digit a three? One in ten is. Each party has every second pixel."""
    digits = dure.load_task("digits")

    def model() -> nn.Module:
        heads = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2)]
        tail = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
        return dure.VerticalModel(heads, tail, "concat", [range(0, 64, 2), range(1, 64, 2)])

    def threes(examples: Examples) -> Examples:
        pixels = examples.inputs.flatten(1)
        return Examples(pixels, (examples.targets == 3).long(), classes=["no", "yes"])

    return dataclasses.replace(
        digits, model=model, train=threes(digits.train), test=threes(digits.test)
    )


def data(task: dure.Task) -> tuple[Tensor, Tensor]:
    """Inputs and labels of all people."""
    examples = task.train
    assert isinstance(examples, Examples)
    return examples.inputs, examples.targets


def run(task: dure.Task, steps: int = 3, seed: int = 0, **fields: Any) -> dure.Run:
    strategy = dure.VerticalSplit(**{"batch_size": 8, **fields})
    return dure.train(task, strategy, dure.Simulated(), dure.Stop(steps=steps), seed=seed)


def weights(found: dure.Run) -> dict[str, Tensor]:
    state: dict[str, Tensor] = found.model.state_dict()
    return state


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """All messages: who says it to whom, and what."""
    found: list[tuple[str, str, Any]] = []
    send = VirtualNetwork.send

    def noted(self: VirtualNetwork, sender: str, said: Any) -> None:
        found.extend((sender, name, message) for name, message in said)
        send(self, sender, said)

    monkeypatch.setattr(VirtualNetwork, "send", noted)
    return found


def gradients_for(sent: list[tuple[str, str, Any]], name: str) -> list[Tensor]:
    return [
        message.values
        for _, to, message in sent
        if to == name and isinstance(message, ActivationGradients)
    ]


@pytest.mark.parametrize("label_party", [None, 0])
def test_meters_change_nothing_and_read_what_each_party_is_sent(
    label_party: int | None, sent: list[tuple[str, str, Any]]
) -> None:
    task = small(n=256)
    bare = run(task, 2, batch_size=128, label_party=label_party)
    sent.clear()
    metered = run(task, 2, batch_size=128, label_party=label_party, measure_leaks=True)
    assert all(torch.equal(one, weights(metered)[name]) for name, one in weights(bare).items())
    others = [0, 1] if label_party is None else [1]
    batches = [Batches(256, 128, 0).at(step) for step in range(2)]
    inputs, targets = data(task)
    labels = [targets[batch] for batch in batches]
    numbers = [step.numbers or {} for step in metered.history.steps]
    for step in range(2):
        expected: dict[str, list[float]] = {}
        for party in others:
            gradients = gradients_for(sent, f"party {party}")[step]
            values = [
                message.values
                for name, _, message in sent
                if name == f"party {party}" and isinstance(message, Activations)
            ][step]
            own = inputs[batches[step]][:, FEATURES[party]]
            for name, value in {
                "norm_leak_auc": norm_auc(gradients, labels[step], 2),
                "direction_leak_auc": direction_auc(gradients, labels[step], 2),
                "cluster_leak_auc": clusters_auc(values, labels[step], 2),
                "distance_correlation": float(distance_correlation(own, values)),
            }.items():
                assert numbers[step].pop(f"{name}_party_{party}") == value
                expected.setdefault(name, []).append(value)
        # Without a party: the most that any of them is told.
        assert numbers[step].pop("virtual_seconds") is not None
        assert numbers[step] == {name: max(values) for name, values in expected.items()}


def first_epoch(defence: str) -> dict[str, float]:
    """The medians of the first epoch."""
    task = rare()
    found = run(task, 24, batch_size=64, defence=defence, measure_leaks=True)
    numbers = [step.numbers or {} for step in found.history.steps]
    names = {name for one in numbers for name in one}
    series = {name: [one[name] for one in numbers if name in one] for name in names}
    return {name: median(values) for name, values in series.items()}  # type: ignore[type-var]


def test_rare_labels_are_told_to_each_party_by_the_norm_and_not_under_marvell() -> None:
    bare = first_epoch("none")
    guarded = first_epoch("marvell:16")
    for party in range(2):
        assert bare[f"norm_leak_auc_party_{party}"] > 0.9
        assert bare[f"direction_leak_auc_party_{party}"] > 0.9
        assert guarded[f"norm_leak_auc_party_{party}"] < 0.6
        # It guards gradients, and not activations.
        assert guarded[f"distance_correlation_party_{party}"] > 0.5


@pytest.mark.parametrize("join", ["concat", "sum"])
@pytest.mark.parametrize("defence", ["marvell:1", "max-norm:1", "isotropic:0.1"])
def test_noise_is_on_gradients_for_those_who_have_no_labels(defence: str, join: str) -> None:
    task = small(join=join)
    bare = weights(run(task, 1, batch_size=60, label_party=1))
    guarded = weights(run(task, 1, batch_size=60, label_party=1, defence=defence))
    # The tail, and the head of the party that has the labels, learn from the true gradients.
    for name in ("tail.weight", "tail.bias", "heads.1.0.weight", "heads.1.0.bias"):
        assert torch.equal(bare[name], guarded[name])
    assert not torch.equal(bare["heads.0.0.weight"], guarded["heads.0.0.weight"])


def test_parties_of_a_sum_get_one_noise_and_of_a_concat_each_its_own(
    sent: list[tuple[str, str, Any]],
) -> None:
    noises: dict[str, list[Tensor]] = {}
    for join in ("sum", "concat"):
        task = small(join=join)
        found: list[list[Tensor]] = []
        for defence in ("none", "isotropic:1"):
            sent.clear()
            run(task, 1, batch_size=60, defence=defence)
            found.append([gradients_for(sent, f"party {number}")[0] for number in range(2)])
        noises[join] = [noisy - true for true, noisy in zip(*found, strict=True)]
    assert torch.equal(*noises["sum"])
    first, second = noises["concat"]
    # Of 240 numbers that are drawn apart, the correlation is far from 1.
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.3


def test_noise_of_steps_is_drawn_apart(sent: list[tuple[str, str, Any]]) -> None:
    # A model that stays as it is: in every step the same true gradients.
    task = dataclasses.replace(small(), optimizer=partial(torch.optim.SGD, lr=0.0))
    run(task, 2, batch_size=None, defence="isotropic:1")
    first, second = gradients_for(sent, "party 0")
    assert not torch.allclose(first, second, rtol=0, atol=1e-6)


def no_peek_by_hand(task: dure.Task, alpha: float, guarded: list[int], steps: int) -> Any:
    """SGD on the loss + alpha dCor(x_p, a_p) of each guarded party."""
    inputs, labels = data(task)
    model: Any = seeded_model(task, 0)
    optimizer = task.optimizer(list(model.parameters()))
    for step in range(steps):
        batch = Batches(len(inputs), 8, 0).at(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[batch]), labels[batch])
        for party in guarded:
            own = inputs[batch][:, FEATURES[party]]
            loss = loss + alpha * distance_correlation(own, model.heads[party](own))
        loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("label_party", "guarded"), [(None, [0, 1]), (0, [1])])
@pytest.mark.parametrize("join", ["concat", "sum"])
def test_no_peek_is_a_term_of_the_loss_of_each_head_that_something_leaves(
    join: str, label_party: int | None, guarded: list[int]
) -> None:
    task = small(3, join)
    found = weights(run(task, 10, label_party=label_party, defence="no-peek:0.7"))
    for name, weight in no_peek_by_hand(task, 0.7, guarded, 10).items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-12), name


class Ignores(nn.Module):
    """A tail that looks at nothing that parties send."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, joined: Tensor) -> Tensor:
        return self.bias.expand(len(joined), 2)


def test_a_head_that_the_loss_does_not_depend_on_still_learns_to_tell_less() -> None:
    def model() -> nn.Module:
        heads = [nn.Linear(2, 3), nn.Linear(3, 3)]
        return dure.VerticalModel(heads, Ignores(), "sum", FEATURES).double()

    task = dataclasses.replace(small(), model=model)
    before = seeded_model(task, 0).state_dict()
    assert torch.equal(weights(run(task))["heads.0.weight"], before["heads.0.weight"])
    after = weights(run(task, defence="no-peek:1"))
    assert not torch.equal(after["heads.0.weight"], before["heads.0.weight"])


def test_randomised_labels_are_what_everybody_trains_with() -> None:
    task = small()
    bare = weights(run(task))
    near = weights(run(task, defence="randomised-response:60"))
    assert all(torch.equal(one, near[name]) for name, one in bare.items())
    found = first_epoch("randomised-response:0")
    # Gradients are those of labels that say nothing of the true ones, which the meter knows.
    assert found["direction_leak_auc_party_0"] == pytest.approx(0.5, abs=0.15)


def test_labels_of_a_dataset_are_randomised_too() -> None:
    task = small()
    inputs, labels = data(task)
    pairs = [(x, int(y)) for x, y in zip(inputs, labels, strict=True)]
    listed = dataclasses.replace(task, train=pairs)
    for defence in ("none", "randomised-response:1"):
        of_tensors = weights(run(task, defence=defence))
        of_dataset = weights(run(listed, defence=defence))
        assert all(torch.equal(one, of_dataset[name]) for name, one in of_tensors.items())


@pytest.mark.parametrize("label_party", [None, 1])
@pytest.mark.parametrize("defence", ["marvell:4", "no-peek:1", "randomised-response:1"])
def test_a_run_that_is_resumed_has_the_same_bits_and_leaks(
    defence: str, label_party: int | None, tmp_path: Path
) -> None:
    # Rare labels: some batches have one class alone, and get the noise of one before.
    inputs, _ = data(small(n=300))
    task = dataclasses.replace(small(), train=(inputs, (torch.arange(300) % 25 == 0).long()))
    fields: dict[str, Any] = {"defence": defence, "label_party": label_party, "batch_size": 20}
    strategy = dure.VerticalSplit(measure_leaks=True, **fields)
    whole = run(task, 16, measure_leaks=True, **fields)
    dure.train(task, strategy, dure.Simulated(), dure.Stop(steps=9), out=tmp_path / "run")
    again = dure.resume(tmp_path / "run", task=task, stop=dure.Stop(steps=16))
    assert same_bits(whole, again)
    # A window of measurements was open.
    assert [one.numbers for one in whole.history.steps] == [
        one.numbers for one in again.history.steps
    ]
    assert any("cluster_leak_auc" in (one.numbers or {}) for one in whole.history.steps)
    assert whole.summary["facts"] == again.summary["facts"]


def exposure(task: dure.Task, **fields: Any) -> str:
    line: str = run(task, 1, **fields).summary["facts"][0]["leakage"]["exposure"]
    return line


def test_a_run_says_who_could_learn_what() -> None:
    line = exposure(small(), defence="marvell:4")
    assert line.startswith("party 0 and party 1 see the gradients of what leaves their heads with")
    assert "noise of marvell:4" in line
    assert "server has the labels" in line
    line = exposure(small(), defence="no-peek:1", label_party=0)
    assert line.startswith("party 1 sees the gradients")
    assert "party 0 has the labels, sees what leaves the head of party 1 (which no-peek:1" in line
    assert "randomised by randomised-response:1" in exposure(
        small(), defence="randomised-response:1"
    )
    train = Examples(*data(small()), keys=list(range(60)))
    keyed = dataclasses.replace(small(), train=train)
    assert "which of its people" in exposure(keyed, align=True)
    assert "which of its people" not in exposure(keyed)


def frozen() -> nn.Module:
    model: Any = model_of()
    model.heads[0].requires_grad_(False)
    return model  # type: ignore[no-any-return]


def test_a_frozen_head_is_sent_nothing_and_what_leaves_it_is_measured() -> None:
    task = dataclasses.replace(small(n=128), model=frozen)
    found = run(task, 1, batch_size=128, measure_leaks=True, defence="isotropic:1")
    numbers = found.history.steps[0].numbers or {}
    assert "norm_leak_auc_party_0" not in numbers
    assert {"norm_leak_auc_party_1", "cluster_leak_auc_party_0"} <= set(numbers)
    line = found.summary["facts"][0]["leakage"]["exposure"]
    assert line.startswith("party 1 sees the gradients")
    assert "the heads of party 0 and party 1" in line


def one_party() -> nn.Module:
    return dure.VerticalModel([nn.Linear(5, 3)], nn.Linear(3, 2), "sum", [range(5)]).double()


@pytest.mark.parametrize(
    ("task", "model", "fields", "said"),
    [
        (small(3), None, {"defence": "marvell:4"}, "two classes"),
        (small(), one_party, {"defence": "isotropic:1", "label_party": 0}, "has no effect here"),
        (small(), one_party, {"defence": "no-peek:1", "label_party": 0}, "has no effect here"),
        (small(), frozen, {"defence": "randomised-response:1", "label_party": 1}, "has no effect"),
        (small(), None, {"defence": "marvel:4"}, "no defence 'marvel'"),
        (
            dataclasses.replace(small(), train=(torch.randn(60, 5), torch.randn(60, 2))),
            None,
            {"defence": "randomised-response:1"},
            "one class label",
        ),
    ],
)
def test_what_a_defence_cannot_guard_is_refused_before_any_work(
    task: dure.Task, model: Callable[[], nn.Module] | None, fields: dict[str, Any], said: str
) -> None:
    task = task if model is None else dataclasses.replace(task, model=model)
    with pytest.raises(ValueError, match=said):
        check_all(dure.VerticalSplit(batch_size=8, **fields), task, None)

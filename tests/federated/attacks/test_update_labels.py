"""Labels read from the last layer: exact for a step where predictions are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from seen_updates import recorded_of, seen_of
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.federated.attacks.examine import Examination, Examiner
from dure.federated.attacks.labels import (
    PublicExamples,
    counts_of,
    label_counts,
    label_shares,
    labels_of,
    share_right,
)
from dure.federated.attacks.recording import read_updates


def public_of(task: dure.Task) -> PublicExamples:
    assert task.test is not None
    return PublicExamples(task.test.inputs[:200], task.test.labels()[:200])


def at_zero(bias: bool = True) -> dure.Task:
    """A linear model whose predictions are 1/10 for all inputs."""
    task = dure.load_task("digits")

    def model() -> nn.Module:
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=bias))
        for parameter in made.parameters():
            nn.init.zeros_(parameter)
        return made

    return dure.Task(model, F.cross_entropy, task.train, task.test)


@pytest.mark.parametrize("examples", [1, 8, 100, 1437])
def test_counts_of_one_step_of_a_linear_head_are_exact(examples: int) -> None:
    task = at_zero()
    indices = list(range(examples))
    model, seen = seen_of(task, indices)
    shares = label_shares(model, seen, public_of(task))
    true = counts_of(task.train.targets[indices], 10)
    assert label_counts(shares, examples).tolist() == true.tolist()
    torch.testing.assert_close(shares, true / examples, rtol=0, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_counts_of_networks_at_their_beginning_are_nearly_right(kind: str) -> None:
    task = dure.load_task("digits", model=kind)
    indices = list(range(200, 264))
    model, seen = seen_of(task, indices)
    counts = label_counts(label_shares(model, seen, public_of(task)), 64)
    assert share_right(counts, counts_of(task.train.targets[indices], 10)) > 0.95


def test_the_class_of_one_example_needs_no_examples_of_the_attackers() -> None:
    task = dure.load_task("digits")
    noise = PublicExamples(
        torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)), None
    )
    for index in range(20):
        model, seen = seen_of(task, [index])
        counts = label_counts(label_shares(model, seen, noise), 1)
        assert labels_of(counts).tolist() == [int(task.train.targets[index])]


def test_without_a_bias_the_weights_tell() -> None:
    """The layer's inputs are pixels, which are not negative."""
    task = at_zero(bias=False)
    model, seen = seen_of(task, [3])
    counts = label_counts(label_shares(model, seen, public_of(task)), 1)
    assert labels_of(counts).tolist() == [int(task.train.targets[3])]


def test_shares_of_clients_with_few_labels_are_told_after_local_epochs(tmp_path: Path) -> None:
    task = dure.load_task("digits")
    strategy = dure.FedAvg(clients=10, local_epochs=1, batch_size=20, partition="label-shards:2")
    world = dure.Simulated(keep_updates=1)
    dure.train(task, strategy, world, dure.Stop(rounds=1), out=tmp_path)
    updates = read_updates(tmp_path)
    wanted = Examination(sums=(1,), groups=10, attacks=("labels",))
    (row,) = Examiner(task, 0, wanted).rows(updates)
    # Ten classes of which a client has some two: guessing would be right about a fifth.
    assert row.figures["labels_right"].value > 0.8


def test_counts_add_up() -> None:
    shares = torch.tensor([0.45, 0.35, 0.2], dtype=torch.float64)
    for examples in range(1, 30):
        counts = label_counts(shares, examples)
        assert int(counts.sum()) == examples
        assert float((counts - shares * examples).abs().max()) < 1
    assert share_right(torch.tensor([2, 0, 1]), torch.tensor([1, 1, 1])) == pytest.approx(2 / 3)


class Scores(nn.Module):
    """Scores that no linear layer gives alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * self.layer(inputs.flatten(1))


def test_what_labels_cannot_be_read_from_is_named() -> None:
    plain = dure.load_task("digits")
    task = dure.Task(Scores, F.cross_entropy, plain.train, plain.test)
    model, seen = seen_of(task, [0])
    with pytest.raises(ValueError, match="a linear layer that gives the scores"):
        label_shares(model, seen, public_of(task))

    def other(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.multi_margin_loss(outputs, targets)

    task = dure.Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), other, plain.train)
    model, seen = seen_of(task, [0])
    with pytest.raises(ValueError, match="cross-entropy"):
        label_shares(model, seen, public_of(plain))


def test_targets_that_are_no_labels_leave_inputs_to_be_attacked() -> None:
    inputs = torch.rand(8, 5, generator=torch.Generator().manual_seed(0))
    task = dure.Task(lambda: nn.Linear(5, 1), F.mse_loss, (inputs, inputs[:, :1]))
    updates = recorded_of(task, [[0], [1]])
    wanted = Examination(sums=(1,), attacks=("labels", "first-layer", "geiping"), iterations=20)
    labels, layer, geiping = Examiner(task, 0, wanted).rows(updates)
    assert labels.why is not None
    assert layer.figures["psnr"].value > 80
    assert geiping.figures
    assert "ssim" not in geiping.figures


def test_complex_weights_are_named_and_members_are_told_all_the_same() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10, dtype=torch.complex64)

        def forward(self, inputs: Tensor) -> Tensor:
            scores: Tensor = self.layer(inputs.flatten(1).to(torch.complex64)).abs()
            return scores

    plain = dure.load_task("digits")
    task = dure.Task(Complex, F.cross_entropy, plain.train, plain.test)
    rows = Examiner(task, 0, Examination(sums=(1,))).rows(recorded_of(task, [[0, 1], [2, 3]]))
    for row in rows:
        assert ("complex" in (row.why or "")) == (not row.attack.startswith("membership"))


class Named(nn.Module):
    """Inputs by name, and outputs in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        return [self.layer(inputs["x"])]


def test_inputs_and_outputs_in_several_tensors_are_named() -> None:
    def loss(outputs: list[Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets)

    data = dure.Examples({"x": torch.rand(9, 4)}, torch.arange(9) % 3)
    task = dure.Task(Named, loss, data, data)
    for row in Examiner(task, 0, Examination(sums=(1,))).rows(recorded_of(task, [[0, 1]])):
        assert row.why is not None, row.attack


def test_updates_that_are_not_finite_are_named() -> None:
    task = dure.load_task("digits", model="logistic")
    (one,) = recorded_of(task, [[0, 1]])
    broken = one._replace(delta=[one.delta[0] * float("nan")])
    for row in Examiner(task, 0, Examination(sums=(1,))).rows([broken]):
        if not row.attack.startswith("membership"):
            assert row.why == "an update has numbers that are not finite"
        else:
            assert 0 <= row.figures["auc"].low <= row.figures["auc"].high <= 1

"""Noise on gradients: its length, and that it leaves their mean alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dure.data.conversion import as_examples
from dure.split.leakage import Isotropic, MaxNorm, RandomisedResponse, parse_defence
from dure.split.leakage.labels import norm_auc
from dure.split.leakage.randomised_response import Relabelled, relabelled
from dure.split.leakage.rows import as_rows, from_rows


def rows() -> Tensor:
    draws = torch.Generator().manual_seed(0)
    lengths = torch.linspace(0.1, 3.0, 12).double().unsqueeze(1)
    return lengths * torch.randn(12, 9, generator=draws, dtype=torch.float64)


def test_tensors_of_any_kind_are_rows_and_tensors_again() -> None:
    tensors = [
        torch.randn(4, 3, 2),
        torch.randn(5, 4, dtype=torch.complex64),
        torch.randn(4, 2, dtype=torch.bfloat16),
    ]
    dims = [0, 1, 0]
    matrix = as_rows(tensors, dims)
    assert matrix.shape == (4, 6 + 10 + 2)
    assert torch.equal(matrix[2, :6], tensors[0][2].flatten())
    again = from_rows(matrix, tensors, dims)
    assert all(map(torch.equal, again, tensors))
    assert [one.dtype for one in again] == [one.dtype for one in tensors]


def many(defence: MaxNorm | Isotropic, given: Tensor, times: int = 20_000) -> Tensor:
    """What leaves for a batch that has the same gradients so many times."""
    draws = torch.Generator().manual_seed(1)
    seen, _ = defence.gradients(given.repeat(times, 1), None, draws, None)
    return seen.reshape(times, *given.shape)


@pytest.mark.parametrize("defence", [MaxNorm(), Isotropic(1.0)])
def test_the_mean_of_what_leaves_is_the_gradient(defence: MaxNorm | Isotropic) -> None:
    given = rows()
    seen = many(defence, given)
    # Five standard errors of the largest deviation.
    error = float(seen.std(dim=0).max()) / len(seen) ** 0.5
    assert (seen.mean(dim=0) - given).abs().max() < 5 * error


def test_after_max_norm_all_are_as_long_as_the_longest_on_average() -> None:
    given = rows()
    given[3] = 0
    squares = many(MaxNorm(), given).square().sum(dim=2).mean(dim=0)
    longest = given.norm(dim=1).max() ** 2
    assert torch.allclose(squares, longest.expand_as(squares), rtol=0.06)


def test_after_max_norm_a_gradient_lies_on_its_own_line() -> None:
    given = rows()
    seen, _ = MaxNorm().gradients(given, None, torch.Generator().manual_seed(2), None)
    assert torch.allclose(torch.cosine_similarity(seen, given).abs(), torch.ones(12).double())


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_isotropic_noise_is_so_many_times_as_long_as_the_longest_gradient(ratio: float) -> None:
    given = rows()
    noise = many(Isotropic(ratio), given) - given
    length = noise.square().sum(dim=2).mean().sqrt()
    assert float(length) == pytest.approx(ratio * float(given.norm(dim=1).max()), rel=0.02)
    assert torch.allclose(noise.var(dim=0), noise.var(dim=0).mean(), rtol=0.1)


def test_much_isotropic_noise_leaves_a_guess() -> None:
    given = rows().repeat(40, 1)
    labels = (given.norm(dim=1) > given.norm(dim=1).median()).long()
    draws = torch.Generator().manual_seed(3)
    seen, _ = Isotropic(100.0).gradients(given, None, draws, None)
    assert norm_auc(given, labels, 2) == 1.0
    assert norm_auc(seen, labels, 2) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_randomised_labels_are_true_as_often_as_the_budget_says(epsilon: float) -> None:
    classes, n = 4, 40_000
    labels = torch.arange(n) % classes
    drawn = RandomisedResponse(epsilon).labels(labels, classes, torch.Generator().manual_seed(4))
    weight = torch.tensor(epsilon).exp().item()
    true = weight / (weight + classes - 1)
    assert float((drawn == labels).double().mean()) == pytest.approx(true, abs=0.01)
    # Each of the others is as likely.
    for shift in range(1, classes):
        found = float((drawn == (labels + shift) % classes).double().mean())
        assert found == pytest.approx((1 - true) / (classes - 1), abs=0.01)


def test_labels_that_the_loss_ignores_stay() -> None:
    labels = torch.tensor([0, -100, 2, -100])
    drawn = RandomisedResponse(0.0).labels(labels, 3, torch.Generator().manual_seed(5))
    assert drawn[[1, 3]].tolist() == [-100, -100]


def test_examples_are_relabelled_once_whatever_they_are_held_in() -> None:
    inputs, labels = torch.randn(200, 3), torch.arange(200) % 5
    dataset = [(inputs[n], int(labels[n])) for n in range(200)]
    held = relabelled(RandomisedResponse(1.0), as_examples((inputs, labels)), seed=7)
    read = relabelled(RandomisedResponse(1.0), as_examples(dataset), seed=7)
    assert isinstance(read, Relabelled)
    at = torch.tensor([5, 3, 150])
    assert torch.equal(held.batch(at)[1], read.batch(at)[1])
    assert torch.equal(held.batch(at)[0], read.batch(at)[0])
    assert torch.equal(held.batch(at)[1], held.batch(at)[1])
    assert held.labels() is not None
    assert not torch.equal(held.labels(), labels)
    numbers = as_examples((inputs, (labels[:, None] > 2).float()))
    assert relabelled(RandomisedResponse(1.0), numbers, 7).targets.shape == (200, 1)


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "marvell:2.5",
        "max-norm:1.5",
        "isotropic:0.5",
        "no-peek:0.25",
        "randomised-response:2.0",
    ],
)
def test_a_defence_is_read_from_the_text_that_it_writes(text: str) -> None:
    assert str(parse_defence(text)) == text


@pytest.mark.parametrize(
    "text", ["marvel:1", "marvell:0", "isotropic:-1", "no-peek:nan", "max-norm:0.5"]
)
def test_what_is_no_defence_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"defence|greater|more"):
        parse_defence(text)

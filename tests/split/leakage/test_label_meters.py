"""Labels guessed from gradients and activations: the meters themselves."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score

from dure.split.leakage.labels import auc, clusters_auc, direction_auc, k_means, norm_auc


def test_auc_is_that_of_scikit_learn_ties_and_all() -> None:
    draws = torch.Generator().manual_seed(0)
    for n in (2, 5, 200):
        scores = torch.randint(0, max(3, n // 4), (n,), generator=draws).double()
        positive = torch.rand(n, generator=draws) < 0.3
        positive[0], positive[1] = True, False
        expected = roc_auc_score(positive.numpy(), scores.numpy())
        assert auc(scores, positive) == pytest.approx(expected, abs=1e-12)


def test_auc_of_one_class_is_no_number() -> None:
    assert math.isnan(auc(torch.randn(4), torch.ones(4)))
    assert math.isnan(auc(torch.randn(4), torch.zeros(4)))


def test_long_gradients_of_one_class_are_told_by_their_norm_and_not_turned() -> None:
    labels = torch.tensor([1, 0, 0, 1, 0, 0])
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    rows = rows / rows.norm(dim=1, keepdim=True)
    long = rows * torch.where(labels == 1, 3.0, 1.0).unsqueeze(1)
    assert norm_auc(long, labels, 2) == 1.0
    assert norm_auc(long, 1 - labels, 2) == 0.0


def test_opposite_gradients_are_told_by_one_that_is_known_and_not_counted() -> None:
    way = torch.tensor([1.0, 2.0, -1.0])
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    rows = torch.where(labels == 1, 1.0, -1.0).unsqueeze(1) * way
    assert direction_auc(rows, labels, 2) == 1.0
    # The known one alone is no proof.
    assert math.isnan(direction_auc(rows[:3], labels[:3], 2))


def test_several_classes_are_told_one_against_the_rest() -> None:
    labels = torch.arange(30) % 3
    rows = torch.eye(3)[labels] + 0.01 * torch.randn(
        30, 3, generator=torch.Generator().manual_seed(2)
    )
    assert direction_auc(rows, labels, 3) == 1.0
    assert clusters_auc(rows, labels, 3) == 1.0
    # A class that is not there counts nothing.
    assert direction_auc(rows, labels, 5) == 1.0
    assert clusters_auc(rows, labels, 5) == 1.0
    # The norm is one score for all classes, and tells of some what it does not tell of others.
    norms = rows * torch.tensor([1.0, 2.0, 3.0])[labels].unsqueeze(1)
    assert norm_auc(norms, labels, 3) == pytest.approx(0.5)


def test_labels_that_have_nothing_to_do_with_the_values_are_guessed() -> None:
    draws = torch.Generator().manual_seed(3)
    rows = torch.randn(3000, 4, generator=draws)
    labels = torch.randint(0, 2, (3000,), generator=draws)
    for found in (norm_auc, direction_auc, clusters_auc):
        assert found(rows, labels, 2) == pytest.approx(0.5, abs=0.05)


def test_k_means_finds_the_centres_of_far_clusters() -> None:
    draws = torch.Generator().manual_seed(4)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    members = torch.arange(90) % 3
    values = centres[members] + 0.1 * torch.randn(90, 2, generator=draws)
    found = k_means(values, torch.tensor([0, 1, 2]))
    expected = torch.stack([values[members == one].mean(dim=0) for one in range(3)])
    assert torch.allclose(found, expected, atol=1e-5)

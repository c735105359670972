"""What a loss counts in a batch and in its parts: parts add up to the batch, however it is cut."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples
from dure.tasks.loss_shares import (
    NOTHING,
    CountedLoss,
    loss_and_count,
    most_counted,
    scale_of,
    zero_loss,
)

CLASSES = 4
WEIGHT = torch.tensor([0.3, 1.0, 2.5, 0.7], dtype=torch.float64)


def sum_and_count(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of the scores in a structure, as a language model gives them."""
    total = F.cross_entropy(outputs["scores"], targets, reduction="sum")
    return total, (targets != -100).sum()


def mean(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["scores"], targets)


LOSSES: dict[str, tuple[Any, bool]] = {
    "plain": (F.cross_entropy, False),
    "weighted": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), False),
    "sum and count": (sum_and_count, True),
}


def tokens(rows: int, seed: int, ignored: float) -> tuple[Tensor, Tensor]:
    """Scores (n, classes, 5), targets (n, 5) of which a share is ignored, in some rows all."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, CLASSES, 5, dtype=torch.float64, generator=generator)
    targets = torch.randint(CLASSES, (rows, 5), generator=generator)
    targets[torch.rand(rows, 5, generator=generator) < ignored] = -100
    targets[::3] = -100
    return scores, targets


@given(
    name=st.sampled_from(list(LOSSES)),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    ignored=st.sampled_from([0.0, 0.5, 0.9]),
    in_tensors=st.booleans(),
    seed=st.integers(0, 99),
)
def test_parts_add_up_to_the_batch_loss_gradient_and_count(
    name: str, sizes: list[int], ignored: float, in_tensors: bool, seed: int
) -> None:
    loss, in_structure = LOSSES[name]
    scores, targets = tokens(sum(sizes), seed, ignored)
    # A dataset shows its targets only when they are read.
    items = list(zip(scores, targets, strict=True))
    examples = Examples(scores, targets) if in_tensors else DatasetExamples(items)  # type: ignore[arg-type]
    losses = CountedLoss(loss, examples)

    def given_to(leaf: Tensor) -> Any:
        return {"scores": leaf} if in_structure else leaf

    whole = scores.clone().requires_grad_()
    expected = losses.mean(given_to(whole), targets, len(scores))
    expected.loss.backward()  # type: ignore[no-untyped-call]
    apart = scores.clone().requires_grad_()
    batch = torch.arange(len(scores))
    total = 0.0
    counted = 0.0
    for part in batch.split(sizes):
        outputs = given_to(apart[part])
        found = losses.part(outputs, targets[part], len(part), losses.share(part, batch))
        found.loss.backward()  # type: ignore[no-untyped-call]
        total += float(found.loss.detach())
        counted += found.counted
    assert counted == pytest.approx(expected.counted, rel=1e-12)
    assert apart.grad is not None
    settled = losses.settle(total, batch, counted, [apart.grad])
    if expected.counted:
        assert settled == pytest.approx(float(expected.loss.detach()), rel=1e-12)
    else:
        assert settled is None
    torch.testing.assert_close(apart.grad, whole.grad, rtol=1e-12, atol=1e-14)
    assert loss_and_count(loss, given_to(scores), targets, len(scores)) == pytest.approx(
        (float(expected.loss.detach()) * expected.counted, expected.counted), rel=1e-12
    )


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.NLLLoss(), sum_and_count])
def test_what_counts_nothing_adds_nothing_whatever_the_model_says(loss: Any) -> None:
    scores = torch.full((2, CLASSES), math.inf, dtype=torch.float64, requires_grad=True)
    targets = torch.full((2,), -100)
    losses = CountedLoss(loss, Examples(torch.zeros(2, 1), targets))
    outputs = {"scores": scores} if loss is sum_and_count else scores
    for found in (
        losses.mean(outputs, targets, 2),
        losses.part(outputs, targets, 2, losses.share(torch.arange(2), torch.arange(2))),
        losses.part(outputs, targets, 2, NOTHING),
    ):
        scores.grad = None
        found.loss.backward()  # type: ignore[no-untyped-call]
        assert (float(found.loss.detach()), found.counted) == (0.0, 0.0)
        assert scores.grad is not None
        assert torch.equal(scores.grad, torch.zeros_like(scores))
    assert loss_and_count(loss, outputs, targets, 2) == (0.0, 0.0)


def test_nothing_is_of_every_output_and_of_complex_ones_too() -> None:
    complex_one = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    number = torch.tensor(2.0, requires_grad=True)
    total = zero_loss({"a": complex_one, "b": [number, torch.ones(2, dtype=torch.int64), "text"]})
    total.backward()  # type: ignore[no-untyped-call]
    assert float(total.detach()) == 0.0
    assert complex_one.grad is not None
    assert number.grad is not None
    assert not complex_one.grad.any()
    assert float(zero_loss(torch.ones(3))) == 0.0


def test_where_all_count_alike_counts_are_of_examples_and_no_batch_is_looked_at() -> None:
    targets = torch.randint(CLASSES, (6, 5))
    losses = CountedLoss(F.cross_entropy, Examples(torch.zeros(6, 1), targets))
    assert losses.is_alike
    assert losses.expected(torch.tensor([1, 4])) == 10.0
    for loss in (F.mse_loss, nn.BCEWithLogitsLoss(), nn.MSELoss()):
        numbers = CountedLoss(loss, Examples(torch.zeros(6, 1), torch.zeros(6, 3)))
        assert numbers.is_alike
        assert numbers.expected(torch.tensor([1, 4])) == 2.0


def test_a_loss_of_ones_own_counts_examples_until_it_says_something_else() -> None:
    scores, targets = tokens(6, 0, 0.0)
    losses = CountedLoss(mean, Examples(scores, targets))
    assert losses.is_late
    assert losses.mean({"scores": scores}, targets, 6).counted == 6.0
    telling = CountedLoss(sum_and_count, Examples(scores, targets))
    found = telling.mean({"scores": scores}, targets, 6)
    assert found.counted == float((targets != -100).sum())


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor([3.0])])
def test_a_count_is_a_number_or_a_tensor_of_one(count: Any) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        return outputs.sum(), count

    assert loss_and_count(loss, torch.ones(6), torch.ones(6), 6) == (6.0, 3.0)


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ((torch.ones(()),), "the loss returned 1 values"),
        ((torch.ones(()), torch.ones(()), {}), "the loss returned 3 values"),
        ((torch.ones(2), 2), "a sum that is not a scalar tensor"),
        ((1.0, 2), "a sum that is not a scalar tensor"),
        ((torch.ones(()), torch.ones(2, 3)), r"a count of shape \[2, 3\]"),
        ((torch.ones(()), -1), "the count -1.0, but it has to be 0 or more"),
        ((torch.ones(()), math.nan), "the count nan"),
        ((torch.ones(()), torch.tensor(math.inf)), "the count inf"),
    ],
)
def test_what_is_no_sum_with_its_count_is_refused(returned: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        loss_and_count(lambda outputs, targets: returned, torch.ones(2), torch.ones(2), 2)


def test_without_anything_counted_nothing_is_scaled() -> None:
    assert scale_of(8.0, 0.0) == 1.0
    assert scale_of(8.0, 2.0) == 4.0


def test_settings_of_partials_are_those_of_the_loss() -> None:
    targets = torch.tensor([0, 1, 1, 2])
    losses = CountedLoss(partial(F.cross_entropy, ignore_index=1), Examples(targets, targets))
    assert losses.expected(torch.arange(4)) == 2.0
    assert not losses.is_late


def test_what_an_example_counts_at_the_most() -> None:
    classes = Examples(torch.zeros(3, 2), torch.tensor([0, 1, -100]))
    words = Examples(torch.zeros(3, 5), torch.zeros(3, 5, dtype=torch.long))
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 4.0]))
    assert most_counted(F.cross_entropy, classes) == 1.0
    assert most_counted(F.cross_entropy, words) == 5.0
    assert most_counted(weighted, words) == 20.0
    assert most_counted(F.mse_loss, words) == 1.0
    assert most_counted(lambda outputs, targets: outputs.sum(), classes) == math.inf

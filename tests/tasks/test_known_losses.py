"""Which losses are torch's own, and what they divide by."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dure.tasks.known_losses import cross_entropy_of, name_of, reduction_of, torch_loss

WEIGHT = torch.tensor([0.5, 1.0, 3.0])


class Renamed(nn.CrossEntropyLoss):
    """Made in another way, and computed as torch does."""

    def __init__(self) -> None:
        super().__init__(ignore_index=1)


class Focal(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets) ** 2


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss()

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        value: Tensor = self.inner(outputs["logits"], targets)
        return value


def hooked() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, given, value: 2 * value)
    return loss


def replaced() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.forward = lambda outputs, targets: outputs.sum()  # type: ignore[method-assign,assignment]
    return loss


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        partial(F.cross_entropy, ignore_index=1),
        partial(partial(F.cross_entropy, ignore_index=0), ignore_index=1, weight=WEIGHT),
        partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.2, ignore_index=1),
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1),
        partial(nn.CrossEntropyLoss(ignore_index=1)),
        Renamed(),
    ],
)
def test_a_cross_entropy_divides_by_what_is_counted(loss: Any) -> None:
    outputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))
    known = cross_entropy_of(loss)
    assert known is not None
    settings = {
        "ignore_index": known.ignore_index,
        "weight": known.weight,
        "label_smoothing": known.label_smoothing,
    }
    total = float(F.cross_entropy(outputs, targets, reduction="sum", **settings))  # type: ignore[arg-type]
    assert total / known.count(targets) == pytest.approx(float(loss(outputs, targets)), rel=1e-5)
    assert known.counts_alike(targets) == (known.weight is None and known.ignore_index == -100)


@pytest.mark.parametrize(
    "loss",
    [
        Focal(),
        Wrapped(),
        hooked(),
        replaced(),
        partial(F.cross_entropy, torch.zeros(2, 3)),
        partial(nn.CrossEntropyLoss(), weight=None),
        lambda outputs, targets: F.cross_entropy(outputs, targets),
    ],
)
def test_what_may_compute_something_else_is_a_loss_of_ones_own(loss: Any) -> None:
    assert torch_loss(loss) is None
    assert cross_entropy_of(loss) is None


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (F.mse_loss, "mean"),
        (nn.MSELoss(reduction="sum"), "sum"),
        (partial(F.cross_entropy, reduction="none"), "none"),
        (partial(F.cross_entropy, size_average=False), "sum"),
        (partial(F.cross_entropy, reduce=False), "none"),
        (partial(F.cross_entropy, size_average=True, reduction="sum"), "mean"),
        (nn.KLDivLoss(reduction="batchmean"), "batchmean"),
    ],
)
def test_it_is_known_how_many_numbers_become_one(loss: Any, reduction: str) -> None:
    found = torch_loss(loss)
    assert found is not None
    assert reduction_of(found[1]) == reduction
    if reduction != "mean":
        assert cross_entropy_of(loss) is None


def test_a_loss_has_a_name() -> None:
    assert name_of(F.mse_loss) == "mse_loss"
    assert name_of(partial(F.mse_loss)) == "mse_loss"
    assert name_of(nn.MSELoss()) == "MSELoss"

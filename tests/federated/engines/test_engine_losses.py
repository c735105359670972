"""Losses of many clients at once: values and gradients are those of torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from dure.federated.engines.losses import MANY, cross_entropy


@settings(deadline=None, max_examples=40)
@given(
    clients=st.integers(1, 5),
    batch=st.sampled_from([1, 3, MANY // 10, MANY]),
    classes=st.sampled_from([1, 2, 7, 8, 40]),
    in_company=st.booleans(),
    large=st.sampled_from([1.0, 1e3]),
    seed=st.integers(0, 9),
)
def test_cross_entropy_is_torchs_for_every_number_of_rows_and_classes(
    clients, batch, classes, in_company, large, seed
):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(clients, batch, classes, generator=generator, dtype=torch.float64) * large
    targets = torch.randint(classes, (clients, batch), generator=generator)
    loss, gradient = cross_entropy(
        outputs, targets, torch.full((clients, batch), 1 / batch, dtype=torch.float64), in_company
    )
    for client in range(clients):
        leaf = outputs[client].clone().requires_grad_()
        expected = F.cross_entropy(leaf, targets[client])
        expected.backward()
        torch.testing.assert_close(loss[client], expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient[client], leaf.grad, rtol=1e-12, atol=1e-12)
    assert gradient.is_contiguous()


@pytest.mark.parametrize("batch", [3, MANY])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_in_its_clients_loss_alone(batch, bad):
    outputs = torch.zeros(2, batch, 10)
    outputs[1, 2, 3] = bad
    targets, weights = torch.zeros(2, batch, dtype=torch.int64), torch.full((2, batch), 1 / batch)
    loss, _ = cross_entropy(outputs, targets, weights, in_company=True)
    assert loss.isfinite().tolist() == [True, False]

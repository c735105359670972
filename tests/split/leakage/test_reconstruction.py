"""Inputs rebuilt from what leaves a head, known, guessed, and trained to say less."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.split.in_turn import SplitLearning
from dure.split.leakage.reconstruction import Rebuilt, ReconstructionDecoder, rebuild, shadow_head
from dure.tasks.image_similarity import ssim
from dure.tasks.models import TwoNN
from dure.worlds.simulated import Simulated

ATTACKER = ReconstructionDecoder(steps=250)


def trained(defence: str) -> nn.Sequential:
    """The layers of a model that was trained on the digits, cut behind the first."""
    task = dure.load_task("digits")
    run = dure.train(
        task,
        SplitLearning(cut=("1",), clients=1, batch_size=64, defence=defence),
        world=Simulated(),
        stop=dure.Stop(rounds=4),
        seed=0,
    )
    assert isinstance(run.model, TwoNN)
    return run.model.layers


def attacked(layers: nn.Sequential, head: nn.Module | None = None) -> Rebuilt:
    """By an attacker who has the test examples, and sees what leaves the head for others."""
    task = dure.load_task("digits")
    inputs = task.train.inputs[:400]
    with torch.no_grad():
        seen = layers[:3](inputs)
    return rebuild(head or layers[:3], task.test.inputs, seen, inputs, ATTACKER)


@pytest.fixture(scope="module")
def undefended() -> nn.Sequential:
    return trained("none")


def test_with_the_head_an_attacker_does_better_than_the_mean_picture(
    undefended: nn.Sequential,
) -> None:
    found = attacked(undefended)
    assert found.inputs.shape == (400, 1, 8, 8)
    assert found.squared_error < 0.2 * found.of_mean
    assert found.ssim is not None
    assert found.ssim > 0.5


def test_a_wrong_head_is_worth_less_than_the_right_one(undefended: nn.Sequential) -> None:
    torch.manual_seed(0)
    other = TwoNN(features=64).layers[:3]
    assert attacked(undefended, other).squared_error > 2 * attacked(undefended).squared_error


def test_a_shadow_that_fits_what_is_seen_rebuilds_better_than_the_mean_picture(
    undefended: nn.Sequential,
) -> None:
    task = dure.load_task("digits")
    tail = undefended[3:]
    before = [weight.clone() for weight in tail.parameters()]
    shadow = shadow_head(
        lambda: TwoNN(features=64).layers[:3],
        tail,
        F.cross_entropy,
        (task.test.inputs, task.test.targets),
        undefended[:3](task.train.inputs[:400]).detach(),
    )
    guessed = attacked(undefended, shadow)
    assert attacked(undefended).squared_error < guessed.squared_error < 0.8 * guessed.of_mean
    assert all(map(torch.equal, before, tail.parameters()))
    assert all(weight.grad is None for weight in tail.parameters())


def test_without_the_servers_end_a_shadow_is_refused() -> None:
    public = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError, match="needs pairs"):
        shadow_head(partial(nn.Linear, 3, 2), None, F.cross_entropy, public, public[0])


def test_no_peek_makes_it_harder(undefended: nn.Sequential) -> None:
    assert attacked(trained("no-peek:4")).squared_error > 2 * attacked(undefended).squared_error


def test_an_attack_has_the_same_bits_and_leaves_the_generator_alone() -> None:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=draws)
    head = partial(torch.mul, torch.tensor(2.0))
    torch.manual_seed(1)
    first = rebuild(head, inputs, inputs * 2, inputs, ReconstructionDecoder(steps=20))
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    again = rebuild(head, inputs, inputs * 2, inputs, ReconstructionDecoder(steps=20))
    assert torch.equal(first.inputs, again.inputs)
    assert first.ssim is None


def pictures(seed: int) -> Tensor:
    return torch.rand(4, 1, 9, 9, generator=torch.Generator().manual_seed(seed))


def test_ssim_is_one_for_the_same_picture_and_less_for_another() -> None:
    assert ssim(pictures(0), pictures(0), 1.0) == pytest.approx(1)
    near = ssim(pictures(0) + 0.02 * pictures(1), pictures(0), 1.0)
    assert ssim(pictures(1), pictures(0), 1.0) < 0.3 < near < 1


def test_ssim_is_what_the_definition_says_in_one_window() -> None:
    x, y = pictures(2)[:1, :, :7, :7].double(), pictures(3)[:1, :, :7, :7].double()
    one, two = 0.01**2, 0.03**2
    both = torch.stack([x.flatten(), y.flatten()]).cov()
    upper = (2 * x.mean() * y.mean() + one) * (2 * both[0, 1] + two)
    lower = (x.mean() ** 2 + y.mean() ** 2 + one) * (both[0, 0] + both[1, 1] + two)
    assert ssim(x, y, 1.0) == pytest.approx(float(upper / lower), rel=1e-12)

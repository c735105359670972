"""Inputs rebuilt of gradients: exact where they can be, less of many, and refused by name."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from seen_updates import recorded_of, seen_of
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.federated.attacks.changes import UpdateChange, changed
from dure.federated.attacks.dlg import DLG
from dure.federated.attacks.examine import Examination, Examiner, groups_of
from dure.federated.attacks.geiping import Geiping, total_variation
from dure.federated.attacks.inversion import (
    check_second_derivatives,
    estimate_of,
    space_of,
)
from dure.federated.attacks.likeness import likeness, matched, mean_with_interval
from dure.federated.attacks.linear import from_first_layer
from dure.federated.attacks.observation import ObservedUpdate, StepRate


def digits(width: int = 32) -> dure.Task:
    """Digits and a small network of one hidden layer."""
    task = dure.load_task("digits")

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Sigmoid(), nn.Linear(width, 10))

    return dure.Task(network, F.cross_entropy, task.train, task.test, name="digits")


def test_one_example_of_a_linear_model_is_exact() -> None:
    task = dure.load_task("digits", model="logistic")
    model, seen = seen_of(task, [17])
    true = task.train.inputs[17:18]
    found = from_first_layer(model, seen, true)
    assert float((found - true).abs().max()) < 1e-5


def test_units_that_one_example_alone_sets_off_give_it() -> None:
    """Of several examples of a ReLU network some are exact."""
    task = dure.load_task("digits")
    model, seen = seen_of(task, [0, 40, 80])
    true = task.train.inputs[[0, 40, 80]]
    near = likeness(matched(from_first_layer(model, seen, true), true), true, 1.0)
    assert int((near.psnr > 60).sum()) >= 1


def test_a_model_that_begins_otherwise_has_no_closed_form() -> None:
    task = dure.load_task("digits", model="cnn")
    model, seen = seen_of(task, [0])
    with pytest.raises(ValueError, match="does not begin with a linear layer"):
        from_first_layer(model, seen, task.train.inputs[:1])


def test_dlg_recovers_a_digit_of_a_small_network() -> None:
    task = digits()
    model, seen = seen_of(task, [5])
    true = task.train.inputs[5:6]
    space = space_of(task.train.inputs)
    found = DLG(iterations=20).invert(model, seen, task.train.targets[5:6], space)
    assert float(likeness(found.inputs, true, space.span).psnr) > 40


def test_directions_recover_digits_of_a_batch() -> None:
    task = dure.load_task("digits")
    indices = [3, 50, 90, 200]
    model, seen = seen_of(task, indices)
    true = task.train.inputs[indices]
    space = space_of(task.test.inputs)
    found = Geiping(iterations=150).invert(model, seen, task.train.targets[indices], space)
    near = likeness(matched(found.inputs, true), true, space.span)
    guess = task.test.inputs.mean(dim=0, keepdim=True).expand_as(true)
    assert float(near.psnr.mean()) > float(likeness(guess, true, 1.0).psnr.mean()) + 5
    again = Geiping(iterations=150).invert(model, seen, task.train.targets[indices], space)
    assert torch.equal(found.inputs, again.inputs)


def test_local_steps_are_simulated_and_the_true_inputs_are_where_nothing_differs() -> None:
    task = digits()
    lr = 0.5
    model, first = seen_of(task, [1, 2, 3, 4], lr)
    inputs, targets = task.train.batch(torch.tensor([1, 2, 3, 4]))
    state = dict(first.state)
    for batch in ([0, 1], [2, 3], [0, 1], [2, 3]):
        moved = model.gradient(state, inputs[batch], targets[batch])
        state |= {name: state[name] - lr * g for name, g in moved.items()}
    delta = {name: (state[name] - first.state[name]).detach() for name in first.delta}
    seen = ObservedUpdate(first.state, delta, 4, 4, 2, StepRate(lr))
    found = estimate_of(model, seen, targets)(inputs)
    for name, tensor in seen.gradient.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    # One gradient at the beginning is something else.
    assert not torch.allclose(found["1.weight"], first.gradient["1.weight"], rtol=1e-2)


def test_sums_of_many_give_less() -> None:
    """The mean over several sums of 1, 4 and 16 single examples, by every attack."""
    task = dure.load_task("digits")
    updates = recorded_of(task, [[i] for i in range(64)])
    wanted = Examination(
        sums=(1, 4, 16), attacks=("first-layer", "geiping"), groups=3, iterations=80
    )
    rows = Examiner(task, 0, wanted).rows(updates)
    for attack in wanted.attacks:
        reached = [row.figures["psnr"].value for row in rows if row.attack == attack]
        assert reached == sorted(reached, reverse=True), attack
        assert reached[0] > reached[-1] + 10


def test_sums_of_too_many_are_left_out_and_smaller_ones_are_not() -> None:
    task = dure.load_task("digits")
    updates = recorded_of(task, [[0, 1], [2, 3, 4, 5, 6], [7]])
    wanted = Examination(sums=(1, 3), attacks=("first-layer",), groups=3, most=2)
    single, whole = Examiner(task, 0, wanted).rows(updates)
    assert single.groups == 2
    assert single.examples == 1.5
    assert whole.why == "sums of 8 examples and more are above the 2 that are rebuilt"


def test_noise_leaves_little() -> None:
    task = dure.load_task("digits")
    updates = recorded_of(task, [[i] for i in range(4)])
    wanted = Examination(
        sums=(1,),
        changes=(UpdateChange(), UpdateChange(noise=1.0)),
        attacks=("geiping",),
        iterations=60,
    )
    plain, noisy = Examiner(task, 0, wanted).rows(updates)
    assert plain.figures["ssim"].low > 0.9
    assert noisy.figures["ssim"].high < 0.4


class Fixed(torch.autograd.Function):
    """A function whose gradient has no derivative."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return Fixed.apply(self.layer(inputs.flatten(1)))


def test_models_without_second_derivatives_are_refused_by_name() -> None:
    plain = dure.load_task("digits")
    task = dure.Task(Once, F.cross_entropy, plain.train, plain.test)
    model, seen = seen_of(task, [0])
    with pytest.raises(ValueError, match="has no derivative by its inputs"):
        check_second_derivatives(model, seen, plain.train.inputs[:1], plain.train.targets[:1])
    model, seen = seen_of(plain, [0])
    check_second_derivatives(model, seen, plain.train.inputs[:1], plain.train.targets[:1])


def test_inputs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        space_of(torch.arange(6).reshape(2, 3))


def test_originals_are_matched_whatever_the_order() -> None:
    true = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    mixed = true[[3, 1, 5, 0, 2, 4]]
    assert torch.equal(matched(mixed, true), true)
    # Fewer than there are: the same ones again.
    assert torch.equal(matched(true[:1], true[:1].expand(3, 1, 4, 4))[2], true[0])
    with pytest.raises(ValueError, match="no example was reconstructed"):
        matched(true[:0], true)


def test_a_mean_lies_within_its_interval() -> None:
    numbers = torch.arange(50).double()
    value, low, high = mean_with_interval(numbers)
    assert value == 24.5
    # The normal approximation, within a fifth.
    wide = 1.96 * float(numbers.std()) / 50**0.5
    assert low == pytest.approx(24.5 - wide, abs=wide / 5)
    assert high == pytest.approx(24.5 + wide, abs=wide / 5)


def test_pictures_vary_and_other_inputs_do_not() -> None:
    assert float(total_variation(torch.ones(2, 1, 4, 4))) == 0
    steps = torch.arange(4.0).expand(1, 1, 4, 4)
    assert float(total_variation(steps)) == 1
    assert float(total_variation(torch.rand(3, 5))) == 0


def test_noise_on_a_sum_has_the_deviation_that_its_largest_client_asks_for() -> None:
    task = dure.load_task("digits")
    updates = recorded_of(task, [[0], [1, 2], [3]])
    quiet = changed(updates, UpdateChange(noise=1e-9, clip=1e3), 0)
    for one, other in zip(quiet, updates, strict=True):
        torch.testing.assert_close(one.delta[0], other.delta[0], rtol=0, atol=1e-3)
    clip = 0.01
    noisy = changed(updates, UpdateChange(noise=2.0, clip=clip), 0)
    still = changed(updates, UpdateChange(noise=1e-12, clip=clip), 0)

    def mean(sent: list[object]) -> Tensor:
        return sum(one.about.examples / 4 * one.delta[0] for one in sent)  # type: ignore[attr-defined,return-value]

    noise = mean(noisy) - mean(still)  # type: ignore[arg-type]
    assert float(noise.std()) == pytest.approx(2.0 * clip * 2 / 4, rel=0.02)
    for one in still:
        assert float(one.delta[0].norm()) <= clip * (1 + 1e-5)


def test_sums_are_of_one_round_and_spread_over_rounds() -> None:
    task = dure.load_task("digits")
    updates = recorded_of(task, [[i] for i in range(7)])
    later = [one._replace(about=replace(one.about, round=1)) for one in updates]
    groups = groups_of([*updates, *later], 3, 4)
    assert [len(group) for group in groups] == [3, 3, 3, 3]
    assert all(len({one.about.round for one in group}) == 1 for group in groups)
    assert groups_of(updates, 8, 4) == []
    rows = Examiner(task, 0, Examination(sums=(8,), attacks=("labels",))).rows(updates)
    assert rows[0].why == "no round has 8 updates that were kept"


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"sums": (0,)}, "each has to be 1 or more"),
        ({"groups": 0}, "groups is 0"),
        ({"attacks": ("guessing",)}, "no attack 'guessing'"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Examination(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or more"):
        UpdateChange(noise=-1)
    with pytest.raises(ValueError, match="greater than 0"):
        UpdateChange(clip=0)

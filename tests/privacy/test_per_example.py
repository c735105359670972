"""Clipped gradients of single examples: every way gives what a loop over examples gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dure
from dure.privacy.per_example import layers
from dure.privacy.per_example.clipping import CannotClipError, PerExampleClipping
from dure.privacy.per_example.functional import FunctionalClipping
from dure.privacy.per_example.ghost import GhostClipping
from dure.privacy.per_example.looped import LoopClipping
from dure.privacy.per_example.losses import losses_of
from dure.privacy.per_example.proof import ClippingChoice, choose

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

Make = Callable[[], nn.Module]


class Mean(nn.Module):
    """Over the positions of each example."""

    def forward(self, values: Tensor) -> Tensor:
        return values.flatten(2).mean(2) if values.ndim > 3 else values.mean(1)


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(values).relu()))


class Tied(nn.Module):
    """An embedding whose weights are those of the output layer too."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.head = None if hidden else nn.Linear(6, 11, bias=False)
        if self.head is not None:
            self.head.weight = self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        values = self.inner(self.table(indices)).tanh()
        # `hidden`: no layer tells that the weights are used here.
        scores = self.head(values) if self.head else F.linear(values, self.table.weight)
        return scores.transpose(1, 2)


class Placed(nn.Module):
    """Embeddings of positions, which are looked up once for all examples."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.table = nn.Embedding(11, 6)
        self.places = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, indices: Tensor) -> Tensor:
        places = torch.arange(indices.shape[1])
        hidden = self.table(indices) + self.places(places[None] if self.rows else places)
        return self.head(hidden.tanh()).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.cells = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 11)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.cells(self.table(indices))[0]).transpose(1, 2)


def double(make: Make) -> Make:
    return lambda: make().double()


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 8, dtype=torch.float64), torch.randint(0, 3, (5,))


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6, 8, dtype=torch.float64), torch.randint(0, 3, (5,))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 4, 9, 8, dtype=torch.float64), torch.randint(0, 3, (5,))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (5, 6)), torch.randint(0, 3, (5,))


def texts() -> tuple[Tensor, Tensor]:
    inputs = torch.randint(0, 11, (5, 6))
    targets = inputs.roll(1, 1).clone()
    # Examples with fewer targets, and one without any.
    targets[0, :4] = -100
    targets[1] = -100
    return inputs, targets


def task_of(
    make: Make, data: Callable[[], tuple[Tensor, Tensor]], loss: Any = F.cross_entropy
) -> dure.Task:
    torch.manual_seed(1)
    return dure.Task(model=double(make), loss=loss, train=data())


def chosen(task: dure.Task) -> tuple[ClippingChoice, nn.Module]:
    torch.manual_seed(2)
    model = task.model()
    return choose(task, model, task.train), model


def assert_same(
    way: PerExampleClipping, right: PerExampleClipping, inputs: Any, targets: Any, clip: float
) -> None:
    found = way.clipped(inputs, targets, clip)
    wanted = right.clipped(inputs, targets, clip)
    torch.testing.assert_close(found.norms, wanted.norms, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-10, atol=1e-10)
    for one, other in zip(found.sums, wanted.sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


KINDS: dict[str, tuple[Make, Callable[[], tuple[Tensor, Tensor]], type[PerExampleClipping]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 3, bias=False)), vectors, GhostClipping),
    "in place": (
        lambda: nn.Sequential(nn.Linear(8, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)),
        vectors,
        GhostClipping,
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(8, 7), nn.LayerNorm(7), Mean(), nn.Linear(7, 3)),
        sequences,
        GhostClipping,
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3),
            nn.GroupNorm(2, 6),
            nn.InstanceNorm2d(6, affine=True),
            nn.Softplus(),
            Mean(),
            nn.RMSNorm(6),
            nn.Linear(6, 3),
        ),
        images,
        GhostClipping,
    ),
    "layer norm of pixels": (
        lambda: nn.Sequential(nn.LayerNorm([9, 8], bias=False), Mean(), nn.Linear(4, 3)),
        images,
        GhostClipping,
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 8, padding_idx=2), Mean(), nn.Linear(8, 3)),
        words,
        GhostClipping,
    ),
    "used twice": (Twice, vectors, GhostClipping),
    "positions": (lambda: Placed(rows=False), texts, GhostClipping),
    "positions in a row": (lambda: Placed(rows=True), texts, GhostClipping),
    "tied": (lambda: Tied(hidden=False), texts, FunctionalClipping),
    "tied in secret": (lambda: Tied(hidden=True), texts, FunctionalClipping),
    "other layers": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.PReLU(), Mean(), nn.Linear(6, 3)),
        images,
        FunctionalClipping,
    ),
    "attention": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            Mean(),
            nn.Linear(8, 3),
        ),
        sequences,
        FunctionalClipping,
    ),
    "recurrent": (Recurrent, texts, LoopClipping),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_that_is_chosen_gives_what_a_loop_gives(kind: str) -> None:
    make, data, way = KINDS[kind]
    task = task_of(make, data)
    choice, model = chosen(task)
    assert choice.kind is way
    looped = LoopClipping(model, choice.each)
    inputs, targets = task.train.batch(torch.arange(5))
    # Some are clipped, and some are not.
    clip = float(looped.clipped(inputs, targets, math.inf).norms.median())
    assert_same(choice.made(model), looped, inputs, targets, clip)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("examples", [1, 2, 6])
def test_batches_of_as_many_examples_as_there_are_positions(rows: bool, examples: int) -> None:
    choice, model = chosen(task_of(lambda: Placed(rows), texts))
    assert choice.kind is GhostClipping
    inputs = torch.randint(0, 11, (examples, 6))
    assert_same(
        choice.made(model), LoopClipping(model, choice.each), inputs, inputs.roll(1, 1), 0.3
    )


def test_what_is_frozen_has_no_gradient_and_no_part_in_the_norm() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        return model

    task = task_of(make, vectors)
    choice, model = chosen(task)
    assert choice.kind is GhostClipping
    inputs, targets = task.train.batch(torch.arange(5))
    found = choice.made(model).clipped(inputs, targets, math.inf)
    assert [tuple(one.shape) for one in found.sums] == [(7,), (3, 7)]
    assert_same(choice.made(model), LoopClipping(model, choice.each), inputs, targets, 0.3)


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 2),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.sampled_from([0, 1, (2, 0), "same", "valid"]),
    mode=st.sampled_from(["zeros", "circular"]),
    out=st.sampled_from([2, 40]),
)
def test_convolutions_of_all_kinds(
    groups: int, kernel: Any, stride: Any, dilation: Any, padding: Any, mode: str, out: int
) -> None:
    stride = 1 if padding == "same" else stride
    torch.manual_seed(0)
    layer = nn.Conv2d(4, out, kernel, stride, padding, dilation, groups=groups, padding_mode=mode)
    model = nn.Sequential(layer, nn.Tanh(), Mean(), nn.Linear(out, 3)).double()
    inputs, targets = images()
    (each,) = losses_of(F.cross_entropy)
    assert_same(GhostClipping(model, each), LoopClipping(model, each), inputs, targets, 0.5)


@settings(max_examples=20, deadline=None)
@given(
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    groups=st.sampled_from([1, 4]),
)
def test_convolutions_over_one_dimension(
    kernel: int, stride: int, dilation: int, groups: int
) -> None:
    torch.manual_seed(0)
    layer = nn.Conv1d(4, 8, kernel, stride, dilation=dilation, groups=groups)
    head = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    model = nn.Sequential(layer, nn.Tanh(), head).double()
    inputs, targets = images()
    (each,) = losses_of(F.cross_entropy)
    assert_same(
        GhostClipping(model, each), LoopClipping(model, each), inputs.flatten(2), targets, 0.5
    )


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=2),
    wide=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_linear_layers_with_any_dimensions_between(shape: list[int], wide: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(wide[0], wide[1]), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    model = model.double()
    inputs = torch.randn(4, *shape, wide[0], dtype=torch.float64)
    model(inputs)
    (each,) = losses_of(F.cross_entropy)
    assert_same(
        GhostClipping(model, each),
        LoopClipping(model, each),
        inputs,
        torch.tensor([0, 1, 2, 0]),
        0.5,
    )


def test_both_forms_of_a_norm_are_the_same() -> None:
    given = torch.randn(7, 5, 4, dtype=torch.float64)
    outgoing = torch.randn(7, 5, 3, dtype=torch.float64)
    gram = layers.gram_norms(given, outgoing)
    torch.testing.assert_close(gram, layers.LinearContribution._formed(given, outgoing))
    layer = nn.Conv2d(4, 6, 3, groups=2).double()
    images, gradients = (torch.randn(3, n, 8, 8, dtype=torch.float64) for n in (4, 6))
    found = []
    for by_gram in (True, False):
        part = layers.ConvolutionContribution(
            layers._Convolution(layer), images, gradients[:, :, :6, :6]
        )
        part._by_gram = by_gram
        found.append(part.norms())
    torch.testing.assert_close(*found)


def test_gradients_that_are_too_many_to_keep_are_formed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "HELD", 0)
    monkeypatch.setattr(layers, "AT_ONCE", 1)
    make, data, _ = KINDS["norms"]
    task = task_of(make, data)
    choice, model = chosen(task)
    assert choice.kind is GhostClipping
    inputs, targets = task.train.batch(torch.arange(5))
    assert_same(choice.made(model), LoopClipping(model, choice.each), inputs, targets, 0.3)


def test_examples_that_do_not_fit_at_once_are_taken_a_few_at_a_time() -> None:
    make, data, _ = KINDS["other layers"]
    task = task_of(make, data)
    choice, model = chosen(task)
    way = FunctionalClipping(model, choice.each)
    way.chunk = 2
    inputs, targets = task.train.batch(torch.arange(5))
    assert_same(way, LoopClipping(model, choice.each), inputs, targets, 0.3)


@settings(max_examples=20, deadline=None)
@given(clip=st.floats(0.01, 10), scale=st.floats(0.1, 1e4), at=st.integers(0, 4))
def test_one_example_changes_the_sum_by_at_most_the_clip(
    clip: float, scale: float, at: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    inputs, targets = vectors()
    inputs[at] *= scale
    way = GhostClipping(model, losses_of(F.cross_entropy)[0])
    others = torch.arange(5) != at
    whole = way.clipped(inputs, targets, clip).sums
    without = way.clipped(inputs[others], targets[others], clip).sums
    moved = sum(float((a - b).square().sum()) for a, b in zip(whole, without, strict=True))
    assert math.sqrt(moved) <= clip * (1 + 1e-9)


# Losses


def test_the_loss_of_an_example_is_what_the_loss_gives_for_it_alone() -> None:
    outputs = torch.randn(5, 3, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 1, 0])
    own = [
        F.cross_entropy,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda o, t: F.cross_entropy(o, t) + o.square().mean(),
        lambda o, t: (F.cross_entropy(o, t, reduction="sum"), len(t)),
    ]
    for loss in own:
        for each in losses_of(loss):
            try:
                found = each(outputs, targets)
            except CannotClipError:
                continue
            for at in range(5):
                alone: Any = loss(outputs[at : at + 1], targets[at : at + 1])
                alone = alone[0] if isinstance(alone, tuple) else alone
                torch.testing.assert_close(found[at], alone)


def test_a_class_of_twice_the_weight_has_twice_the_loss() -> None:
    outputs = torch.zeros(2, 2, dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0], dtype=torch.float64))
    (each,) = losses_of(loss)
    found = each(outputs, torch.tensor([0, 1]))
    torch.testing.assert_close(found[1], 2 * found[0])
    torch.testing.assert_close(found.mean(), torch.tensor(math.log(2)).double())


def test_ignored_targets_do_not_count_in_an_example() -> None:
    outputs = torch.randn(2, 3, 4, dtype=torch.float64)
    targets = torch.tensor([[0, 1, -100, -100], [-100, -100, -100, -100]])
    (each,) = losses_of(F.cross_entropy)
    first, second = each(outputs, targets)
    torch.testing.assert_close(first, F.cross_entropy(outputs[:1, :, :2], targets[:1, :2]))
    assert float(second) == 0


# What is refused


class Mixes(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        self.seen += values.detach().sum(0)
        return values


class MixesInTraining(nn.Module):
    """Mixes in training alone, in a share of the steps, beside random numbers of its own."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, values: Tensor) -> Tensor:
        if not self.training:
            return values
        mixed = bool(torch.rand(()) < self.share)
        values = F.dropout(values, 0.1)
        return values - values.mean(0) if mixed else values


class Rolls(nn.Module):
    """Mixes an example with its neighbour, as some augmentations do."""

    def forward(self, values: Tensor) -> Tensor:
        share = torch.rand(()) if self.training else 1.0
        return share * values + (1 - share) * values.roll(1, 0)


class Remembers(nn.Module):
    """Keeps something of a batch for the next one, in no buffer."""

    last: Tensor | float = 0.0

    def forward(self, values: Tensor) -> Tensor:
        before, self.last = self.last, values.detach().mean()
        return values + before


def listened(hook: Callable[[nn.Linear], object]) -> Make:
    def make() -> nn.Module:
        model = nn.Linear(8, 3).double()
        hook(model)
        return model

    return make


REFUSED: dict[str, tuple[Make, Callable[[], tuple[Tensor, Tensor]], str]] = {
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)),
        vectors,
        "use nn.GroupNorm instead",
    ),
    "statistics": (
        lambda: nn.Sequential(
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True), Mean(), nn.Linear(4, 3)
        ),
        images,
        "leave track_running_stats out",
    ),
    "rows that are changed": (
        lambda: nn.Sequential(nn.Embedding(11, 8, max_norm=1.0), Mean(), nn.Linear(8, 3)),
        words,
        "leave max_norm out",
    ),
    "frequencies": (
        lambda: nn.Sequential(nn.Embedding(11, 8, scale_grad_by_freq=True), Mean()),
        words,
        "counts in the whole batch",
    ),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(11, 8, sparse=True), Mean(), nn.Linear(8, 3)),
        words,
        "leave sparse out",
    ),
    "mixed examples": (
        lambda: nn.Sequential(nn.Linear(8, 8), Mixes(), nn.Linear(8, 3)),
        vectors,
        "depends on the other examples",
    ),
    "mixed in training": (
        lambda: nn.Sequential(nn.Linear(8, 8), MixesInTraining(1.0), nn.Linear(8, 3)),
        vectors,
        "depends on the other examples",
    ),
    "mixed now and then": (
        lambda: nn.Sequential(nn.Linear(8, 8), MixesInTraining(0.5), nn.Linear(8, 3)),
        vectors,
        "depends on the other examples",
    ),
    "mixed with a neighbour": (
        lambda: nn.Sequential(nn.Linear(8, 8), Rolls(), nn.Linear(8, 3)),
        vectors,
        "depends on the other examples",
    ),
    "remembered": (
        lambda: nn.Sequential(nn.Linear(8, 8), Remembers(), nn.Linear(8, 3)),
        vectors,
        "stores state from earlier batches|depends on the other examples",
    ),
    "a hook on a parameter": (
        listened(lambda model: model.weight.register_hook(lambda gradient: gradient * 2)),
        vectors,
        "weight has a hook on its gradient",
    ),
    "a hook after accumulation": (
        listened(lambda model: model.bias.register_post_accumulate_grad_hook(lambda _: None)),
        vectors,
        "bias has a hook on its gradient",
    ),
    "a hook on a module": (
        listened(lambda model: model.register_full_backward_hook(lambda *_: None)),
        vectors,
        "with a backward hook",
    ),
    "buffers": (
        lambda: nn.Sequential(Counts(), nn.Linear(8, 3)),
        vectors,
        "buffer 0.seen",
    ),
    "positions first": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), Mean(), nn.Linear(8, 3)),
        sequences,
        "examples have to be the first dimension",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_mixes_examples_is_refused(what: str) -> None:
    make, data, reason = REFUSED[what]
    with pytest.raises(ValueError, match=reason):
        chosen(task_of(make, data))


class Drops(nn.Module):
    """Dropout as a function, which is no module that could be put to rest."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.head = nn.Linear(8, 3)

    def forward(self, values: Tensor) -> Tensor:
        if self.attends:
            values = F.scaled_dot_product_attention(values, values, values, None, 0.1).mean(1)
        return self.head(F.dropout(values, 0.1, self.training))


@pytest.mark.parametrize("attends", [True, False])
def test_dropout_as_a_function_is_no_mixing_and_keeps_the_fast_way(attends: bool) -> None:
    choice, _ = chosen(task_of(double(lambda: Drops(attends)), sequences if attends else vectors))
    assert choice.kind is GhostClipping


class Noisy(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values + torch.randn_like(values) if self.training else values


def test_examples_of_a_model_that_draws_otherwise_are_computed_alone() -> None:
    make = double(lambda: nn.Sequential(nn.Linear(8, 8), Noisy(), nn.Linear(8, 3)))
    choice, _ = chosen(task_of(make, vectors))
    assert choice.kind is FunctionalClipping


def test_a_loss_that_mixes_examples_is_refused() -> None:
    task = task_of(lambda: nn.Linear(8, 3), vectors, lambda o, t: F.cross_entropy(o - o.mean(0), t))
    with pytest.raises(ValueError, match="not the mean of its examples' losses"):
        chosen(task)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_weights_whose_norms_are_not_exact_are_refused(dtype: torch.dtype) -> None:
    task = dure.Task(model=lambda: nn.Linear(8, 3).to(dtype), loss=F.mse_loss, train=vectors())
    with pytest.raises(ValueError, match="float32 or float64"):
        chosen(task)

"""The models: sizes in closed form, shapes, and what each promises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dure.tasks.models import (
    CNN,
    CharLSTM,
    LogisticRegression,
    PeepholeLSTM,
    ResNet,
    Transformer,
    TwoNN,
)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_fedavg_paper_s_models_have_its_sizes():
    assert size(TwoNN()) == 199_210
    assert size(CNN()) == 1_663_370
    assert size(CharLSTM(vocabulary=258, peepholes=True)) == 866_578


def test_the_digits_models_are_small():
    assert size(TwoNN(features=64)) == 55_210
    assert size(LogisticRegression(64, 10)) == 65 * 10


def test_the_lstm_of_tensorflow_federated_has_its_size():
    assert size(CharLSTM(vocabulary=90)) == 820_522


@pytest.mark.parametrize("peepholes", [False, True])
def test_the_lstm_has_its_closed_form_size(peepholes):
    symbols, e, w = 11, 3, 5
    gates = 4 * w * (e + 1 + w) + 4 * w * (w + 1 + w) + (6 * w if peepholes else 0)
    assert size(CharLSTM(symbols, e, w, peepholes)) == symbols * e + gates + (w + 1) * symbols


@pytest.mark.parametrize(("channels", "classes", "n", "w"), [(1, 10, 1, 16), (3, 7, 3, 8)])
def test_the_resnet_has_its_closed_form_size(channels, classes, n, w):
    expected = (
        (9 * channels + 2) * w
        + n * (378 * w * w + 28 * w)
        - 80 * w * w
        + 12 * w
        + (4 * w + 1) * classes
    )
    assert size(ResNet(channels, classes, depth=6 * n + 2, width=w)) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_the_transformer_has_its_closed_form_size(tied):
    symbols, context, layers, w = 11, 7, 3, 8
    expected = (
        (1 if tied else 2) * symbols * w + context * w + layers * (12 * w * w + 13 * w) + 2 * w
    )
    assert size(Transformer(symbols, context, layers, heads=2, width=w, tied=tied)) == expected


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (LogisticRegression(29, 10), (29,)),
        (TwoNN(64), (1, 8, 8)),
        (CNN(size=8), (1, 8, 8)),
        (ResNet(in_channels=1), (1, 28, 28)),
    ],
)
def test_classifiers_map_examples_to_scores_in_float64_too(model, shape):
    for dtype in (torch.float32, torch.float64):
        scores = model.to(dtype)(torch.randn(4, *shape, dtype=dtype))
        assert scores.shape == (4, 10)
        assert scores.dtype == dtype


@pytest.mark.parametrize(
    "model",
    [
        CharLSTM(11, width=16),
        CharLSTM(11, width=16, peepholes=True),
        Transformer(11, context=9, layers=2, heads=2, width=16),
        Transformer(11, context=9, layers=2, heads=2, width=16, tied=True),
    ],
)
def test_language_models_score_every_position_and_look_at_no_later_one(model):
    model.double().eval()
    indices = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    scores = model(indices)
    assert scores.shape == (3, 11, 9)
    changed = indices.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    assert torch.equal(model(changed)[:, :, :5], scores[:, :, :5])
    assert not torch.allclose(model(changed)[:, :, 5:], scores[:, :, 5:])


def test_the_input_of_ones_is_the_bias_of_an_lstm():
    torch.manual_seed(0)
    model = CharLSTM(5, embedding=3, width=4).double()
    layer = model.layers[0]
    reference = nn.LSTM(3, 4, batch_first=True).double()
    with torch.no_grad():
        reference.weight_ih_l0.copy_(layer.weight_ih_l0[:, :3])
        reference.bias_ih_l0.copy_(layer.weight_ih_l0[:, 3])
        reference.bias_hh_l0.zero_()
        reference.weight_hh_l0.copy_(layer.weight_hh_l0)
    embedded = model.embedding(torch.tensor([[0, 1, 2, 3]]))
    ours, _ = layer(nn.functional.pad(embedded, (0, 1), value=1.0))
    torch.testing.assert_close(ours, reference(embedded)[0])


def test_peepholes_of_zero_make_an_ordinary_lstm():
    layer, reference = (
        PeepholeLSTM(3, 4).double(),
        nn.LSTM(3, 4, bias=False, batch_first=True).double(),
    )
    with torch.no_grad():
        layer.peepholes.zero_()
        layer.weight_ih.copy_(reference.weight_ih_l0)
        layer.weight_hh.copy_(reference.weight_hh_l0)
    inputs = torch.randn(2, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(inputs)[0], reference(inputs)[0])


def test_the_transformer_drops_out_in_training_only():
    model = Transformer(11, context=9, layers=1, heads=2, width=16, dropout=0.5)
    indices = torch.arange(9).unsqueeze(0)
    assert not torch.equal(model(indices), model(indices))
    model.eval()
    assert torch.equal(model(indices), model(indices))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: CNN(size=30), "multiple of 4, not 30"),
        (lambda: ResNet(depth=10), "8, 14 or 20, not 10"),
        (lambda: ResNet(width=12), "multiple of the 8 groups, not 12"),
        (lambda: Transformer(11, heads=3, width=16), "3 heads cannot share a width of 16"),
        (lambda: Transformer(11, context=4)(torch.zeros(1, 5, dtype=torch.long)), "5 does not fit"),
    ],
)
def test_impossible_sizes_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()

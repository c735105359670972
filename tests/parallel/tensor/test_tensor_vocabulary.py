"""Embedding and cross-entropy divided by symbols, beside torch's."""

from __future__ import annotations

import pytest
import torch
from divided import at_all_degrees
from torch import Tensor, nn
from torch.nn import functional as F

from dure.collectives.group import Group
from dure.parallel.tensor import (
    VocabularyEmbedding,
    VocabularyOutput,
    vocabulary_parallel_cross_entropy,
)

CLOSE = 1e-10


def distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).detach().abs().max()) if one.numel() else 0.0


def losses(group: Group) -> float:
    """Of shapes, vocabularies, reductions, ignored targets; and their gradients."""
    worst = 0.0
    generator = torch.Generator().manual_seed(6)
    for shape in ((), (5,), (3, 4), (2, 3, 2)):
        for vocabulary in (3, 8, 13):
            sizes = (vocabulary,) if shape == () else (shape[0], vocabulary, *shape[1:])
            scores = 30 * torch.randn(sizes, generator=generator, dtype=torch.float64)
            scores.requires_grad_()
            targets = torch.randint(0, vocabulary, shape, generator=generator)
            for ignored in (None, -100, int(targets.flatten()[-1])):
                if ignored == -100 and shape:
                    targets = targets.clone()
                    targets[0] = -100
                options = {} if ignored is None else {"ignore_index": ignored}
                dim = 0 if shape == () else 1
                if ignored not in (None, -100) and bool((targets == -100).any()):
                    continue
                for reduction in ("mean", "sum", "none"):
                    alone = F.cross_entropy(scores, targets, reduction=reduction, **options)  # type: ignore[arg-type]
                    (expected,) = torch.autograd.grad(alone.square().sum(), scores)
                    part = (
                        scores.detach()
                        .tensor_split(group.size, dim)[group.rank]
                        .clone()
                        .requires_grad_()
                    )
                    known = vocabulary if reduction == "sum" else None
                    loss = vocabulary_parallel_cross_entropy(
                        part, targets, group, reduction=reduction, vocabulary=known, **options
                    )
                    (found,) = torch.autograd.grad(loss.square().sum(), part)
                    if bool(alone.isnan().any()):  # the mean of nothing
                        assert bool(loss.isnan().all())
                        continue
                    worst = max(worst, distance(loss, alone))
                    worst = max(
                        worst, distance(found, expected.tensor_split(group.size, dim)[group.rank])
                    )
    return worst


def test_cross_entropy() -> None:
    for rows in at_all_degrees(losses).values():
        assert max(rows) < 1e-9  # scores of 30, squared losses


def refusals(group: Group) -> list[int]:
    scores = torch.randn(4, 3, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 0])
    with pytest.raises(ValueError, match="there is no reduction 'median'"):
        vocabulary_parallel_cross_entropy(scores, targets, group, reduction="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit scores for"):
        vocabulary_parallel_cross_entropy(scores, targets[:3], group)
    with pytest.raises(IndexError, match="is outside the vocabulary of"):
        vocabulary_parallel_cross_entropy(scores, targets + 3 * group.size, group)
    if group.size > 1:
        with pytest.raises(ValueError, match="of 40 symbols, not 3"):
            vocabulary_parallel_cross_entropy(scores, targets, group, vocabulary=40)
    with pytest.raises(ValueError, match="max_norm"):
        VocabularyEmbedding.from_embedding(nn.Embedding(4, 2, max_norm=1.0), group)
    with pytest.raises(ValueError, match=r"only an nn\.Embedding"):
        VocabularyEmbedding.from_embedding(nn.Linear(4, 2), group)
    before = group.meter.counters.bytes_sent
    vocabulary_parallel_cross_entropy(scores, targets, group)
    return [group.meter.counters.bytes_sent - before]


def test_errors_and_bytes() -> None:
    """Three numbers a position travel."""
    for size, rows in at_all_degrees(refusals).items():
        expected = 8 * (2 * (size - 1) * 4 // size + 2 * (size - 1) * 8 // size)
        assert rows == [[expected]] * size


def embeddings(group: Group) -> float:
    worst = 0.0
    indices = torch.tensor([[0, 2, 1], [2, 0, 2]])
    for symbols, padding in ((3, None), (3, 2), (9, 0)):
        torch.manual_seed(1)
        alone = nn.Embedding(symbols, 4, padding_idx=padding).double()
        layer = VocabularyEmbedding.from_embedding(alone, group)
        output = VocabularyOutput(alone.weight, None, group, gather_output=True)
        output.weight = layer.weight
        expected = alone(indices)
        found = layer(indices)
        worst = max(worst, distance(found, expected))
        scores = F.linear(expected, alone.weight)
        divided = output(found)
        worst = max(worst, distance(divided, scores))
        scores.square().sum().backward()
        divided.square().sum().backward()
        assert alone.weight.grad is not None
        own = alone.weight.grad.tensor_split(group.size)[group.rank]
        worst = max(worst, distance(layer.weight.grad, own))
        with pytest.raises(
            IndexError, match="outside the vocabulary" if group.size > 1 else "out of range"
        ):
            layer(indices + symbols)
    return worst


def test_embedding_and_a_tied_output_layer() -> None:
    for rows in at_all_degrees(embeddings).values():
        assert max(rows) < CLOSE

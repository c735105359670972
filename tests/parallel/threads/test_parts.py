"""Inputs and outputs divided over workers and put together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.parallel.threads import batch_trees


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_what_is_divided_is_joined_again(sizes: list[int]) -> None:
    n = sum(sizes)
    tree = {"a": torch.rand(n, 2), "b": (torch.arange(n), [torch.rand(n, 1, 3)])}
    pieces = batch_trees.split_examples(tree, sizes)
    assert [len(piece["a"]) for piece in pieces] == sizes
    again = batch_trees.join_examples(pieces, sizes)
    assert torch.equal(again["a"], tree["a"])
    assert torch.equal(again["b"][1][0], tree["b"][1][0])  # type: ignore[index]
    assert batch_trees.nbytes(pieces) == batch_trees.nbytes(tree)


def test_gradients_go_back_to_the_parts() -> None:
    wholes = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    outputs = [(whole * 2, torch.zeros(len(whole))) for whole in wholes]
    leaves = [batch_trees.detached(output) for output in outputs]
    joined, _ = batch_trees.join_examples(leaves, [2, 3])
    (joined * torch.arange(5.0)).sum().backward()
    for output, leaf in zip(outputs, leaves, strict=True):
        batch_trees.backward(output, batch_trees.gradients(leaf))
    assert [whole.grad.tolist() for whole in wholes if whole.grad is not None] == [
        [0, 2],
        [4, 6, 8],
    ]


@pytest.mark.parametrize(
    ("trees", "complaint"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], r"shape \(\) for 2 examples"),
        ([torch.ones(1, 2), torch.ones(1, 3)], r"shape \(1, 2\) for 2 examples"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(3)}], "different structures"),
        ([1, 2], r"returned \[1, 2\], one per worker"),
    ],
)
def test_what_cannot_be_joined_is_said(trees: list[Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        batch_trees.join_examples(trees, [2, 3])


def test_what_cannot_be_divided_is_said() -> None:
    with pytest.raises(ValueError, match="a str among the inputs cannot be divided"):
        batch_trees.split_examples([torch.ones(2), "word"], [1, 1])

"""Inputs and outputs of a model, divided over workers and joined again.

They are tensors in any structure that torch's pytrees know, such as tuples, lists and dicts. Every
tensor has the examples along its first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dure.tensors.backward import backward_from


def split_examples(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Return views of the first sizes[0] examples of every tensor, the next sizes[1], and so on.

    Each size gets a copy of the structure. Raises ValueError for a leaf that is no tensor, and
    RuntimeError for a tensor with another number of examples.
    """
    leaves, structure = tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"a {type(leaf).__name__} among the inputs cannot be divided over workers: give "
                "tensors"
            )
    pieces = [leaf.split(list(sizes)) for leaf in leaves]
    # inputs without any tensor, such as an empty tuple
    if not pieces:
        return [tree_unflatten([], structure) for _ in sizes]
    return [tree_unflatten(list(own), structure) for own in zip(*pieces, strict=True)]


def join_examples(trees: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate the tensors of `trees`, the inverse of `split_examples`.

    Leaves that are no tensors must be equal in all trees. Raises ValueError for outputs that cannot
    be joined: numbers without examples, structures that differ.
    """
    flat = [tree_flatten(tree) for tree in trees]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise ValueError(
            "the model returned different structures on different workers, which cannot be joined"
        )
    of_workers = [leaves for leaves, _ in flat]
    joined_leaves = [_joined_leaf(list(each), sizes) for each in zip(*of_workers, strict=True)]
    return tree_unflatten(joined_leaves, structure)


def _joined_leaf(parts: list[Any], sizes: Sequence[int]) -> Any:
    if not all(isinstance(part, Tensor) for part in parts):
        # A number, such as a width, that is equal on all workers is not joined.
        if any(part != parts[0] for part in parts):
            raise ValueError(
                f"the model returned {parts}, one per worker, which cannot be joined: return "
                "tensors"
            )
        return parts[0]
    for part, size in zip(parts, sizes, strict=True):
        if part.ndim == 0 or len(part) != size:
            raise ValueError(
                f"the model returned a tensor of shape {tuple(part.shape)} for {size} examples; "
                "to join it with other workers' outputs, the first dimension has to be the "
                "examples"
            )
    # Outputs may come from several devices.
    return torch.cat([part.to(parts[0].device) for part in parts])


def detached(tree: Any) -> Any:
    """Return the same values as leaves of a new graph.

    Tensors that required a gradient require a gradient again.
    """

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # only tensors that required a gradient: integers cannot, and others need none
        return leaf.detach().requires_grad_(leaf.requires_grad)

    return tree_map(cut, tree)


def gradients(tree: Any) -> list[Tensor | None]:
    """Return the gradient of every tensor in `tree`; None for a tensor without a gradient."""
    return [leaf.grad for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def backward(tree: Any, gradients: Sequence[Tensor | None]) -> None:
    """Run backward from the tensors in `tree` that have a gradient in `gradients`."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    pairs = [(leaf, grad) for leaf, grad in zip(leaves, gradients, strict=True) if grad is not None]
    if pairs:
        backward_from(pairs)


def nbytes(tree: Any) -> int:
    """Return the bytes of the tensors in `tree`; for sparse tensors of their indices and values."""
    return sum(_nbytes(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _nbytes(tensor: Tensor) -> int:
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes

"""All-reduce of sparse tensors, such as the gradients of embeddings with `sparse=True`.

The sum has an element wherever any rank has an element. Every rank gathers the indices and values
of all ranks, and adds them in the order of ranks: all ranks have the same bits.

Cost, with k elements on each of N ranks: each rank receives (N-1)·k indices and values, and a few
hundred bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dure.collectives.shared_memory.calls import AVG, NUMBER_OF, OPERATIONS, SUM, name_of
from dure.collectives.shared_memory.torch_collectives import TorchCollectives
from dure.errors import CallError, MismatchError

_MOST_DIMENSIONS = 64  # torch has no tensors of more
_HALVES = (torch.float16, torch.bfloat16)


def is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is torch.sparse_coo


def check_sparse(tensors: Sequence[Tensor], op: int) -> None:
    """Raise CallError unless these can be reduced together."""
    if op not in (SUM, AVG):
        raise CallError(
            f"unsupported reduction operation for sparse tensors: {OPERATIONS[op]}; sum them, or "
            "call to_dense() first"
        )
    first = tensors[0]
    if any(not is_sparse(tensor) or not tensor.is_cpu for tensor in tensors):
        raise CallError(
            "invalid tensor layout: the tensors of a sparse all_reduce are all sparse, on the CPU"
        )
    if any(_form(tensor) != _form(first) for tensor in tensors):
        raise CallError(
            "invalid tensor size: the tensors of a sparse all_reduce have one shape and one dtype"
        )
    if op == AVG and not (first.is_floating_point() or first.is_complex()):
        raise CallError(f"the average of {first.dtype} is not a {first.dtype}: sum it instead")


def all_reduce(
    tensors: Sequence[Tensor], op: int, moves: TorchCollectives, names: Sequence[int]
) -> None:
    """Replace each of the tensors by the sum of all tensors of all ranks.

    names: names of the ranks in errors. Raises MismatchError, on all ranks, if shapes, dtypes or
    sparse dimensions differ.
    """
    # Not in inference mode, unlike queued calls: a sparse tensor would keep inference tensors.
    with torch.inference_mode(mode=False), torch.no_grad():
        own = _added([tensor.detach().coalesce() for tensor in tensors])
        forms = _gathered_forms((own._nnz(), *_form(tensors[0])), moves, len(names))
        _compare(forms, names)
        counts = [form[0] for form in forms]
        indices = [own.indices().new_empty(own.sparse_dim(), count) for count in counts]
        values = [own.values().new_empty(count, *own.shape[own.sparse_dim() :]) for count in counts]
        moves.all_gather(indices, own.indices().contiguous())
        moves.all_gather(values, own.values().contiguous())
        total = _added(
            [
                torch.sparse_coo_tensor(
                    where, what, own.shape, is_coalesced=True, check_invariants=False
                )
                for where, what in zip(indices, values, strict=True)
            ]
        )
        if op == AVG:
            total = total / (len(names) * len(tensors))
        for tensor in tensors:
            tensor.copy_(total.to(tensor.dtype))


def _added(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum, in this order; of half precision in float32."""
    wide = [tensor.float() if tensor.dtype in _HALVES else tensor for tensor in tensors]
    total = wide[0].clone()
    for tensor in wide[1:]:
        total = total + tensor
    return total.coalesce()


def _form(tensor: Tensor) -> tuple[int, ...]:
    return NUMBER_OF[tensor.dtype], tensor.sparse_dim(), tensor.dense_dim(), *tensor.shape


def _gathered_forms(
    form: tuple[int, ...], moves: TorchCollectives, size: int
) -> list[tuple[int, ...]]:
    """Return for each rank its number of elements and its `_form`."""
    row = torch.full((4 + _MOST_DIMENSIONS,), -1)
    row[: len(form)] = torch.tensor(form)
    rows = [torch.empty_like(row) for _ in range(size)]
    moves.all_gather(rows, row)
    return [tuple(number for number in row.tolist() if number >= 0) for row in rows]


def _compare(forms: Sequence[tuple[int, ...]], names: Sequence[int]) -> None:
    """Raise MismatchError unless all forms are equal apart from the number of elements."""
    made: dict[tuple[int, ...], list[int]] = {}
    for name, form in zip(names, forms, strict=True):
        made.setdefault(form[1:], []).append(name)
    if len(made) > 1:
        raise MismatchError(
            "a sparse all_reduce",
            tuple(
                (tuple(ranks), f"it with {name_of(dtype)} of shape {shape}, {sparse} of it sparse")
                for (dtype, sparse, _, *shape), ranks in made.items()
            ),
        )

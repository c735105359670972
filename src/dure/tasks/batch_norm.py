"""Batch norm in training: it needs two values a channel, so a batch of one may be too small."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.data.rank_examples import RankExamples
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import to_device

MOST_TRIED = 1_000
"""Most batch sizes that are tried for advice, the nearest first."""


class BatchSource(Protocol):
    """An object that returns batches of examples."""

    def batch(self, indices: Tensor) -> tuple[Any, Any]: ...


@torch.no_grad()
def needs_two(model: nn.Module, examples: BatchSource, first: int = 0) -> bool:
    """Return whether the model cannot train on a single example.

    This is so if a batch norm then sees a single value a channel. The model is not changed. Cost:
    for models with batch norm, a forward pass of the example `first`, in evaluation mode.
    """
    # A forward pass would fix the shapes of lazy parameters.
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return False
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    # A model may keep some of its norms in evaluation mode.
    norms = [one for one in model.modules() if isinstance(one, _BatchNorm) and _measures(one)]
    lone: list[nn.Module] = []

    def look(module: nn.Module, given: Any) -> None:
        (values,) = given
        if values.numel() == values.shape[1]:
            lone.append(module)

    hooks = [one.register_forward_pre_hook(look) for one in norms]
    try:
        model.eval()
        # Other errors of the model or the example are reported by its first step.
        with suppress(Exception), deferred_compiler():
            if norms:
                device = next(model.parameters()).device
                inputs, _ = to_device(examples.batch(torch.tensor([first])), device)
                model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    return bool(lone)


def statistics(model: nn.Module, names: Sequence[str]) -> dict[int, bool]:
    """Return the positions of running statistics among buffers, and which are variances."""
    kinds = {
        f"{place}.{own}" if place else own: own == "running_var"
        for place, module in model.named_modules()
        if isinstance(module, _NormBase)
        for own in ("running_mean", "running_var")
    }
    return {place: kinds[name] for place, name in enumerate(names) if name in kinds}


def check_pieces(
    task: Task, model: nn.Module, batch_size: int | None, workers: int | None, pieces: int = 1
) -> None:
    """Raise ValueError if a worker would train on a single example, and the model cannot.

    Every joint batch is divided over the workers, and each share into at most `pieces`, equal to
    within one. The last batch of an epoch has the remainder.
    """
    if task.train.rank_counts is not None:
        # Ranks with data of their own check this after counting their examples.
        return
    examples = len(task.train)
    ranks = workers or 1
    size = examples if batch_size is None else min(batch_size, examples)
    if not _has_one(examples, size, ranks, pieces):
        return
    if not needs_two(model, examples_for(task)[0]):
        return
    nearest = sorted(range(1, examples + 1), key=lambda other: abs(other - size))
    fit = [other for other in nearest[:MOST_TRIED] if not _has_one(examples, other, ranks, pieces)]
    divided = f" over {ranks} workers" if ranks > 1 else ""
    divided += f" in {pieces} pieces" if pieces > 1 else ""
    advice = f"use a batch_size of {' or '.join(map(str, fit[:3]))}" if fit else "use more data"
    raise ValueError(
        f"batch_size {size} divides {examples} examples{divided} so that a step has a single "
        f"example, for which batch norm cannot compute statistics: {advice}"
    )


def check_rank_pieces(
    model: nn.Module, examples: Examples, batch_size: int | None, pieces: int = 1
) -> None:
    """Check the pieces as `check_pieces`, for ranks with data of their own that are counted."""
    if not isinstance(examples, RankExamples):
        return
    size = len(examples) if batch_size is None else batch_size
    shares = examples.parts_of_batches(size)
    alone = any(1 in _parts(share, min(pieces, share)) for share in shares)
    if alone and needs_two(model, examples, examples.first):
        raise ValueError(
            f"with batches of {size}, a step has a single example of a rank, for which batch norm "
            "cannot compute statistics: use another batch_size"
        )


def check_own_batches(
    task: Task, model: nn.Module, batch_size: int | None, workers: int | None, pieces: int = 1
) -> None:
    """Raise ValueError if workers with data of their own have one example a step or in all.

    A single remaining example joins the batch before it; division into `pieces` may still leave a
    single one.
    """
    if pieces > 1 and needs_two(model, examples_for(task)[0], task.train.first):
        raise ValueError(
            f"accumulate={pieces} may leave a single example of a worker in a piece, for which "
            "batch norm cannot compute statistics: use accumulate=1"
        )
    ranks = workers or 1
    lies = task.train.rank_counts
    least = len(task.train) // ranks if lies is None else min(lies)
    own = least if batch_size is None else min(least, -(-batch_size // ranks))
    if own < 2 and needs_two(model, examples_for(task)[0], task.train.first):
        raise ValueError(
            f"each of {ranks} workers has a single example in a step, for which batch norm cannot "
            f"compute statistics: use a batch_size of more than {ranks}, or fewer workers"
        )


def _has_one(examples: int, batch_size: int, ranks: int, pieces: int) -> bool:
    """Return whether any piece has a single example."""
    for batch in (batch_size, examples % batch_size):
        for share in _parts(batch, ranks):
            if share and 1 in _parts(share, min(pieces, share)):
                return True
    return False


def _parts(count: int, among: int) -> set[int]:
    """Return the sizes of the parts of `tensor_split`."""
    return {count // among, -(-count // among)}


def _measures(norm: _BatchNorm) -> bool:
    """Return whether a norm uses the statistics of its own batch alone."""
    # A synchronised norm uses the statistics of all ranks.
    if isinstance(norm, nn.SyncBatchNorm):
        return False
    return norm.training or norm.running_mean is None

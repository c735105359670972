"""Batch norm in training: a batch needs two values a channel, so one example may be too few."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from dure.contracts.strategy import examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.data.nodes import OwnExamples
from dure.machine.compiler import left_out
from dure.machine.devices import to_device

MOST_TRIED = 1_000
"""Batch sizes that are looked at for one that fits, the nearest ones."""


class Batched(Protocol):
    """What gives batches of examples."""

    def batch(self, indices: Tensor) -> tuple[Any, Any]: ...


@torch.no_grad()
def needs_two(model: nn.Module, examples: Batched, first: int = 0) -> bool:
    """Whether the model cannot train on one example alone.

    It has a batch norm that sees a single value a channel then. The model stays as it is. Cost: for
    models with batch norm, a forward pass of one example, the `first`, in evaluation mode.
    """
    # A forward pass would decide the shapes of parameters that have none yet.
    if any(is_lazy(parameter) for parameter in model.parameters()):
        return False
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    # A model may keep some of them as they are in evaluation.
    norms = [one for one in model.modules() if isinstance(one, _BatchNorm) and _measures(one)]
    lone: list[nn.Module] = []

    def look(module: nn.Module, given: Any) -> None:
        (values,) = given
        if values.numel() == values.shape[1]:
            lone.append(module)

    hooks = [one.register_forward_pre_hook(look) for one in norms]
    try:
        model.eval()
        # What else is wrong with the model or the example is said by its first step.
        with suppress(Exception), left_out():
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
    """Where in a list of buffers' names running statistics are, and whether each is a variance."""
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
    """Raises ValueError where a worker would train on one example alone, and the model cannot.

    Every joint batch is divided over the workers, and what each has into at most so many `pieces`,
    equal to within one. The last batch of an epoch has what is left.
    """
    if task.train.lies is not None:
        # How ranks with data of their own divide a batch, they tell when these are counted.
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
    advice = f"take a batch_size of {' or '.join(map(str, fit[:3]))}" if fit else "take more data"
    raise ValueError(
        f"batch_size {size} divides {examples} examples{divided} so that one is alone in a step, "
        f"and batch norm has no statistics of one example: {advice}"
    )


def check_lying(
    model: nn.Module, examples: Examples, batch_size: int | None, pieces: int = 1
) -> None:
    """As `check_pieces`, where ranks have data of their own, which are counted by now."""
    if not isinstance(examples, OwnExamples):
        return
    size = len(examples) if batch_size is None else batch_size
    shares = examples.parts_of_batches(size)
    alone = any(1 in _parts(share, min(pieces, share)) for share in shares)
    if alone and needs_two(model, examples, examples.first):
        raise ValueError(
            f"in batches of {size} a rank has one of its own examples alone in a step, and batch "
            f"norm has no statistics of one example: take another batch_size"
        )


def check_own_batches(
    task: Task, model: nn.Module, batch_size: int | None, workers: int | None, pieces: int = 1
) -> None:
    """Raises ValueError where workers with data of their own have one example a step or in all.

    A rest of one joins the batch before it; into `pieces` it may divide so that one is alone.
    """
    if pieces > 1 and needs_two(model, examples_for(task)[0], task.train.first):
        raise ValueError(
            f"accumulate={pieces} may leave one of a worker's own examples alone in a piece, and "
            f"batch norm has no statistics of one example: take accumulate=1"
        )
    ranks = workers or 1
    lies = task.train.lies
    least = len(task.train) // ranks if lies is None else min(lies)
    own = least if batch_size is None else min(least, -(-batch_size // ranks))
    if own < 2 and needs_two(model, examples_for(task)[0], task.train.first):
        raise ValueError(
            f"each of {ranks} workers has one example in a step, and batch norm has no statistics "
            f"of one example: take a batch_size of more than {ranks}, or fewer workers"
        )


def _has_one(examples: int, batch_size: int, ranks: int, pieces: int) -> bool:
    """Whether some piece is of one example."""
    for batch in (batch_size, examples % batch_size):
        for share in _parts(batch, ranks):
            if share and 1 in _parts(share, min(pieces, share)):
                return True
    return False


def _parts(count: int, among: int) -> set[int]:
    """How large the parts are that `tensor_split` makes."""
    return {count // among, -(-count // among)}


def _measures(norm: _BatchNorm) -> bool:
    """Whether it takes the statistics of its own batch alone."""
    # One that is synchronised has those of all ranks.
    if isinstance(norm, nn.SyncBatchNorm):
        return False
    return norm.training or norm.running_mean is None

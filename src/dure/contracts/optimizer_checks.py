"""Requirements on the optimizer of a task: `step()` takes no arguments.

Every system computes the gradients itself, on all its workers, and then steps. An optimizer that
evaluates the loss again in its step (L-BFGS, SAM) would need the model, the batch and the other
workers, which the closure of a single worker does not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for an object without `step`, a needed closure, or an overflowing rate."""
    if not callable(getattr(optimizer, "step", None)):
        raise ValueError(
            f"the task's optimizer function returned a {type(optimizer).__name__}, which has no "
            "step(): return an optimizer, such as torch.optim.SGD(parameters, lr=0.1)"
        )
    wanted = _needed_by(_step_of(optimizer))
    if wanted:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs {' and '.join(wanted)}: dure does not compute "
            "losses inside a step; use an optimizer whose step needs nothing, such as SGD or Adam"
        )
    for group in getattr(optimizer, "param_groups", ()):
        _check_rate(group.get("lr"), group["params"])


def _step_of(optimizer: Any) -> Any:
    """Return the optimizer's `step` as its author wrote it, bound to the optimizer.

    A schedule of torch replaces `step` by a wrapper of the class's function, whose signature has
    the optimizer itself as an argument.
    """
    own = getattr(optimizer, "__dict__", {}).get("step")
    written = getattr(type(optimizer), "step", None)
    if written is not None and hasattr(own, "__wrapped__"):
        return written.__get__(optimizer)
    return optimizer.step


def _needed_by(step: Any) -> list[str]:
    """Return the names of the required arguments."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]


def _check_rate(rate: Any, parameters: Sequence[nn.Parameter]) -> None:
    if not isinstance(rate, (int, float)):
        return
    dtypes = {one.dtype for one in parameters if one.is_floating_point() or one.is_complex()}
    largest = min((torch.finfo(dtype).max for dtype in dtypes), default=None)
    # A double of this size overflows with the first gradient as well.
    largest = None if largest is None else min(largest, torch.finfo(torch.float32).max)
    if largest is not None and not abs(rate) <= largest:  # NaN is not either
        raise ValueError(
            f"the learning rate is {rate}, so the weights would overflow in the first step: "
            "choose a smaller one"
        )


def checked_optimizer(make: Any, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
    """Return a checked optimizer of copies of the parameters, or None if `make` fails.

    A failure of `make` is reported later with the worker, where the optimizer is made for use. The
    given parameters stay unchanged: `make` gets parameters in the same memory, so that a hook that
    the optimizer registers does not persist. Raises ValueError as `check_optimizer`.
    """
    try:
        made = make([_like(parameter) for parameter in parameters])
    except Exception:
        return None
    check_optimizer(made)
    optimizer: Optimizer = made
    return optimizer


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter in the same memory, with the attributes of the given parameter."""
    like = nn.Parameter(parameter.detach(), parameter.requires_grad)
    like.__dict__.update(vars(parameter))
    return like

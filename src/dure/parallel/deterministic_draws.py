"""Constants in place of random draws, so that two computations of a model can be compared.

Two computations of the same model draw different numbers: a rank with some of the attention heads
has its own dropout masks. For a comparison a drawn value must not depend on the place of an
element. Inside `DeterministicDraws` every element of a draw is therefore the same: a dropout mask
keeps all elements, uniform numbers are the middle of their interval, normal numbers are half a
deviation above their mean, and integers are the smallest possible. The shape of each draw is
recorded, with the seed of the generator.

The mode also records the coarsest floating-point dtype of any result, which determines the
tolerance of the comparison (`dure.parallel.tensor_comparison`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class RecordedDraw(NamedTuple):
    """A recorded random draw.

    seed: the seed of torch's generator at the draw. by: the kind of the module that drew.
    """

    shape: tuple[int, ...]
    seed: int
    by: str


class DeterministicDraws(TorchDispatchMode):
    """Mode in which every random draw of torch, on any device, returns a constant.

    drawn: the draws of floating-point numbers and masks, in order. computed_in: the coarsest
    floating-point dtype of any result. Draws of operations that `CONSTANT_DRAWS` does not list,
    such as `multinomial`, come from the generator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[RecordedDraw] = []
        self.computed_in: torch.dtype | None = None
        self._dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(function)
        if kind == "attention":
            # The backward operation has the same dropout argument, and must keep all as well.
            args, kwargs = _without_dropout(function, args, kwargs)
        result = function(*args, **kwargs)
        if kind == "draw":
            result = self._settle(function, args, kwargs, result)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype not in self._dtypes:
                self._see(tensor.dtype)
        return result

    def _see(self, dtype: torch.dtype) -> None:
        self._dtypes.add(dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            return
        real = dtype.to_real()
        if self.computed_in is None or torch.finfo(real).eps > torch.finfo(self.computed_in).eps:
            self.computed_in = real

    def _settle(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        drawn = result[0] if isinstance(result, tuple) else result
        if drawn.is_floating_point() or drawn.dtype == torch.bool:
            seed = torch.default_generator.initial_seed()
            self.drawn.append(RecordedDraw(tuple(drawn.shape), seed, _module_at_work()))
        return CONSTANT_DRAWS[_name(function)](args, kwargs, result)


def _module_at_work() -> str:
    """Return the kind of the innermost module whose method is running; draws are few."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return f"a {type(owner).__name__}"
        frame = frame.f_back
    return "no module"


def _name(function: Any) -> str:
    """Return an operation's name without the final underscore of in-place variants."""
    name: str = function._schema.name.removeprefix("aten::")
    return name.removesuffix("_")


@cache
def _kind(function: Any) -> Literal["draw", "attention", "other"]:
    if not isinstance(function, torch._ops.OpOverload):
        return "other"
    if any(argument.name == "dropout_p" for argument in function._schema.arguments):
        return "attention"
    draws = torch.Tag.nondeterministic_seeded in function.tags and _name(function) in CONSTANT_DRAWS
    return "draw" if draws else "other"


def _without_dropout(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p" and place < len(args):
            return (*args[:place], 0.0, *args[place + 1 :]), kwargs
    return args, {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs


def _numbers(args: Sequence[Any], kwargs: dict[str, Any], *usual: tuple[str, float]) -> list[float]:
    """Return a draw's parameters after the first argument, by position or name, or defaults.

    A parameter that is a tensor counts as its default.
    """
    found = []
    for place, (name, otherwise) in enumerate(usual, start=1):
        value = kwargs.get(name, args[place] if place < len(args) else otherwise)
        found.append(float(value) if isinstance(value, (int, float)) else otherwise)
    return found


def _bernoulli(args: Any, kwargs: Any, result: Tensor) -> Tensor:
    if not result.is_floating_point():
        return result.fill_(1)
    # The probability itself, by which dropout divides: nothing is scaled then.
    share = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if result is args[0] else args[0])
    return result.copy_(share) if isinstance(share, Tensor) else result.fill_(share)


def _uniform(args: Any, kwargs: Any, result: Tensor) -> Tensor:
    low, high = _numbers(args, kwargs, ("from", 0.0), ("to", 1.0))
    return result.fill_((low + high) / 2)


def _normal(args: Any, kwargs: Any, result: Tensor) -> Tensor:
    mean, deviation = _numbers(args, kwargs, ("mean", 0.0), ("std", 1.0))
    return result.fill_(mean + deviation / 2)


def _dropout(args: Any, kwargs: Any, result: Any) -> Any:
    outputs, mask = result
    _, share, trains = args
    if trains and share < 1:
        # As its gradient is scaled.
        outputs.copy_(args[0]).div_(1 - share)
        mask.fill_(True)
    return outputs, mask


def _smallest(args: Any, kwargs: Any, result: Tensor) -> Tensor:
    # randint(low, high, size), randint(high, size); random_(from, to), random_(to), random_()
    numbers = [value for value in args if isinstance(value, int)]
    return result.fill_(numbers[0] if len(numbers) > 1 else 0)


CONSTANT_DRAWS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "bernoulli": _bernoulli,
    "native_dropout": _dropout,
    "rand": lambda args, kwargs, result: result.fill_(0.5),
    "rand_like": lambda args, kwargs, result: result.fill_(0.5),
    "uniform": _uniform,
    "randn": lambda args, kwargs, result: result.fill_(0.5),
    "randn_like": lambda args, kwargs, result: result.fill_(0.5),
    "normal": _normal,
    "exponential": lambda args, kwargs, result: result.fill_(1.0),
    "randint": _smallest,
    "randint_like": _smallest,
    "random": _smallest,
    "randperm": lambda args, kwargs, result: result.copy_(torch.arange(len(result))),
}
"""Functions of an operation's arguments and result that return the constant, by operation."""

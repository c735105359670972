"""Effects of a model that a trace would lose, detected during tracing.

A module with such an effect becomes a single operation of the trace
(`dure.parallel.pipeline.leaf_modules`). The model is rejected if it has the effect itself, or if a
module draws numbers from unseeded generators.

    custom gradients      `torch.autograd.Function`, and hooks on tensors: a trace has forward's
                          operations, from which backward is derived. So a gradient reversal or a
                          straight-through gradient would be lost
    numbers drawn         from the generators of Python and numpy: a trace has the numbers of
                          the time of tracing

Gradients matter in training alone. State that forward stores in Python is not detected here but by
comparing passes (`dure.parallel.pipeline.proof`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy
from torch import Tensor, nn
from torch.autograd import Function

from dure.parallel.pipeline.model_location import modules_here, place_here, place_where

_TRIES = 3
"""Number of passes that must all draw before the model is considered the one that draws."""

TRACING = ("torch._dynamo.", "torch._functorch.", "torch._library.")
"""Modules in which torch defines its tracing functions, and functions of custom operations, which a
trace contains unchanged.
"""


class SideEffect(NamedTuple):
    """Effect that a trace loses: its description, as the end of a sentence, and its modules.

    modules: the modules whose code causes the effect, the innermost last; empty if the model must
    be rejected.
    """

    said: str
    modules: list[str]


@contextmanager
def record_side_effects(model: nn.Module, inputs: Any) -> Iterator[list[SideEffect]]:
    """Context manager: append to the returned list each effect that a trace of the model loses."""
    found: list[SideEffect] = []
    # Draws from Python and numpy are detected by comparing states before and after.
    before = unseeded_state()
    with ExitStack() as patches:
        # Evaluation has no backward, so custom gradients do not matter.
        if model.training:
            for kind in set(_kinds(Function)):
                # only the class that defines forward; an inherited forward is replaced there
                if "forward" in vars(kind) and not kind.__module__.startswith(TRACING):
                    patches.enter_context(
                        _replaced(kind, "forward", staticmethod(_noticed(kind, model, found)))
                    )
            patches.enter_context(_replaced(Tensor, "register_hook", _hooked(model, found)))
        yield found
    if unseeded_state() != before and _draws(model, inputs):
        now = unseeded_state()
        # Run once more, on the inputs themselves, to find the position.
        place = place_where(lambda: unseeded_state() != now, lambda: model(inputs), model)
        said = (
            f"it draws random numbers from Python or numpy ({place}), which a trace would repeat; "
            "draw them from torch"
        )
        # These generators are not seeded, so such draws are rejected in any module.
        found.insert(0, SideEffect(said, []))


@contextmanager
def _replaced(kind: type[Any], name: str, method: Any) -> Iterator[None]:
    """Context manager: replace a method of a class."""
    before = vars(kind)[name]
    setattr(kind, name, method)
    try:
        yield
    finally:
        setattr(kind, name, before)


def _kinds(of: type[Function]) -> Iterator[type[Function]]:
    for kind in of.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _noticed(kind: type[Function], model: nn.Module, found: list[SideEffect]) -> Callable[..., Any]:
    forward: Callable[..., Any] = kind.forward

    def noticed(*arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        if any(isinstance(each, Tensor) and each.requires_grad for each in given):
            said = (
                f"it calls {kind.__name__}, a torch.autograd.Function{_here(model)}, whose "
                "backward is not in a trace; write it with operations alone, such as x + (y - "
                "x).detach() for the value of y with the gradient of x"
            )
            found.append(SideEffect(said, modules_here(model)))
        return forward(*arguments, **named)

    return noticed


def _hooked(model: nn.Module, found: list[SideEffect]) -> Callable[..., Any]:
    register: Callable[..., Any] = Tensor.register_hook

    def hooked(tensor: Tensor, hook: Any) -> Any:
        said = (
            f"it registers a hook on a tensor{_here(model)}, which is not in a trace; do not use "
            "one"
        )
        found.append(SideEffect(said, modules_here(model)))
        return register(tensor, hook)

    return hooked


def _draws(model: nn.Module, inputs: Any) -> bool:
    """Return whether the model itself draws in every pass, not another thread now and then."""
    for _ in range(_TRIES):
        before = unseeded_state()
        model(inputs)
        if unseeded_state() == before:
            return False
    return True


def unseeded_state() -> tuple[object, ...]:
    """Return the state of the generators of Python and numpy, which a trace does not contain."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


def _here(model: nn.Module) -> str:
    place = place_here(model)
    return f" ({place})" if place else ""

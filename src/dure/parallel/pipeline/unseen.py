"""What a model does that a trace would lose: seen while it is traced, and then refused.

    gradients of its own  `torch.autograd.Function`, and hooks on tensors: a trace has what forward
                          computes, from which backward is derived; a gradient that was to be
                          reversed, or to pass a rounding, would not be
    numbers drawn         from the generators of Python and numpy: a trace has those that were drawn
                          when it was made

Gradients matter in training alone. What forward keeps in Python is tried, and not seen here
(`dure.parallel.pipeline.proof`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
from torch import Tensor, nn
from torch.autograd import Function

from dure.parallel.pipeline.place import place_here, place_where

_TRIES = 3
"""Passes in all of which something is drawn, until the model is said to draw it."""

TRACING = ("torch._dynamo.", "torch._functorch.", "torch._library.")
"""Where torch has functions with which it traces, and those of custom operations, which a trace has
as they are."""


@contextmanager
def unseen(model: nn.Module, inputs: Any) -> Iterator[list[str]]:
    """Inside, what a trace of the model loses is put on the list, each as the end of a sentence."""
    found: list[str] = []
    # What a trace cannot have is seen by comparing before and after.
    drawn = _drawn()
    with ExitStack() as patches:
        # In evaluation nobody goes backward, so own gradients do not matter.
        if model.training:
            for kind in set(_kinds(Function)):
                # a forward of its own, not an inherited one, which is replaced where it is defined
                if "forward" in vars(kind) and not kind.__module__.startswith(TRACING):
                    patches.enter_context(
                        _replaced(kind, "forward", staticmethod(_noticed(kind, model, found)))
                    )
            patches.enter_context(_replaced(Tensor, "register_hook", _hooked(model, found)))
        yield found
    if _drawn() != drawn and _draws(model, inputs):
        now = _drawn()
        # Once more, on the inputs themselves, to say where.
        place = place_where(lambda: _drawn() != now, lambda: model(inputs), model)
        found.append(
            f"it draws random numbers from Python or numpy ({place}), which a trace would repeat; "
            "draw them from torch"
        )


@contextmanager
def _replaced(kind: type[Any], name: str, method: Any) -> Iterator[None]:
    """A method of a class, for the time inside."""
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


def _noticed(kind: type[Function], model: nn.Module, found: list[str]) -> Callable[..., Any]:
    forward: Callable[..., Any] = kind.forward

    def noticed(*arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        if any(isinstance(each, Tensor) and each.requires_grad for each in given):
            found.append(
                f"it calls {kind.__name__}, a torch.autograd.Function{_here(model)}, whose "
                "backward a trace does not have; write it with operations alone, such as "
                "x + (y - x).detach() for the value of y with the gradient of x"
            )
        return forward(*arguments, **named)

    return noticed


def _hooked(model: nn.Module, found: list[str]) -> Callable[..., Any]:
    register: Callable[..., Any] = Tensor.register_hook

    def hooked(tensor: Tensor, hook: Any) -> Any:
        found.append(
            f"it registers a hook on a tensor{_here(model)}, which a trace does not have; do "
            "without it"
        )
        return register(tensor, hook)

    return hooked


def _draws(model: nn.Module, inputs: Any) -> bool:
    """Whether it is the model that draws, in every pass, and not another thread, now and then."""
    for _ in range(_TRIES):
        before = _drawn()
        model(inputs)
        if _drawn() == before:
            return False
    return True


def _drawn() -> tuple[object, ...]:
    """The state of the generators that a trace does not know."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


def _here(model: nn.Module) -> str:
    place = place_here(model)
    return f" ({place})" if place else ""

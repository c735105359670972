"""What a model does that a trace would lose: seen while it is traced.

The module that does it becomes one operation of the trace (`dure.parallel.pipeline.whole`); where
it is the model itself, or draws numbers that nobody seeds, the model is refused.

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
from typing import Any, NamedTuple

import numpy
from torch import Tensor, nn
from torch.autograd import Function

from dure.parallel.pipeline.place import modules_here, place_here, place_where

_TRIES = 3
"""Passes in all of which something is drawn, until the model is said to draw it."""

TRACING = ("torch._dynamo.", "torch._functorch.", "torch._library.")
"""Where torch has functions with which it traces, and those of custom operations, which a trace has
as they are."""


class Lost(NamedTuple):
    """What a trace loses: said as the end of a sentence, and the modules in whose code it is.

    modules: the innermost last; none where no module may do so.
    """

    said: str
    modules: list[str]


@contextmanager
def unseen(model: nn.Module, inputs: Any) -> Iterator[list[Lost]]:
    """Inside, what a trace of the model loses is put on the list."""
    found: list[Lost] = []
    # What a trace cannot have is seen by comparing before and after.
    before = drawn()
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
    if drawn() != before and _draws(model, inputs):
        now = drawn()
        # Once more, on the inputs themselves, to say where.
        place = place_where(lambda: drawn() != now, lambda: model(inputs), model)
        said = (
            f"it draws random numbers from Python or numpy ({place}), which a trace would repeat; "
            "draw them from torch"
        )
        # Nobody seeds these generators: such draws are refused wherever they are.
        found.insert(0, Lost(said, []))


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


def _noticed(kind: type[Function], model: nn.Module, found: list[Lost]) -> Callable[..., Any]:
    forward: Callable[..., Any] = kind.forward

    def noticed(*arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        if any(isinstance(each, Tensor) and each.requires_grad for each in given):
            said = (
                f"it calls {kind.__name__}, a torch.autograd.Function{_here(model)}, whose "
                "backward a trace does not have; write it with operations alone, such as "
                "x + (y - x).detach() for the value of y with the gradient of x"
            )
            found.append(Lost(said, modules_here(model)))
        return forward(*arguments, **named)

    return noticed


def _hooked(model: nn.Module, found: list[Lost]) -> Callable[..., Any]:
    register: Callable[..., Any] = Tensor.register_hook

    def hooked(tensor: Tensor, hook: Any) -> Any:
        said = (
            f"it registers a hook on a tensor{_here(model)}, which a trace does not have; do "
            "without it"
        )
        found.append(Lost(said, modules_here(model)))
        return register(tensor, hook)

    return hooked


def _draws(model: nn.Module, inputs: Any) -> bool:
    """Whether it is the model that draws, in every pass, and not another thread, now and then."""
    for _ in range(_TRIES):
        before = drawn()
        model(inputs)
        if drawn() == before:
            return False
    return True


def drawn() -> tuple[object, ...]:
    """The state of the generators that a trace does not know."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


def _here(model: nn.Module) -> str:
    place = place_here(model)
    return f" ({place})" if place else ""

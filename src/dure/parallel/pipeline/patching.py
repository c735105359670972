"""Temporary replacement of a module's function: of its forward, or of its whole call.

A call of a module may do more than forward: run hooks, or a checkpoint that the module's class puts
around forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

Function = Callable[..., Any]

Around = Callable[[str, Function], Function]
"""Function that takes a module's name and its function, and returns the replacement."""


@contextmanager
def patched_modules(
    model: nn.Module, names: Iterable[str], around: Around, entirely: Collection[str] = ()
) -> Iterator[None]:
    """Context manager: functions made by `around` replace these modules' functions.

    entirely: modules of which the call is replaced, not forward alone.
    """
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            kind = _for_calls if name in entirely else _for_forward
            stack.enter_context(kind(module, partial(around, name)))
        yield


@contextmanager
def _for_forward(module: nn.Module, around: Callable[[Function], Function]) -> Iterator[None]:
    # The instance may have its own forward already, set by the model's code.
    before = vars(module).get("forward")
    module.forward = around(module.forward)
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def _for_calls(module: nn.Module, around: Callable[[Function], Function]) -> Iterator[None]:
    kind = type(module)
    instead = around(partial(kind.__call__, module))

    def call(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return instead(*args, **kwargs)

    # Python looks for `__call__` in the class alone.
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    try:
        yield
    finally:
        module.__class__ = kind

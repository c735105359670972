"""Language models without the cache of keys and values that they keep for generating.

Hugging Face's models give it beside their scores if their config says `use_cache`, as it does by
default. Training needs none, and it is an object that no trace has. So a model is traced, and run
beside its trace, as if it was called with use_cache=False. Its config stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

NAME = "use_cache"


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Call the model, and models in it, with use_cache=False, unless a caller says otherwise."""
    handles = [
        module.register_forward_pre_hook(partial(_unless_said, place), with_kwargs=True)
        for module in model.modules()
        if (place := _place(module)) is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _place(module: nn.Module) -> int | None:
    """The place of the argument in the module's forward; None where nothing is cached."""
    if not getattr(getattr(module, "config", None), NAME, False):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return names.index(NAME) if NAME in names else None


def _unless_said(
    place: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    said = NAME in named or len(given) > place
    return given, named if said else {**named, NAME: False}

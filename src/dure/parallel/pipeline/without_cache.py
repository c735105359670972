"""Language models without the cache of keys and values that they store for generation.

Hugging Face's models return the cache beside their scores if their config has `use_cache`, which is
the default. Training needs no cache, and a trace cannot contain that object. So a model is traced,
and compared with its trace, as if it were called with use_cache=False. Its config is unchanged.
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
    """Context manager: the model and models in it are called with use_cache=False by default."""
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
    """Return the position of the argument in the module's forward; None if nothing is cached."""
    if not getattr(getattr(module, "config", None), NAME, False):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return names.index(NAME) if NAME in names else None


def _unless_said(
    place: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    said = NAME in named or len(given) > place
    return given, named if said else {**named, NAME: False}

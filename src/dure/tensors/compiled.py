"""Compiled models under the names of the models themselves.

`torch.compile(module)` puts a module around the module, so that everything in it is called
`_orig_mod.` and something: in weights, updates and plans, which then fit no model but a compiled
one. What is compiled can also be the way a module is called (`nn.Module.compile`): the same
computation, and no name changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def under_own_names(model: nn.Module) -> nn.Module:
    """The model, in which what was compiled stands in its own place, and is called as compiled.

    Raises ValueError for a hook on what `torch.compile` returned, which would be lost.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    # Not imported: whoever has compiled a module has loaded the compiler.
    if frames is None:
        return model
    wrapper: type[nn.Module] = frames.OptimizedModule
    for place in list(model.modules()):
        for name, child in place._modules.items():
            # Its own child stays where it is: a module that was taken out may still be called so.
            if isinstance(child, wrapper) and not isinstance(place, wrapper):
                place._modules[name] = _unwrapped(child)
    return _unwrapped(model) if isinstance(model, wrapper) else model


def compiled_as(model: nn.Module, how: bool | str) -> nn.Module:
    """The model, from now on called as torch's compiler has it, if `how` says so.

    how: whether, or by which of its backends. What it compiles is done at the first call.
    """
    if how is True:
        model.compile()
    elif how:
        model.compile(backend=how)
    return model


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Inside, no module of the model is called as compiled.

    For counting by a mode of torch's dispatcher: the compiler leaves alone for good what it has met
    under one.
    """
    compiled = {module: module._compiled_call_impl for module in model.modules()}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, called in compiled.items():
            module._compiled_call_impl = called


def _unwrapped(compiled: Any) -> nn.Module:
    """The module inside, which from now on is called as compiled."""
    for hooks in _HOOKS:
        if vars(compiled)[hooks]:
            raise ValueError(
                "the model has a hook on what torch.compile returned, in which names begin with "
                "_orig_mod: register the hook on the module before it is compiled"
            )
    module: nn.Module = compiled._orig_mod
    # As `nn.Module.compile` does it, with the backend and the options that were chosen.
    module._compiled_call_impl = compiled.dynamo_ctx(module._call_impl)
    return module

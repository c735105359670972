"""Compiled models under the parameter names of the uncompiled models.

`torch.compile(module)` wraps the module, so that every name in weights, updates and plans begins
with `_orig_mod.` and fits compiled models only. `nn.Module.compile` instead compiles the call of
the module: the same computation, without a change of names.
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


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the model with each `torch.compile` wrapper replaced by its compiled-in-place module.

    Raises ValueError for a hook on a wrapper, because the hook would be lost.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    # No import: a compiled module implies that the compiler is loaded.
    if frames is None:
        return model
    wrapper: type[nn.Module] = frames.OptimizedModule
    for place in list(model.modules()):
        for name, child in place._modules.items():
            # A wrapper keeps its child: the caller may still hold and call the wrapper.
            if isinstance(child, wrapper) and not isinstance(place, wrapper):
                place._modules[name] = _unwrapped(child)
    return _unwrapped(model) if isinstance(model, wrapper) else model


def compile_in_place(model: nn.Module, how: bool | str) -> nn.Module:
    """Compile the calls of the model in place if `how` says so, and return the model.

    how: True for the default backend, a backend's name, or False. Compilation happens at the first
    call.
    """
    if how is True:
        model.compile()
    elif how:
        model.compile(backend=how)
    return model


@contextmanager
def without_compilation(model: nn.Module) -> Iterator[None]:
    """Context manager: no module of the model runs compiled inside.

    Used to count operations with a mode of torch's dispatcher: the compiler permanently skips code
    that the compiler first meets under such a mode.
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
    """Return the module inside the wrapper, compiled in place with the wrapper's options."""
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

"""Recomputation: a module's activations are not stored, but computed again for backward.

    forward    y = f(x); only x is stored
    backward   f(x) is computed again with its activations, and then its gradients

The cost is another forward pass of the module; the gain is the memory of its activations, except
the inputs. A step has the same bits as without recomputation, if forward reads the same values:

    random numbers     torch's generators are reset to the first computation, and restored after it
    buffers            buffers that forward writes are reset to their earlier values, and restored
                       after it: batch norm's statistics are updated once
    inputs             must be unchanged: an input that was changed in place is an error

Other state of a module, such as a counter, is not reset; `dure.parallel.learner_recomputation`
tests for it.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the mechanism is torch's
`torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from dure.machine.compiler import deferred_compiler, load_compiler_settings


def recompute_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Recompute the modules of these names in backward, from now on.

    The names in the model, its hooks, and evaluations do not change. A copy of the model stores its
    activations. Raises ValueError for a compiled module, and AttributeError for an unknown name.
    """
    for name in names:
        module = model.get_submodule(name)
        if module._compiled_call_impl is not None:
            raise ValueError(
                f"module {name} is compiled, and the compiler decides what it recomputes: leave "
                "it out"
            )
        # In the same way `nn.Module.compile` replaces the call of a module, with its hooks.
        module._compiled_call_impl = _Again(name, module)


class _Again:
    """Call of a module that is recomputed in backward. name: for errors."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.buffers = _Written(name, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # There is no backward pass.
        if not torch.is_grad_enabled():
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        # As leaves, so that autograd saves each tensor and checks its version.
        leaves, form = tree_flatten((args, kwargs))

        def call(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(list(leaves), form)
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        with deferred_compiler():
            load_compiler_settings()
            return checkpoint(call, *leaves, use_reentrant=False, context_fn=self.buffers.contexts)


class _Written:
    """Buffers of a module that its forward pass writes.

    They are found in the first pass by comparison: batch norm writes without changing versions.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.names: list[str] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for the first computation and for the recomputation."""
        before = _Values(self.module, self.names)
        return self._first(before), self._second(before)

    @contextmanager
    def _first(self, before: _Values) -> Iterator[None]:
        yield
        if self.names is None:
            self.names = before.changed()
            before.keep_only(self.names)
        elif before.others_changed():
            raise RuntimeError(
                f"module {self.name} writes a buffer in this step that it did not write in its "
                "first one: it cannot be recomputed, leave it out"
            )

    @contextmanager
    def _second(self, before: _Values) -> Iterator[None]:
        now = _Values(self.module, self.names)
        before.put_back()
        try:
            yield
        finally:
            now.put_back()


class _Values:
    """State of a module's buffers: the tensors, and the values of some.

    names: buffers whose values are stored; None is all.
    """

    def __init__(self, module: nn.Module, names: Sequence[str] | None) -> None:
        # The tensors too: a forward pass may replace a buffer's tensor.
        self.places = [
            (f"{path}.{own}", place, own, tensor)
            for path, place in module.named_modules()
            for own, tensor in place._buffers.items()
        ]
        self.versions = [None if tensor is None else tensor._version for *_, tensor in self.places]
        self.copies: dict[str, Tensor] = {
            name: tensor.detach().clone()
            for name, _, _, tensor in self.places
            if tensor is not None and (names is None or name in names)
        }

    def changed(self) -> list[str]:
        """Return the names of the buffers whose values have changed; all values must be stored."""
        return [
            name
            for name, _, _, tensor in self.places
            if tensor is not None and not _same(tensor, self.copies[name])
        ]

    def keep_only(self, names: Sequence[str]) -> None:
        self.copies = {name: self.copies[name] for name in names}

    def others_changed(self) -> bool:
        """Return whether a buffer without a stored value was written, by torch's versions."""
        return any(
            tensor is not None and name not in self.copies and tensor._version != version
            for (name, _, _, tensor), version in zip(self.places, self.versions, strict=True)
        )

    def put_back(self) -> None:
        """Restore the stored tensors and values of the buffers."""
        for name, place, own, tensor in self.places:
            place._buffers[own] = tensor
            if name in self.copies:
                assert tensor is not None
                # Through `data`, which autograd does not see: it would refuse to use a saved buffer
                # that was written later.
                tensor.data.copy_(self.copies[name])


def _same(one: Tensor, other: Tensor) -> bool:
    # Without data a comparison is impossible: the buffer counts as written.
    return type(one) is Tensor and torch.equal(one, other)

"""Recomputation: a module's activations are not kept, but computed once more for backward.

    forward    y = f(x), of which x alone is kept
    backward   f(x) once more, with what autograd keeps of it; then its gradients

It costs one more forward pass of the module, and saves what it keeps, but for its inputs. The bits
are those of a step without it. So what forward reads must be what it was the first time:

    random numbers     torch's generators are put back to where they were, and after it forward
    buffers            those that forward writes are put back to what they were, and after it to
                       what they are now: batch norm's statistics are updated once
    inputs             are still what they were: one that was changed in place is an error

What a module keeps elsewhere, such as a counter, is not put back: whoever wants to know tries
(`dure.parallel.recomputing`).

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

from dure.machine.compiler import left_out, settings_alone


def compute_again(model: nn.Module, names: Sequence[str]) -> None:
    """From now on the modules of these names are computed once more for backward.

    Nothing else changes: not the names in the model, its hooks, or evaluations. A copy of the model
    keeps its activations. Raises ValueError for a module that is compiled, or is not there.
    """
    for name in names:
        module = model.get_submodule(name)
        if module._compiled_call_impl is not None:
            raise ValueError(
                f"module {name} is compiled, and the compiler decides what it computes again: "
                f"leave it out"
            )
        # As `nn.Module.compile` takes over the call of a module, with its hooks.
        module._compiled_call_impl = _Again(name, module)


class _Again:
    """A module's call that is computed once more for backward. name: for errors."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.buffers = _Written(name, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Nobody goes backward.
        if not torch.is_grad_enabled():
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        # As leaves, so that each tensor is kept as autograd keeps its own, and compared.
        leaves, form = tree_flatten((args, kwargs))

        def call(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(list(leaves), form)
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        with left_out():
            settings_alone()
            return checkpoint(call, *leaves, use_reentrant=False, context_fn=self.buffers.contexts)


class _Written:
    """The buffers of a module that its forward pass writes.

    They are found in its first pass, by comparing: batch norm writes its own unseen.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.names: list[str] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What surrounds the first computation, and the second."""
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
                f"first one: it cannot be computed again, leave it out"
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
    """The buffers of a module as they are now: which tensors, and the values of some.

    names: those whose values are kept; None is all.
    """

    def __init__(self, module: nn.Module, names: Sequence[str] | None) -> None:
        # The tensors too: a forward pass may put another one in a buffer's place.
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
        """The names of those whose values are others by now, where all are kept."""
        return [
            name
            for name, _, _, tensor in self.places
            if tensor is not None and not _same(tensor, self.copies[name])
        ]

    def keep_only(self, names: Sequence[str]) -> None:
        self.copies = {name: self.copies[name] for name in names}

    def others_changed(self) -> bool:
        """Whether one was written whose values are not kept, as far as torch has seen it."""
        return any(
            tensor is not None and name not in self.copies and tensor._version != version
            for (name, _, _, tensor), version in zip(self.places, self.versions, strict=True)
        )

    def put_back(self) -> None:
        """The buffers are what they were when this was made."""
        for name, place, own, tensor in self.places:
            place._buffers[own] = tensor
            if name in self.copies:
                assert tensor is not None
                # By way of data, which autograd does not see: it would refuse a backward pass that
                # has kept a buffer which was written since.
                tensor.data.copy_(self.copies[name])


def _same(one: Tensor, other: Tensor) -> bool:
    # Without data nobody can tell: then it counts as written.
    return type(one) is Tensor and torch.equal(one, other)

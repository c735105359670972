"""Selection of the modules that are a single operation of a trace, because they cannot be traced.

A trace is attempted. If it fails, the innermost user-defined module whose code is the reason
becomes a single operation, together with all modules of its class: a router with its experts, in
every layer. Its outputs must have the same form for other examples; otherwise the enclosing module
is taken. Then the trace is attempted again. A module that skips blocks at random
(`dure.parallel.pipeline.layer_drop`) is traced, and its blocks are operations.

A model that cannot be traced in its own code, outside of all modules, is rejected. Modules that are
divided over tensor neighbours cannot be inside such an operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from dure.parallel.pipeline.layer_drop import (
    BlockChooser,
    Decisions,
    always,
    find_chooser,
    record_decisions,
)
from dure.parallel.pipeline.observation import is_steady, observe_calls
from dure.parallel.pipeline.opaque_modules import (
    Decision,
    ObservedCall,
    OpaqueBlock,
    UntraceableError,
    as_single_operations,
)
from dure.parallel.tensor.divided import DividedLayer


class LeafModules:
    """Modules of a model that are a single operation. reasons: the reason by module name."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._entirely: set[str] = set()
        self._choosers: dict[str, BlockChooser] = {}
        self._no_choosers: set[str] = set()
        self._closed = False

    def close(self) -> None:
        """Forbid trials of modules' choices: parameters may be freed from now on."""
        self._closed = True

    def said(self) -> str:
        """Return the modules that are not cut, after a semicolon; "" if there are none."""
        if not self.reasons:
            return ""
        name, why = next(iter(self.reasons.items()))
        others = len(self.reasons) - 1
        more = f" and {others} more modules are" if others else " is"
        return f"; module {name}{more} one operation, for {why}"

    def widen(self, model: nn.Module, inputs: Any, error: UntraceableError) -> bool:
        """Make another module, and all of its class, single operations; return False if none."""
        for name in reversed(error.modules):
            if self._is_chooser(model, inputs, name, error):
                return True
            if not name or not _is_users(model.get_submodule(name)):
                continue
            if name in self.reasons and name not in self._entirely:
                # The reason is outside its forward, for example a hook.
                self._entirely.update(_alike(model, name))
                return True
            if name not in self.reasons and is_steady(model, inputs, _alike(model, name)):
                self._add(model, name, error.said)
                return True
        return False

    def _is_chooser(
        self, model: nn.Module, inputs: Any, name: str, error: UntraceableError
    ) -> bool:
        """Return whether a module, not yet known to, skips blocks at random."""
        innermost = name == error.modules[-1]
        known = name in self._choosers or name in self._no_choosers
        if self._closed or known or not innermost or not error.of_data:
            return False
        found = find_chooser(model, inputs, name)
        if found is None:
            self._no_choosers.add(name)
            return False
        self._choosers[name] = found
        for block, _ in found.guards:
            self.reasons.setdefault(block, error.said)
        return True

    def _add(self, model: nn.Module, name: str, said: str) -> None:
        for other in _alike(model, name):
            self.reasons.setdefault(other, said)
        for other in self.reasons:
            inside = model.get_submodule(other).modules()
            if any(isinstance(module, DividedLayer) for module in inside):
                raise ValueError(
                    f"module {other} cannot be traced, and layers in it are divided over tensor "
                    f"neighbours: divide other layers, or use one stage; {said}"
                )

    @contextmanager
    def hidden(self, model: nn.Module, inputs: Any) -> Iterator[list[OpaqueBlock]]:
        """Context manager: these modules are operations of a trace; yields their blocks."""
        if not self.reasons:
            yield []
            return
        with ExitStack() as stack:
            asked = [
                (one, Decisions(model.get_submodule(one.name), partial(always, one.called_if)))
                for one in self._choosers.values()
            ]
            stack.enter_context(record_decisions([decisions for _, decisions in asked]))
            # Observe with the outcomes of the trace, so that all blocks are called.
            calls = observe_calls(model, inputs, self.reasons, self._entirely)
            for _, decisions in asked:
                decisions.forget()
            yield stack.enter_context(
                as_single_operations(model, calls, _Guards(asked), self._entirely)
            )


class _Guards:
    """Function that returns the decision on which a call depends."""

    def __init__(self, asked: list[tuple[BlockChooser, Decisions]]) -> None:
        self._asked = asked
        self._counts: dict[str, int] = {}

    def __call__(self, call: ObservedCall) -> Decision | None:
        number = self._counts[call.name] = self._counts.get(call.name, -1) + 1
        for one, decisions in self._asked:
            # Evaluation makes no decisions.
            if (call.name, number) in one.guards and decisions.values:
                # Use the latest decision: a model may make fewer decisions while it is traced.
                return Decision(decisions.values[-1], one.skip, one.called_if)
        return None


def _alike(model: nn.Module, name: str) -> list[str]:
    """Return the names of all modules of the same class."""
    kind = type(model.get_submodule(name))
    return [other for other, module in model.named_modules() if other and type(module) is kind]


def _is_users(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.")

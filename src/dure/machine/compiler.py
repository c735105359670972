"""Keep torch's compiler unloaded in processes that compile nothing.

The first optimizer of a process, and its first step, import torch._dynamo only to exclude functions
from compilation (`torch._dynamo.disable`). The import takes seconds in every rank, longer than the
import of torch. `deferred_compiler` installs a stand-in for the module. The stand-in accepts calls
of `disable` and does nothing. Access to any other attribute replaces the stand-in by the real
module, so that code that compiles gets the compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_NAME = "torch._dynamo"
_SETTINGS = "torch._dynamo.config"
_DISABLED = "__dynamo_disable"
"""Attribute by which torch caches the result of `disable` for a function."""

_lock = threading.RLock()
_users = 0


class _StandIn(ModuleType):
    """Stand-in for torch._dynamo, which loads the real module on demand.

    The stand-in has the attributes that torch's own code uses when nothing is compiled.
    """

    def __init__(self) -> None:
        super().__init__(_NAME)
        self._excluded: list[Any] = []
        self.config: ModuleType

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, since nothing is traced."""

    def disable(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Return the function unchanged; further arguments are ignored."""
        # torch caches the result as an attribute of the function, which `leave` removes.
        self._excluded.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        # Much code reads `__file__` and the like of all modules without any intent to compile. An
        # import of a submodule reads `__path__`, and needs the real module.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(self._loaded(), name)

    def _loaded(self) -> ModuleType:
        """Import the real module in place of the stand-in."""
        with _lock:
            # Removed first: the import would find this stand-in again.
            self.leave()
            return importlib.import_module(_NAME)

    def leave(self) -> None:
        """Remove the stand-in from `sys.modules`, and its results of `disable` from functions."""
        with _lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
            # The real compiler loads its own settings.
            if "config" in vars(self):
                del sys.modules[_SETTINGS]
                del self.config
            for function in self._excluded:
                # Only attributes that come from the stand-in: torch then calls the real `disable`.
                if getattr(function, _DISABLED, None) is function:
                    delattr(function, _DISABLED)
            self._excluded.clear()


def load_compiler_settings() -> None:
    """Load the compiler's settings without the compiler; called inside `deferred_compiler`.

    torch's fake tensors read two of the settings and nothing else of the compiler.
    """
    with _lock:
        module = sys.modules.get(_NAME)
        if not isinstance(module, _StandIn) or "config" in vars(module):
            return
        file = Path(torch.__file__).parent / "_dynamo" / "config.py"
        spec = importlib.util.spec_from_file_location(_SETTINGS, file)
        # Another torch version may have the settings elsewhere: the compiler then loads them.
        if not file.exists() or spec is None or spec.loader is None:
            return
        module.config = sys.modules[_SETTINGS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module.config)


def excluded_from_compilation(function: Function) -> Function:
    """Return the function, excluded from compilation if the compiler is loaded.

    Callers pass the hooks of modules: the compiler traces a compiled module together with the hooks
    of the module, unless they are excluded. Modules are compiled before hooks are registered.
    """
    # No module is compiled yet if the compiler is not loaded: nothing to exclude.
    if isinstance(sys.modules.get(_NAME, _StandIn()), _StandIn):
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def deferred_compiler() -> Iterator[None]:
    """Context manager in which torch._dynamo is loaded only when code compiles.

    Nothing changes if the compiler is already loaded.
    """
    global _users
    with _lock:
        _users += 1
        # The first user installs the stand-in and the last removes it: runs in threads may overlap.
        if _NAME not in sys.modules:
            sys.modules[_NAME] = _StandIn()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            # The stand-in is still present if no code has compiled meanwhile.
            module = sys.modules.get(_NAME)
            if not _users and isinstance(module, _StandIn):
                module.leave()

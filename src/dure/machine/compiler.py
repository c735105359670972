"""torch's compiler, kept unloaded where nobody compiles.

The first optimizer of a process, and its first step, import torch._dynamo only to tell it to stay
away: seconds, in every rank, and longer than importing torch. `left_out` puts a stand-in there that
takes such notices, and makes way for the real module as soon as anything else is asked of it:
whoever compiles finds the compiler.
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

Called = TypeVar("Called", bound=Callable[..., Any])

_NAME = "torch._dynamo"
_SETTINGS = "torch._dynamo.config"
_NOTICE = "__dynamo_disable"
"""The attribute of a function that the compiler is to stay away from: what to call instead."""

_lock = threading.RLock()
_users = 0


class _StandIn(ModuleType):
    """Stands in for torch._dynamo, and leads to the real one.

    It has what torch's own code asks for where nothing is compiled.
    """

    def __init__(self) -> None:
        super().__init__(_NAME)
        self._noticed: list[Any] = []
        self.config: ModuleType

    def graph_break(self, msg: str = "") -> None:
        """Nothing is traced, so there is nothing to break off."""

    def disable(self, function: Callable[..., Any], *how: Any, **more: Any) -> Callable[..., Any]:
        """The function as it is."""
        # torch will keep this answer at the function and ask no more; `leave` takes it back.
        self._noticed.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        # Much code looks at all modules in passing, for `__file__` and the like: that is no wish to
        # compile. `__path__` is asked for by an import of a submodule, which needs the real one.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(self._loaded(), name)

    def _loaded(self) -> ModuleType:
        with _lock:
            # First: the import would find this stand-in again.
            self.leave()
            return importlib.import_module(_NAME)

    def leave(self) -> None:
        """Makes way, if it is there, and takes back what it said."""
        with _lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
            # The real compiler has settings of its own.
            if "config" in vars(self):
                del sys.modules[_SETTINGS]
                del self.config
            for function in self._noticed:
                # Only what torch keeps because of us; the real compiler will be asked anew.
                if getattr(function, _NOTICE, None) is function:
                    delattr(function, _NOTICE)
            self._noticed.clear()


def settings_alone() -> None:
    """Has the compiler's settings loaded without the compiler; called inside `left_out`.

    Tensors without data (torch's fake ones) look two of them up, and nothing else.
    """
    with _lock:
        there = sys.modules.get(_NAME)
        if not isinstance(there, _StandIn) or "config" in vars(there):
            return
        file = Path(torch.__file__).parent / "_dynamo" / "config.py"
        spec = importlib.util.spec_from_file_location(_SETTINGS, file)
        # A torch that keeps them elsewhere: then they come with the compiler.
        if not file.exists() or spec is None or spec.loader is None:
            return
        there.config = sys.modules[_SETTINGS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(there.config)


def untraced(function: Called) -> Called:
    """The function as the compiler is to call it: as it is, and without looking into it.

    For hooks of modules that are compiled, whose calls the compiler traces with their hooks.
    """
    # Where it is not loaded, nothing has been compiled that a hook could be put on.
    if isinstance(sys.modules.get(_NAME, _StandIn()), _StandIn):
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def left_out() -> Iterator[None]:
    """While it lasts, torch does without its compiler until somebody compiles.

    Where the compiler is loaded, nothing changes.
    """
    global _users
    with _lock:
        _users += 1
        # The first user puts it there, the last one takes it away: runs may overlap in threads.
        if _NAME not in sys.modules:
            sys.modules[_NAME] = _StandIn()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            # Still the stand-in where nobody has compiled meanwhile.
            there = sys.modules.get(_NAME)
            if not _users and isinstance(there, _StandIn):
                there.leave()

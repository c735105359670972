"""Makes torch.distributed know the backend `dure` as soon as both dure and torch.distributed are
imported.

`import dure` is quick because it does not import torch. So where torch.distributed is there
already, the backend is registered at once; else a finder waits for its import, and steps aside.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_AWAITED = "torch.distributed.distributed_c10d"


def create(*arguments: Any) -> Any:
    """Makes a group of the backend; what it takes is imported only now."""
    return importlib.import_module("dure.collectives.shared_memory.backend").create(*arguments)


def register() -> None:
    """Tells torch.distributed, which is imported, of the backend; once."""
    backends = getattr(sys.modules[_AWAITED], "Backend", None)
    if backends is None or "DURE" in backends._plugins:
        return
    usual = dict(backends.default_device_backend_map)
    backends.register_backend("dure", create, extended_api=True, devices=["cpu"])
    backends.default_device_backend_map.update(
        usual
    )  # older torch makes the newest backend the usual one


def register_when_imported() -> None:
    """Registers now, or as soon as torch.distributed has been imported."""
    if _AWAITED in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Sees one import go by."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as another loader does, then registers."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        register()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for those who ask for the source, as tracebacks do

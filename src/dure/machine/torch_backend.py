"""Register the backend `dure` with torch.distributed once both packages are imported.

`import dure` is quick because it does not import torch. If torch.distributed is already imported,
the backend is registered at once; otherwise an import hook waits for the import, and then removes
itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_AWAITED = "torch.distributed.distributed_c10d"


def register(module: str) -> None:
    """Register the backend with the imported torch.distributed, once.

    module: the module with the function `create`, which makes a group; imported at the first call.
    """

    def create(*arguments: Any) -> Any:
        return importlib.import_module(module).create(*arguments)

    backends = getattr(sys.modules[_AWAITED], "Backend", None)
    if backends is None or "DURE" in backends._plugins:
        return
    usual = dict(backends.default_device_backend_map)
    # extended_api: `create` also gets the options that a user gave (pg_options).
    backends.register_backend("dure", create, extended_api=True, devices=["cpu"])
    # Older torch makes the newest backend the usual one.
    backends.default_device_backend_map.update(usual)


def register_when_imported(module: str) -> None:
    """Register now, or as soon as torch.distributed is imported."""
    when_imported(_AWAITED, lambda: register(module))


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` now if the module `name` is imported, else as soon as it is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def gloo_settings() -> dict[str, str | int]:
    """Return gloo's settings in the form of torch's log for its own groups (2 threads)."""
    return {
        "gloo_socket_ifname": os.environ.get("GLOO_SOCKET_IFNAME", "N/A"),
        "gloo_device_transport": os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A"),
        "gloo_num_threads": 2,
    }


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook for a single import."""

    def __init__(self, awaited: str, then: Callable[[], None]) -> None:
        self._awaited = awaited
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._awaited:
            return None
        # First: find_spec, below, asks all finders again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            # `then` needs the executed module, so the loader is wrapped.
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """Loader that delegates to another loader and then calls `then`."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # such as the source, which tracebacks ask for

"""Libraries in C that came with the package, where a compiler was there when it was installed."""

from __future__ import annotations

import ctypes
import importlib.machinery
from pathlib import Path


def c_library(folder: Path, name: str) -> ctypes.CDLL | None:
    """The library `name` in the folder, loaded; None where it was not compiled."""
    # It was built in the way of Python's extension modules, so its name has one of their endings.
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (file := folder / f"{name}{suffix}").exists():
            return ctypes.CDLL(str(file))
    return None

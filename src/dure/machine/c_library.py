"""C libraries of the package, present if a compiler was available at installation."""

from __future__ import annotations

import ctypes
import importlib.machinery
from pathlib import Path


def c_library(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load the library `name` of the folder; None if the library was not compiled."""
    # The build treats the library as an extension module, whose file name has such a suffix.
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (file := folder / f"{name}{suffix}").exists():
            return ctypes.CDLL(str(file))
    return None

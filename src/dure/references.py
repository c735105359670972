"""Where something of a user's own is, written as text.

    path/to/file.py:Name    or    package.module:Name

A user's file is run as a module of its own, under a name that no import can collide with: it is
made of the file's path and contents, so that what was found once is found again as the same object.
A fresh process cannot import that module. Therefore what it defines is pickled by value
(`cloudpickle.register_pickle_by_value`), and so is what it imports from its own folder.

To follow a reference runs the user's code. Only what the user starts may do so: a run folder that
somebody sent is data, and is shown without any of this.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from dure.errors import suggestion


def load(reference: str, base: type | None = None) -> type[Any]:
    """The class that `reference` names. base: what it has to be a subclass of.

    Raises ValueError if there is no such file, module or class, if the file cannot be run, or if
    the class is of another kind.
    """
    found = find(reference, inspect.isclass)
    if not isinstance(found, type):
        raise ValueError(f"{reference} is not a class, but of type {type(found).__name__}")
    if base is not None and not issubclass(found, base):
        raise ValueError(f"{reference} is not a subclass of {base.__module__}.{base.__qualname__}")
    return found


def reference_of(cls: type) -> str | None:
    """The text by which `load` finds the class again, in another process and from another folder.

    None if no text does: for a class of a script, a notebook or a function.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or module.__name__ == "__main__":
        return None
    # A class inside a function or another class, or one whose name now means something else.
    if getattr(module, cls.__qualname__, None) is not cls:
        return None
    # Registered modules were found through a folder that is on the path of this process alone.
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return f"{module.__file__}:{cls.__qualname__}"
    return f"{module.__name__}:{cls.__qualname__}"


def is_brought_along(cls: type) -> bool:
    """Whether the class is one of dure's own, which has a name there."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def is_reference(text: str) -> bool:
    """Whether the text has the form of a reference; what follows a second colon does not count.

    A name and its values (`dirichlet:0.3`) are none, since a number names nothing in a module.
    """
    place, _, rest = text.partition(":")
    attribute = rest.partition(":")[0]
    is_module = all(part.isidentifier() for part in place.split("."))
    return attribute.isidentifier() and (is_file(place) or is_module)


def find(reference: str, wanted: Callable[[Any], bool]) -> Any:
    """The object that `reference` names. wanted: what the others are that an error may suggest.

    Raises ValueError if there is no such file, module or name, or if the file cannot be run.
    """
    place, _, name = reference.rpartition(":")
    module = from_file(Path(place)) if is_file(place) else from_import_path(place)
    if not hasattr(module, name):
        others = [other for other, value in vars(module).items() if wanted(value)]
        hint = suggestion(name, others) if others else ""
        raise ValueError(f"{place} has no {name!r}{hint}")
    return getattr(module, name)


def is_file(place: str) -> bool:
    """Whether the text before a reference's colon is a file and not a module."""
    return place.endswith(".py") or "/" in place


def from_file(path: Path) -> ModuleType:
    """The file, run as a module; once for the same contents. Raises ValueError if it cannot be."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    # With the contents: a file that was edited meanwhile is another module.
    key = str(path).encode() + path.read_bytes()
    name = f"dure_file_{path.stem}_{hashlib.blake2b(key, digest_size=8).hexdigest()}"
    known = sys.modules.get(name)
    return _run(path, name) if known is None else known


def _run(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    try:
        with _importing_from(path.parent):
            spec.loader.exec_module(module)
    except Exception as error:
        # Half a module must not be found the next time.
        del sys.modules[name]
        raise ValueError(f"{path} could not be loaded: {type(error).__name__}: {error}") from error
    cloudpickle.register_pickle_by_value(module)
    return module


def from_import_path(name: str) -> ModuleType:
    """The module, which may also lie in the working directory.

    Raises ValueError if the import fails.
    """
    try:
        with _importing_from(Path.cwd()):
            return importlib.import_module(name)
    except Exception as error:
        raise ValueError(
            f"the module {name} could not be imported: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Imports also look into `folder`, as they do for a script that is run there.

    What is found there only because of this is pickled by value: other processes do not look there.
    """
    if str(folder) in sys.path:
        yield
        return
    # What is new afterwards was imported by the file, or by the module asked for.
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and _lies_in(Path(file), folder):
            cloudpickle.register_pickle_by_value(sys.modules[name])


def _lies_in(file: Path, folder: Path) -> bool:
    """Whether the file is reachable through `folder` and through nothing else on the path."""
    # Asked after `folder` has been taken off the path again.
    roots = [root for root in map(Path, sys.path) if root.is_absolute()]
    return file.is_relative_to(folder) and not any(file.is_relative_to(root) for root in roots)

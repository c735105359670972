"""References to a user's own objects, written as text.

    path/to/file.py:Name    or    package.module:Name    or    path/to/folder/package.module:Name

The last form is a module found in a folder; dure writes this form for a module that is not
installed, so that the module can be found from every directory.

A user's file is run as a separate module, under a name that no import can collide with: the name
derives from the file's path and contents, so that the same file gives the same object again. A new
process cannot import that module. Therefore its definitions are pickled by value
(`cloudpickle.register_pickle_by_value`), and so are its imports from its own folder.

Following a reference runs the code that the reference names, so only the user's own text is
followed: an argument in Python, a word on a command line. A run folder and a message of a server
are data. Code that reads data does so under `following_references`, which decides which references
may be followed; `refuse` follows none. While a module is imported, only the folder that the user
has named is on `sys.path`: a file, such as a ZIP archive, is not a folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from dure.errors import described, suggestion


def load(reference: str, base: type | None = None) -> type[Any]:
    """Return the class that `reference` names. base: required base class.

    Raises ValueError if there is no such file, module or class, if the file cannot be run, or if
    the class is not a subclass.
    """
    found = find(reference, inspect.isclass)
    if not isinstance(found, type):
        raise ValueError(f"{reference} is not a class, but of type {type(found).__name__}")
    if base is not None and not issubclass(found, base):
        raise ValueError(f"{reference} is not a subclass of {base.__module__}.{base.__qualname__}")
    return found


def reference_of(cls: type) -> str | None:
    """Return the text by which `load` finds the class, in any process and from any directory.

    None if there is no such text: for a class of a script, a notebook or a function.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or module.__name__ == "__main__":
        return None
    # A class inside a function or another class, or a class whose name was reassigned.
    if getattr(module, cls.__qualname__, None) is not cls:
        return None
    return f"{location_of(module)}:{cls.__qualname__}"


def location_of(module: ModuleType) -> str:
    """Return the part before the colon of a reference to an object of this module."""
    file = getattr(module, "__file__", None)
    if file is None or is_installed(Path(file)):
        return module.__name__
    path = Path(file).resolve()
    by_value = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    # A file that was run as such, or found as a module through a folder that is on the path of this
    # process alone.
    if by_value and "." not in module.__name__:
        return str(path)
    # A module of a package, whose imports from its neighbours need the package.
    parts = module.__name__.split(".")
    last = path.parent if path.name == "__init__.py" else path.with_suffix("")
    if last.parts[-len(parts) :] != tuple(parts):
        return module.__name__
    return str(last.parents[len(parts) - 1] / module.__name__)


def is_installed(file: Path) -> bool:
    """Return whether the file came with Python, with dure or with an installed package."""
    own = Path(__file__).resolve().parent
    return any(map(file.resolve().is_relative_to, (*installed_folders(), own)))


@functools.cache
def installed_folders() -> tuple[Path, ...]:
    """Return the folders of Python's library, of this environment's packages and of the user's."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    names = [sysconfig.get_path(kind) for kind in kinds]
    names += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(Path(name).resolve() for name in names)


def is_part_of_dure(cls: type) -> bool:
    """Return whether the class is dure's own, and so has a name there."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def is_reference(text: str) -> bool:
    """Return whether the text has the form of a reference; text after a second colon is ignored.

    A name with values (`dirichlet:0.3`) is not a reference, since a number is not an identifier.
    """
    place, _, rest = text.partition(":")
    attribute = rest.partition(":")[0]
    is_module = all(part.isidentifier() for part in place.split("."))
    return attribute.isidentifier() and (is_file(place) or is_module)


def last_part(reference: str) -> str:
    """Return the file's and the object's name: "rules.py:Mine" of "/home/me/rules.py:Mine"."""
    return reference.rpartition("/")[2]


def find(reference: str, wanted: Callable[[Any], bool]) -> Any:
    """Return the object that `reference` names.

    wanted: filter for the names that an error suggests.

    Raises ValueError if there is no such file, module or name, or if the file cannot be run.
    """
    ask = _ASK.get()
    if ask is not None:
        reference = ask(reference)
    place, _, name = reference.rpartition(":")
    module = _module(place)
    if not hasattr(module, name):
        others = [other for other, value in vars(module).items() if wanted(value)]
        hint = suggestion(name, others) if others else ""
        raise ValueError(f"{place} has no {name!r}{hint}")
    return getattr(module, name)


ReferencePolicy = Callable[[str], str]
"""Function that returns the reference to follow in place of a reference in data.

It raises an error if no reference may be followed.
"""


def refuse(reference: str) -> str:
    """Refuse every reference: the `ReferencePolicy` of data that may name only dure's own code.

    Raises ValueError.
    """
    raise ValueError(
        f"{reference!r} names code, but data from other machines may name only code of dure itself"
    )


_ASK: ContextVar[ReferencePolicy | None] = ContextVar("_ASK", default=None)


@contextlib.contextmanager
def following_references(ask: ReferencePolicy) -> Iterator[None]:
    """Context manager: `find` follows the result of `ask` for each reference.

    `ask` raises an error to refuse a reference.
    """
    token = _ASK.set(ask)
    try:
        yield
    finally:
        _ASK.reset(token)


def is_file(place: str) -> bool:
    """Return whether the text before a reference's colon is a path and not a module."""
    return place.endswith(".py") or "/" in place


def resolved(place: str) -> str:
    """Return the absolute form of a place; a module name stays unchanged."""
    if not is_file(place):
        return place
    folder, _, module = place.rpartition("/")
    # The dots in a module's name do not separate a file suffix.
    return str(Path(place if place.endswith(".py") else folder or "/").expanduser().resolve()) + (
        "" if place.endswith(".py") else f"/{module}"
    )


def file_of(place: str) -> Path | None:
    """Return the file that following this place would run, without running it.

    None if there is no file, or for a module that is named without its folder.
    """
    if place.endswith(".py"):
        return Path(place).expanduser().resolve()
    folder, _, name = resolved(place).rpartition("/")
    module = Path(folder, *name.split("."))
    files = (module / "__init__.py", module.with_name(f"{module.name}.py"))
    return next((file for file in files if is_file(place) and file.is_file()), None)


def _module(place: str) -> ModuleType:
    """Import or run the module of a place.

    Raises ValueError if there is no such module, or if it cannot be run.
    """
    if place.endswith(".py"):
        return from_file(Path(place))
    if not is_file(place):
        return from_import_path(place)
    folder, _, name = resolved(place).rpartition("/")
    module = from_import_path(name, Path(folder))
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).resolve().is_relative_to(folder):
        raise ValueError(f"{name} is {file} in this process, not the module in {folder}")
    return module


def loaded(reference: str) -> ModuleType | None:
    """Return the module of a reference that was followed in this process, or None."""
    place = reference.rpartition(":")[0]
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        return sys.modules.get(_name_of(path)) or _imported_as(path) if path.is_file() else None
    return sys.modules.get(place.rpartition("/")[2])


_PREFIX = "dure_file_"
"""Prefix of the names of modules that were run by their paths."""


def _imported_as(path: Path) -> ModuleType | None:
    """Return the module of this file that was imported rather than run by its path, or None."""
    return next(
        (
            module
            for module in list(sys.modules.values())
            if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__"
        ),
        None,
    )


def from_file(path: Path) -> ModuleType:
    """Run the file as a module, once for the same contents. Raises ValueError if that fails."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    # The name includes the contents: a file that was edited meanwhile is another module.
    name = _name_of(path)
    known = sys.modules.get(name)
    return _run(path, name) if known is None else known


@dataclass(frozen=True)
class ModuleLocation:
    """Location of a user's module, for other processes of this machine.

    folder: the folder through which the module was imported; None for a file run by its path.
    """

    path: str
    name: str
    folder: str | None


@dataclass(frozen=True, eq=False)
class LoadedModule:
    """User's module, with its state directly after it was run.

    digest: hash of the file. names: global names of the module. attributes: attributes of its
    classes, by class name.
    """

    module: ModuleType
    place: ModuleLocation
    digest: bytes
    names: Mapping[str, Any]
    attributes: Mapping[str, Mapping[str, Any]]

    def is_unchanged(self) -> bool:
        """Return whether the file has the content that was run."""
        try:
            return _digest(Path(self.place.path)) == self.digest
        except OSError:
            return False


_SOURCES: dict[str, LoadedModule] = {}


def sources() -> Mapping[str, LoadedModule]:
    """Return the modules that other processes cannot import, by name."""
    return _SOURCES


def run_again(place: ModuleLocation) -> ModuleType:
    """Return the module of this place, running the file if this process has not.

    Raises ValueError if the module cannot be run, or if the file has changed.
    """
    known = sys.modules.get(place.name)
    if known is not None:
        return known
    if place.folder is not None:
        return from_import_path(place.name, Path(place.folder))
    module = from_file(Path(place.path))
    if module.__name__ != place.name:
        raise ValueError(f"{place.path} was changed while its run started: start the run again")
    return module


def _digest(file: Path) -> bytes:
    return hashlib.blake2b(file.read_bytes(), digest_size=8).digest()


def _note(module: ModuleType, file: Path, folder: Path | None) -> None:
    """Register a user's module that was run here, so that other processes can run it."""
    cloudpickle.register_pickle_by_value(module)
    place = ModuleLocation(str(file), module.__name__, None if folder is None else str(folder))
    classes = {
        cls.__qualname__: dict(vars(cls)) for cls in _classes_in(vars(module), module.__name__)
    }
    _SOURCES[module.__name__] = LoadedModule(
        module, place, _digest(file), dict(vars(module)), classes
    )


def _classes_in(names: Mapping[str, Any], module: str) -> Iterator[type]:
    """Yield the classes defined in a module, inner classes included."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield value
            inner = {
                name: each
                for name, each in vars(value).items()
                if getattr(each, "__qualname__", "") == f"{value.__qualname__}.{name}"
            }
            yield from _classes_in(inner, module)


def _name_of(path: Path) -> str:
    """Return the module name for the present content of a file."""
    key = str(path).encode() + path.read_bytes()
    return f"{_PREFIX}{path.stem}_{hashlib.blake2b(key, digest_size=8).hexdigest()}"


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
    # A file that ends its process when it is run has failed as well.
    except BaseException as error:
        # An incomplete module must not be found next time.
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(f"{path} could not be loaded: {described(error)}") from error
    _note(module, path, None)
    return module


def from_import_path(name: str, folder: Path | None = None) -> ModuleType:
    """Import the module, from `folder` too; by default from the working directory.

    Raises ValueError if the import fails.
    """
    try:
        with _importing_from(Path.cwd() if folder is None else folder):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"the module {name} could not be imported: {described(error)}") from error


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Context manager: imports also search `folder`, like for a script in that folder.

    Modules found only because of this are pickled by value, because other processes do not search
    the folder. Raises ValueError if `folder` is not a folder: Python would import from a ZIP
    archive as well, and any file of another party may end in one.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder to import from")
    with _by_their_stems(folder):
        if str(folder) in sys.path:
            yield
            return
        # Modules that are new afterwards were imported by the file or the requested module.
        before = set(sys.modules)
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name not in before]:
            file = getattr(sys.modules[name], "__file__", None)
            if file and _lies_in(Path(file), folder):
                _note(sys.modules[name], Path(file), folder)


@contextlib.contextmanager
def _by_their_stems(folder: Path) -> Iterator[None]:
    """Context manager: `import` finds files of this folder that were run by their paths.

    Otherwise a file that imports such a neighbour, or is imported by it, would run it again.
    """
    stems = {
        Path(file).stem: module
        for name, module in list(sys.modules.items())
        if name.startswith(_PREFIX)
        and (file := getattr(module, "__file__", None))
        and Path(file).parent == folder
    }
    added = {stem: module for stem, module in stems.items() if stem not in sys.modules}
    sys.modules.update(added)
    try:
        yield
    finally:
        for stem, module in added.items():
            if sys.modules.get(stem) is module:
                del sys.modules[stem]


def _lies_in(file: Path, folder: Path) -> bool:
    """Return whether the file is reachable through `folder` and no other entry of the path."""
    # Asked after `folder` has been taken off the path again.
    roots = [root for root in map(Path, sys.path) if root.is_absolute()]
    return file.is_relative_to(folder) and not any(file.is_relative_to(root) for root in roots)

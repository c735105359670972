"""Which code a run folder may name: what was begun on this machine, and what the user names again.

A folder is data. Its config.json may name files and modules, of a task or of classes of a user's
own, and to go on with the run would import them. That is done only if

- the user names the same thing again, by its last name: `--task`, `--strategy`, `--world`,
  `--rules`; or
- a run with exactly this config.json was begun by this user on this machine, and the files that it
  names, with those that they import, are still as they were then.

For the latter a digest of config.json and one of each file are kept outside of the folder
(`dure.machine.state`). So a folder may be copied and moved; one that was edited, or comes from
elsewhere, is asked about. What is brought along or installed is not compared, since whoever could
change it needs no run folder.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from dure import references
from dure.contracts.strategy import Strategy, World
from dure.contracts.task import Task
from dure.errors import RunFolderError
from dure.machine import state
from dure.record.settings import without_sums


class Begun(msgspec.Struct):
    """What is kept of a run that was begun here: the code's files, each with its digest."""

    files: dict[str, str]


def note(config: Mapping[str, Any], task: Task, strategy: Strategy, world: World) -> None:
    """Keeps that a run with this config.json was begun here, if it names code at all.

    Raises OSError.
    """
    named = list(named_by(task, strategy, world))
    if named:
        files = {str(file): _digest_of(file) for one in named for file in _files(one)}
        state.remember(_name(config), msgspec.json.encode(Begun(files)))


def named_by(task: Task, strategy: Strategy, world: World) -> Iterator[str]:
    """The references by which code of a user's own is found again."""
    name = (task.reference or {}).get("name")
    if name is not None and ":" in name:
        yield name
    for thing in (strategy, world):
        yield from _classes(thing)


def _classes(value: Any) -> Iterator[str]:
    """The references of a setting's class and of those of the settings in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        reference = None if references.is_brought_along(kind) else references.reference_of(kind)
        if reference is not None:
            yield reference
        for field in dataclasses.fields(value):
            yield from _classes(getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _classes(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _classes(each)


class Asks:
    """What `references.followed_as` asks about the references in a folder's config.json.

    named_again: references that the user gave, each in place of the one that ends with its name.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], named_again: Iterable[str] = ()
    ) -> None:
        self._instead = {reference.rpartition(":")[2]: reference for reference in named_again}
        self._known = _Known(folder, config)

    def __call__(self, reference: str) -> str:
        """What is followed. Raises RunFolderError for what must not be."""
        own = self._instead.get(reference.rpartition(":")[2])
        if own is not None:
            return own
        self._known.check(reference)
        return reference


class _Known:
    """What is kept of a config.json, looked up when it is first needed."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.config = config
        self._begun: Begun | None = None

    def check(self, reference: str) -> None:
        if self._begun is None:
            self._begun = self._looked_up(reference)
        place = reference.rpartition(":")[0]
        file = references.file_of(place)
        is_known = _is_installed_module(place) if file is None else str(file) in self._begun.files
        if not is_known:
            raise self._refused(reference, "is not what it was when the run was begun")
        if file is None:
            # Now, while the working directory is not on the path: what the module imports is not
            # to be found there either. If it cannot be imported, whoever follows it says so.
            with suppress(Exception):
                importlib.import_module(place)

    def _looked_up(self, reference: str) -> Begun:
        content = state.remembered(_name(self.config))
        if content is None:
            raise self._refused(reference, "was not begun on this machine, or was edited since")
        try:
            begun = msgspec.json.decode(content, type=Begun)
        except (ValueError, RecursionError):
            raise self._refused(reference, "is not known for certain") from None
        for file, digest in begun.files.items():
            if _digest_of(Path(file)) != digest:
                raise self._refused(reference, f"has other code by now: {file} was changed")
        return begun

    def _refused(self, reference: str, why: str) -> RunFolderError:
        flag = _flag(reference, self.config)
        return RunFolderError(
            f"the run in {self.folder} {why}, and its config.json names code, {reference!r}, which "
            f"is run only if you name it again: {flag} path/to/file.py:NAME"
        )


def _flag(reference: str, config: Mapping[str, Any]) -> str:
    """The flag that names the reference again."""
    for part, key in (("task", "name"), ("strategy", "from"), ("world", "from")):
        written = config.get(part)
        if isinstance(written, Mapping) and written.get(key) == reference:
            return f"--{part}"
    return "--rules"


def _is_installed_module(place: str) -> bool:
    """Whether importing this module would run what is installed, found without importing it."""
    if references.is_file(place):
        return False
    top = place.partition(".")[0]
    loaded = sys.modules.get(top)
    spec = PathFinder.find_spec(top)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    if loaded is not None:
        places = [getattr(loaded, "__file__", None), *getattr(loaded, "__path__", ())]
    found = [Path(one) for one in places if one is not None]
    # A module that is part of the interpreter has no file at all.
    return all(map(references.is_installed, found)) if found else top in sys.builtin_module_names


def _name(config: Mapping[str, Any]) -> str:
    """What is kept of a config.json has its digest as its name."""
    # Parsed again, so that it does not matter how it was written.
    plain = json.dumps(json.loads(json.dumps(without_sums(config))), sort_keys=True).encode()
    return f"begun-{hashlib.blake2b(plain, digest_size=20).hexdigest()}"


def _digest_of(file: Path) -> str:
    """Of its content; empty for a file that is gone."""
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=20).hexdigest()
    except OSError:
        return ""


def _files(reference: str) -> set[Path]:
    """The files that a reference has run: the module's own, and what it imports of a user's own."""
    found: set[Path] = set()
    waiting = [references.loaded(reference)]
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if module is None or file is None or references.is_installed(Path(file)):
            continue
        path = Path(file).resolve()
        if path not in found:
            found.add(path)
            waiting += map(sys.modules.get, _imports(module, path))
    return found


def _imports(module: ModuleType, file: Path) -> Sequence[str]:
    """The names of modules that a file's import statements may have loaded."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        # A library in machine code, or a file that has changed since it was run.
        return ()
    # The packages that it lies in.
    names = [module.__name__]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            try:
                base = importlib.util.resolve_name(base, module.__package__)
            except ImportError:
                continue
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    # Of a.b.c, the packages a and a.b are run as well.
    return [
        ".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2)
    ]

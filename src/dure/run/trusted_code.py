"""Decide which code a run folder may name: runs begun on this machine, and names the user repeats.

A folder is data. Its config.json may name files and modules, of a task or of a user's own classes,
and resuming the run would import them. An import is permitted only if

- the user names the same thing again, by its last name: `--task`, `--strategy`, `--world`,
  `--rules`; or
- this user began a run with exactly this config.json on this machine, and the named files, with the
  files that they import, have not changed since.

For the second case a digest of config.json and of each file are stored outside of the folder
(`dure.machine.state`). A folder may therefore be copied and moved; an edited folder, or a folder
from elsewhere, needs the user's consent. Modules of dure and installed packages are not compared:
an attacker who could change them would need no run folder.
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
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.errors import RunFolderError
from dure.machine import state
from dure.record.settings import without_sums


class BegunRun(msgspec.Struct):
    """Record of a run begun on this machine. files: digest of each file of its code."""

    files: dict[str, str]


def remember_run(config: Mapping[str, Any], task: Task, strategy: Strategy, world: World) -> None:
    """Record that a run with this config.json was begun here, if it names user code.

    Raises OSError.
    """
    named = list(code_references(task, strategy, world))
    if named:
        files = {str(file): _digest_of(file) for one in named for file in _files(one)}
        state.write_state_file(_name(config), msgspec.json.encode(BegunRun(files)))


def code_references(task: Task, strategy: Strategy, world: World) -> Iterator[str]:
    """Yield the references that find the user's own code again."""
    name = (task.reference or {}).get("name")
    if name is not None and ":" in name:
        yield name
    for thing in (strategy, world):
        yield from _classes(thing)


def _classes(value: Any) -> Iterator[str]:
    """Yield the references of a setting's class and of the classes of nested settings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        reference = None if references.is_part_of_dure(kind) else references.reference_of(kind)
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


class ReferenceGuard:
    """The check of `references.following_references` for references in a folder's config.json.

    named_again: references from the user, each replacing the reference with the same last name.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], named_again: Iterable[str] = ()
    ) -> None:
        self._instead = {reference.rpartition(":")[2]: reference for reference in named_again}
        self._known = _Known(folder, config)

    def __call__(self, reference: str) -> str:
        """Return the reference to follow. Raises RunFolderError for code that must not run."""
        own = self._instead.get(reference.rpartition(":")[2])
        if own is not None:
            return own
        self._known.check(reference)
        return reference


class _Known:
    """The record of a config.json, looked up on first use."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.config = config
        self._begun: BegunRun | None = None

    def check(self, reference: str) -> None:
        if self._begun is None:
            self._begun = self._looked_up(reference)
        place = reference.rpartition(":")[0]
        file = references.file_of(place)
        is_known = _is_installed_module(place) if file is None else str(file) in self._begun.files
        if not is_known:
            raise self._refused(reference, "has changed since the run was started")
        if file is None:
            # Imported now, while the working directory is not on the path, so that its own imports
            # do not resolve there either. The caller reports a failed import.
            with suppress(Exception):
                importlib.import_module(place)

    def _looked_up(self, reference: str) -> BegunRun:
        content = state.read_state_file(_name(self.config))
        if content is None:
            raise self._refused(reference, "was not started on this machine, or was edited since")
        try:
            begun = msgspec.json.decode(content, type=BegunRun)
        except (ValueError, RecursionError):
            raise self._refused(reference, "cannot be verified") from None
        for file, digest in begun.files.items():
            if _digest_of(Path(file)) != digest:
                raise self._refused(reference, f"has changed code: {file} was edited")
        return begun

    def _refused(self, reference: str, why: str) -> RunFolderError:
        flag = _flag(reference, self.config)
        return RunFolderError(
            f"the run in {self.folder} {why}, and its config.json names the code {reference!r}, "
            f"which dure runs only if you name it again: {flag} path/to/file.py:NAME"
        )


def _flag(reference: str, config: Mapping[str, Any]) -> str:
    """Return the command-line flag that names the reference again."""
    for part, key in (("task", "name"), ("strategy", "from"), ("world", "from")):
        written = config.get(part)
        if isinstance(written, Mapping) and written.get(key) == reference:
            return f"--{part}"
    return "--rules"


def _is_installed_module(place: str) -> bool:
    """Return whether importing the module would run installed code; does not import it."""
    if references.is_file(place):
        return False
    top = place.partition(".")[0]
    loaded = sys.modules.get(top)
    spec = PathFinder.find_spec(top)
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    if loaded is not None:
        places = [getattr(loaded, "__file__", None), *getattr(loaded, "__path__", ())]
    found = [Path(one) for one in places if one is not None]
    # A builtin module of the interpreter has no file.
    return all(map(references.is_installed, found)) if found else top in sys.builtin_module_names


def _name(config: Mapping[str, Any]) -> str:
    """Return the name of the record of a config.json: its digest."""
    # Normalised through JSON, so that formatting and key order do not matter.
    plain = json.dumps(json.loads(json.dumps(without_sums(config))), sort_keys=True).encode()
    return f"begun-{hashlib.blake2b(plain, digest_size=20).hexdigest()}"


def _digest_of(file: Path) -> str:
    """Return the digest of the file's content; empty for a missing file."""
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=20).hexdigest()
    except OSError:
        return ""


def _files(reference: str) -> set[Path]:
    """Return the files that a reference runs: the module's own, and the user's files it imports."""
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
    """Return the names of the modules that a file's import statements may have loaded."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        # A compiled library, or a file that has changed since it was run.
        return ()
    # A module runs the packages that contain it.
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
    # Importing a.b.c runs the packages a and a.b as well.
    return [
        ".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2)
    ]

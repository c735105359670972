"""Distinguish files of libraries from the user's own code.

    Python's, and installed in an environment or for a user            always a library
    installed into a separate folder (pip install --target)            always a library
    installed for editing (pip install -e), or found by PYTHONPATH     unless it is a working folder

Working folders are the folder of the running script, the working directory, and the folders that
contain them. A project of the user that is installed for editing, or found by PYTHONPATH, looks
like any other project outside the working folders.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dure.references import installed_folders


def is_installed_copy(file: Path) -> bool:
    """Return whether the file came with Python or with a package that pip has copied."""
    return any(map(file.is_relative_to, installed_folders())) or _is_in_target(file)


def is_foreign_project(file: Path) -> bool:
    """Return whether the file belongs to an editable install or a PYTHONPATH entry.

    False for a file in a working folder, and for a project that contains a working folder.
    """
    working = _working_folders()
    if any(map(file.is_relative_to, working)):
        return False
    return any(
        file.is_relative_to(root) and not any(place.is_relative_to(root) for place in working)
        for root in (*_editable_projects(), *_python_path())
    )


def _is_in_target(file: Path) -> bool:
    for entry in {*sys.path}:
        folder = Path(entry).resolve()
        if entry and file.is_relative_to(folder):
            relative = file.relative_to(folder)
            if relative.parts[0] in _copied_into(folder):
                return True
    return False


@functools.cache
def _copied_into(folder: Path) -> frozenset[str]:
    """Return the files and folders that pip has copied into a folder, according to its records."""
    names: set[str] = set()
    for record in folder.glob("*.dist-info/RECORD"):
        lines = _text_of(record).splitlines()
        names.update(line.split(",")[0].split("/")[0].strip('"') for line in lines)
    return frozenset(names)


@functools.cache
def _editable_projects() -> tuple[Path, ...]:
    return tuple(
        project
        for folder in installed_folders()
        for project in (*_projects_by_url(folder), *_projects_by_link(folder))
    )


def _projects_by_url(folder: Path) -> Iterator[Path]:
    for file in folder.glob("*.dist-info/direct_url.json"):
        try:
            said = json.loads(_text_of(file))
            if said["dir_info"].get("editable"):
                yield Path(unquote(urlsplit(said["url"]).path)).resolve()
        except (ValueError, KeyError, TypeError, AttributeError):
            continue


def _projects_by_link(folder: Path) -> Iterator[Path]:
    """Yield projects that an older setuptools has installed for editing."""
    for file in folder.glob("*.egg-link"):
        lines = _text_of(file).splitlines()
        if lines and Path(lines[0]).is_absolute():
            yield Path(lines[0]).resolve()


def _python_path() -> list[Path]:
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [Path(entry).resolve() for entry in entries if entry]


def _working_folders() -> list[Path]:
    folders = []
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None:
        folders.append(Path(script).resolve().parent)
    with suppress(OSError):  # it may have been removed
        folders.append(Path.cwd().resolve())
    return folders


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

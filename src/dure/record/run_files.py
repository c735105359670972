"""Files of a run folder that are read without torch: JSON, and config.json with its checksums."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dure.errors import RunFolderError
from dure.record.settings import changed, without_sums
from dure.record.untrusted_files import check_links, contents

CONFIG = "config.json"


def check_run(path: Path) -> None:
    """Raise RunFolderError if `path` is not the folder of a run, or has a link in it."""
    if not (path / CONFIG).is_file():
        raise RunFolderError(f"{path} is not a run folder: it has no {CONFIG}")
    check_links(path)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file. Raises RunFolderError if it is missing or damaged."""
    try:
        content = json.loads(contents(file))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{file} is damaged: it does not contain a JSON object")
    return content


def read_config(folder: Path, whole: bool = False) -> dict[str, Any]:
    """Return the content of config.json.

    whole: refuse any change; otherwise changes of limits, intervals and the like only cause a
    warning. Raises RunFolderError if the file is missing, damaged, or has a refused change.
    """
    written = read_json(folder / CONFIG)
    check_config(folder, written, whole)
    return without_sums(written)


def check_config(folder: Path, written: Mapping[str, Any], whole: bool = False) -> None:
    """Compare config.json with its checksums. Arguments and errors: `read_config`'s."""
    file = folder / CONFIG
    what = changed(written)
    if what == "settings" or (what is not None and whole):
        raise RunFolderError(
            f"{file} has changed since dure wrote it (its checksum does not match its content): "
            "restore it, or start a new run"
        )
    if what is not None:
        warnings.warn(
            f"{file} has changed since dure wrote it, but only in parts that do not affect "
            "results: the run is read as it is now",
            stacklevel=5,
        )

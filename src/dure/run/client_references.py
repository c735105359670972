"""References that a site's user has configured: the only user code that a server may choose.

A server names user code by its path on the server's disk, such as `/srv/fed/my_rules.py:Mine`. A
client never follows that path. The client looks for a reference of its own user with the same last
part, `my_rules.py:Mine`, and follows the user's reference: from policy.toml, from
`dure join --rules`, or a class in the file of the user's own task. Every other reference is
refused, and nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dure import references
from dure.contracts.task import Task
from dure.errors import PolicyError
from dure.references import last_part


class ClientReferences:
    """The `dure.references.ReferencePolicy` of a client, for references that a server sends.

    Args:
        given: references of the site's user.
        apart: the client's own folder, into which the client writes files of the server; no module
            is imported from this folder.
        task: the user's own task; classes defined in its file may be named too.

    Raises PolicyError for a reference into `apart`, and for two references with the same last part.
    """

    def __init__(self, given: Iterable[str], apart: Path, task: Task | None = None) -> None:
        self._given: dict[str, str] = {}
        for reference in given:
            own = _resolved(reference)
            if _lies_in(own, apart):
                raise PolicyError(
                    f"{reference} is in {apart}, the folder for files that a server sends: move "
                    "it to another folder"
                )
            other = self._given.setdefault(last_part(own), own)
            if other != own:
                raise PolicyError(f"{other} and {own} have the same name: rename one")
        found = None if task is None else task.reference
        self._task = str((found or {}).get("name") or "")

    def __call__(self, reference: str) -> str:
        """Return the user's reference to follow. Raises PolicyError if there is none."""
        own = self._given.get(last_part(reference)) or self._in_task(reference)
        if own is None:
            raise PolicyError(
                f"this site does not take part: the run needs the code {reference[:200]!r}, and a "
                "site runs only its own code: if you have read that code and accept it, give "
                "your copy of it with --rules path/to/FILE.py:NAME"
            )
        return own

    def _in_task(self, reference: str) -> str | None:
        """Return the reference to a class that the file of the user's own task defines."""
        place, colon, _ = self._task.rpartition(":")
        named, _, name = last_part(reference).rpartition(":")
        if not colon or last_part(place) != named:
            return None
        module = references.loaded(self._task)
        # vars, not getattr: a module's __getattr__ may import the name that is asked for.
        kind = None if module is None else vars(module).get(name)
        is_its_own = isinstance(kind, type) and kind.__module__ == getattr(module, "__name__", "")
        return f"{place}:{name}" if is_its_own else None


def _resolved(reference: str) -> str:
    """Return the reference with an absolute path. Raises PolicyError for a malformed reference."""
    if not references.is_reference(reference):
        raise PolicyError(
            f"{reference!r} does not name a class of yours: write path/to/file.py:Name"
        )
    place, _, name = reference.rpartition(":")
    return f"{references.resolved(place)}:{name}"


def _lies_in(reference: str, folder: Path) -> bool:
    place = reference.rpartition(":")[0]
    return references.is_file(place) and Path(place).is_relative_to(folder.resolve())

"""Flags of `dure compare` that are settings of its systems: given once, for all that have them.

    dure compare digits fed-avg fed-prox,mu=0.1 --clients 20

is the same as `fed-avg,clients=20 fed-prox,mu=0.1,clients=20`. A setting behind a system's name
takes precedence. A system without the setting is unchanged, with a note; a flag that no system has
is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dure.cli.worlds import settings_of
from dure.errors import suggestion


class SharedFlags(NamedTuple):
    """Result of distributing flags over systems.

    systems: systems with the shared settings. flags: remaining flags, of the comparison itself.
    notes: a sentence for each flag that some systems do not have. there: flags that these systems
    have.
    """

    systems: list[str]
    flags: list[str]
    notes: list[str]
    there: list[str]


def shared(systems: Sequence[str], flags: Sequence[str], own: Collection[str]) -> SharedFlags:
    """Add flags that are settings of systems to all systems that have them.

    own: names of the comparison's own flags. Raises ValueError for a flag that no system has, and
    for a flag without a value.
    """
    known = {system: settings_of(system) for system in systems}
    settings, left = _apart(flags, known, own)
    notes = []
    for name, value in settings.items():
        there = [system for system in systems if name in known[system]]
        without = [_name(system) for system in systems if system not in there]
        if without:
            notes.append(
                f"{_flag(name)} {value} applies to {_listed(map(_name, there))}; "
                f"{_listed(without)} does not have this setting"
            )
    given = [_with(system, known[system], settings) for system in systems]
    names = dict.fromkeys(name for one in known.values() for name in one if name not in own)
    return SharedFlags(given, left, notes, list(map(_flag, names)))


def _apart(
    flags: Sequence[str], known: Mapping[str, Mapping[str, Any]], own: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Return (values of the systems' settings by name, the other flags)."""
    defaults: dict[str, Any] = {}
    for one in known.values():
        defaults |= one
    settings: dict[str, str] = {}
    left: list[str] = []
    waiting = list(flags)
    while waiting:
        flag = waiting.pop(0)
        head, equals, value = flag.partition("=")
        name = head.removeprefix("--").replace("-", "_")
        if not head.startswith("--") or name in own or "." in name:
            left.append(flag)
            continue
        if name not in defaults:
            close = suggestion(head, list(map(_flag, [*own, *defaults])))
            raise ValueError(
                f"neither compare nor any of the compared systems has a flag {head}{close}"
            )
        if not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        elif not equals and isinstance(defaults[name], bool):
            value = "true"
        # A comma would begin the next setting, except inside a list.
        if not value or ("," in value and not value.startswith("[")):
            raise ValueError(f"{head} is a setting of systems and needs one value: {head} VALUE")
        settings[name] = value
    return settings, left


def _with(system: str, known: Collection[str], settings: Mapping[str, str]) -> str:
    own = {text.partition("=")[0] for text in system.split(",")[1:]}
    added = [
        f"{name}={value}" for name, value in settings.items() if name in known and name not in own
    ]
    return ",".join([system, *added])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _name(system: str) -> str:
    return system.partition(",")[0]


def _listed(names: Any) -> str:
    return ", ".join(dict.fromkeys(names))

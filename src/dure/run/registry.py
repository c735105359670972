"""The lists of systems and worlds, and how they are written down: a dataclass to JSON and back.

    {"name": "fed-avg", "clients": 100, "fraction": 0.1, …, "partition": "label-shards:2"}

Fields keep their names; what has a text form, a partition or a compression, is written as its text.
What is written is read again by the types of the dataclass's fields, so a run folder says exactly
what was asked.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from dure import catalog
from dure.collectives import compression
from dure.collectives.compression import Compression
from dure.contracts.strategy import Strategy, World, dwellings
from dure.data import partition
from dure.data.partition import Partition
from dure.federated import aggregate
from dure.federated.aggregate import Aggregator
from dure.federated.server import sampling
from dure.federated.server.sampling import Selection
from dure.fleet.arrival import Arrival, parse_arrival
from dure.fleet.attacks import Attack, parse_attack
from dure.fleet.availability import Availability, parse_availability
from dure.fleet.devices import Devices, parse_devices
from dure.parallel.mesh.mesh import AXES
from dure.parallel.tensor.written_plan import TensorPlan
from dure.settings import suggestion

TEXTS: dict[type[Any], Callable[[str], Any]] = {
    Partition: partition.parse,
    Compression: compression.parse,
    Selection: sampling.parse,
    Aggregator: aggregate.parse,
    Devices: parse_devices,
    Availability: parse_availability,
    Arrival: parse_arrival,
    Attack: parse_attack,
    TensorPlan: TensorPlan,
}
"""Types of fields that are written as text, and what reads it."""


def strategy_class(name: str) -> type[Strategy]:
    """The strategy called `name`. Raises ValueError with the nearest name if there is none."""
    return typing.cast("type[Strategy]", _find("strategy", name, catalog.SYSTEMS))


def world_class(name: str) -> type[World]:
    """The world called `name`. Raises ValueError with the nearest name if there is none."""
    return typing.cast("type[World]", _find("world", name, catalog.WORLDS))


def _find(what: str, name: str, known: Mapping[str, tuple[str, str, str]]) -> Any:
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}{suggestion(name, known)}")
    module, attribute, _ = known[name]
    return getattr(importlib.import_module(module), attribute)


def default_world(strategy: Strategy) -> World:
    """Where a strategy lives if nothing is said: the torchrun job if there is one, this machine
    otherwise."""
    from dure.worlds.here import under_torchrun
    from dure.worlds.processes.world import Processes
    from dure.worlds.simulated import Simulated
    from dure.worlds.threads import Threads
    from dure.worlds.torchrun.world import Torchrun

    if strategy.kind == "clients":
        return Simulated()
    if under_torchrun() and "ranks" in dwellings(strategy):
        return Torchrun()
    if strategy.kind == "threads":
        return Threads()
    return Processes(1) if strategy.name == "single-worker" else Processes(ranks_of(strategy))


def ranks_of(strategy: Strategy) -> int | None:
    """How many ranks a strategy itself says that there are: those of its mesh."""
    mesh = getattr(strategy, "mesh", None)
    return mesh.size if mesh is not None else None


def encode(thing: Strategy | World) -> dict[str, Any]:
    """A strategy or world as JSON-able data."""
    fields = dataclasses.fields(thing)  # type: ignore[arg-type]
    return {
        "name": thing.name,
        **{field.name: _plain(getattr(thing, field.name)) for field in fields},
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, tuple(TEXTS)) else msgspec.to_builtins(value)


def decode_strategy(written: Mapping[str, Any]) -> Strategy:
    """The inverse of `encode`. Raises ValueError for names, fields or values that do not fit."""
    return typing.cast("Strategy", _decode(strategy_class(written["name"]), written))


def decode_world(written: Mapping[str, Any]) -> World:
    """The inverse of `encode`. Raises ValueError for names, fields or values that do not fit."""
    return typing.cast("World", _decode(world_class(written["name"]), written))


def _decode(kind: type[Any], written: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    values = {key: value for key, value in written.items() if key != "name"}
    _check_fields(kind, values)
    try:
        return kind(**{key: _typed(value, hints[key]) for key, value in values.items()})
    except msgspec.ValidationError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _check_fields(kind: type[Any], names: Iterable[str]) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}{suggestion(name, known)}")


def _typed(value: Any, hint: Any) -> Any:
    parse = TEXTS.get(hint)
    return msgspec.convert(value, hint) if parse is None else parse(msgspec.convert(value, str))


def parse_strategy(text: str) -> Strategy:
    """A strategy from "name" or "name,field=value,…", as `dure compare` takes it:
    "fed-avg,clients=20".

    Values are read as JSON where the field is no text; null and None are None. A mesh is written by
    its degrees: "parallel,data=2,pipeline=2". Raises ValueError for what does not fit.
    """
    name = text.partition(",")[0]
    return decode_strategy(_read(strategy_class(name), text))


def parse_world(text: str) -> World:
    """A world, as `parse_strategy` reads strategies: "simulated,devices=stragglers:0.1:10"."""
    name = text.partition(",")[0]
    return decode_world(_read(world_class(name), text))


def _read(kind: type[Any], text: str) -> dict[str, Any]:
    """What `encode` would have written of "name,field=value,…"."""
    name, *settings = _divided(text)
    hints = typing.get_type_hints(kind)
    written: dict[str, Any] = {"name": name}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: a setting is field=value, not {setting!r}")
        of_mesh = field in AXES and "mesh" in hints
        if of_mesh and not isinstance(written.setdefault("mesh", {}), dict):
            raise ValueError(f"{text!r}: a mesh is given by its degrees, or by mesh=")
        if not of_mesh:
            _check_fields(kind, [field])
        try:
            is_text = _is_text(hints.get(field))
            read = (
                None
                if value in ("None", "null")
                else value
                if is_text
                else msgspec.json.decode(value.encode())
            )
        except msgspec.DecodeError:
            raise ValueError(f"{text!r}: {field} cannot be {value!r}") from None
        if of_mesh:
            written["mesh"][field] = read
        else:
            written[field] = read
    return written


def _divided(text: str) -> list[str]:
    """The text between commas, of which those inside brackets divide nothing."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _is_text(hint: Any) -> bool:
    """Whether a field of this type is text, or words, and not JSON."""
    inner = typing.get_args(hint)
    return (
        hint is str or hint in TEXTS or any(word is str or isinstance(word, str) for word in inner)
    )

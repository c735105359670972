"""Strategies and worlds by name, and their JSON form: a dataclass to JSON and back.

    {"name": "fed-avg", "clients": 100, "fraction": 0.1, …, "partition": "label-shards:2"}

Fields keep their names; a value with a text form, such as a partition or a compression, is written
as its text. Values are read again by the types of the dataclass's fields, so that a run folder has
exactly the request.

A user's own strategy or world has one more entry, `from`: the reference that finds its class
(`dure.references`), or null if no other process can find it. Fields, such as a partition, may
contain references too.

`parse_strategy` and `parse_world` read the user's own text, and import the code that it refers to.
`decode_strategy` and `decode_world` read data, of a folder or of a server: they import no user
code, unless the caller permits the reference.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from dure import catalog, references
from dure.arguments import check_fields, shown
from dure.collectives import compression
from dure.collectives.compression import Compression
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.data import partition
from dure.data.partition import Partition
from dure.errors import described, suggestion
from dure.federated import aggregate
from dure.federated.aggregate import Aggregator
from dure.federated.privacy.privacy_settings import Privacy, parse_privacy
from dure.federated.server import sampling
from dure.federated.server.sampling import Selection
from dure.fleet.arrival import Arrival, parse_arrival
from dure.fleet.attacks import Attack, parse_attack
from dure.fleet.availability import Availability, parse_availability
from dure.fleet.devices import Devices, parse_devices
from dure.fleet.energy import Energy, parse_energy
from dure.memory.offload.offload_setting import Offload, parse_offload
from dure.memory.recompute_setting import Recompute, as_recompute
from dure.parallel.mesh.mesh import AXES
from dure.parallel.tensor.written_plan import TensorPlan
from dure.privacy.dp_sgd import DPSGD, parse_dp_sgd
from dure.references import ReferencePolicy
from dure.run.argument_checks import missing_instance_hint
from dure.settings import can_be_read
from dure.split.leakage import Defence, parse_defence
from dure.worlds.launcher_environment import under_torchrun
from dure.worlds.processes.world import Processes

Base = TypeVar("Base", Strategy, World)

TEXTS: dict[type[Any], Callable[[str], Any]] = {
    Partition: partition.parse,
    Compression: compression.parse,
    Selection: sampling.parse,
    Aggregator: aggregate.parse,
    Devices: parse_devices,
    Availability: parse_availability,
    Arrival: parse_arrival,
    Energy: parse_energy,
    Attack: parse_attack,
    Defence: parse_defence,
    Privacy: parse_privacy,
    DPSGD: parse_dp_sgd,
    Offload: parse_offload,
    Recompute: as_recompute,
    TensorPlan: TensorPlan,
}
"""Types of fields with a text form, and the parser of each."""


def strategy_class(name: str) -> type[Strategy]:
    """Return the strategy class called `name`, or the class that a reference finds.

    Raises ValueError with the nearest name if there is none.
    """
    return _class("strategy", name, catalog.SYSTEMS, Strategy)


def world_class(name: str) -> type[World]:
    """Return the world class called `name`, or the class that a reference finds.

    Raises ValueError with the nearest name if there is none.
    """
    return _class("world", name, catalog.WORLDS, World)


def _class(
    what: str,
    name: str,
    known: Mapping[str, catalog.StrategyEntry | catalog.WorldEntry],
    base: type[Base],
) -> type[Base]:
    # A reference has a colon, which no built-in name has.
    if references.is_reference(name):
        return references.load(name, base)
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}{suggestion(name, known)}")
    # The catalog lists modules by name; only this module is imported.
    entry = known[name]
    found: type[Base] = getattr(importlib.import_module(entry.module), entry.kind)
    return found


def default_world(strategy: Strategy) -> World:
    """Return the default world of a strategy.

    The torchrun job if this process is part of a torchrun job, else this machine.
    """
    check_kind(strategy, Strategy)
    # Also under torchrun, where the simulated world itself reports that it is one process.
    if strategy.traits.kind == "clients":
        return world_class("simulated")()
    # torchrun has started ranks already, so a strategy that supports ranks uses them.
    if under_torchrun() and "ranks" in strategy.traits.kinds:
        return world_class("torchrun")()
    if strategy.traits.kind == "threads":
        return world_class("threads")()
    return Processes(strategy.run_traits.ranks)


def check_kind(thing: Any, base: type[Strategy] | type[World]) -> None:
    """Raise ValueError if `thing` is no strategy or no world, or lacks a required attribute.

    A user's own class may lack the base class or a name.
    """
    name = type(thing).__name__
    meant = missing_instance_hint(thing, base.__name__)
    if meant is not None:
        raise ValueError(meant)
    if not isinstance(thing, base) or not dataclasses.is_dataclass(thing):
        raise ValueError(
            f"{name} is not a dure.{base.__name__}: derive its class from dure.{base.__name__}, "
            "as a frozen dataclass, and give an instance"
        )
    # Every subclass has to set the attributes that the base class only annotates.
    missing = [one for one in base.__annotations__ if not hasattr(thing, one)]
    if missing:
        raise ValueError(f"{name} does not define {', '.join(missing)}")
    check_fields(thing)


def encode(thing: Strategy | World) -> dict[str, Any]:
    """Return a strategy or world as JSON-able data."""
    names = [field.name for field in dataclasses.fields(thing)]  # type: ignore[arg-type]
    values = {name: _plain(getattr(thing, name)) for name in names}
    if _is_built_in(thing):
        return {"name": thing.name, **values}
    # Without all of its fields a class cannot be created again, so its reference is useless.
    readable = _UNWRITTEN not in values.values()
    return {
        "name": thing.name,
        "from": references.reference_of(type(thing)) if readable else None,
        **values,
    }


def _is_built_in(thing: Strategy | World) -> bool:
    entry = (catalog.WORLDS if isinstance(thing, World) else catalog.SYSTEMS).get(thing.name)
    # By class and not by name alone: a user's own class may have the name of a built-in one.
    kind = type(thing)
    return entry is not None and (entry.module, entry.kind) == (kind.__module__, kind.__name__)


_UNWRITTEN = "(no message)"
"""Placeholder for the value of a field without a text form, such as a rule from a notebook."""


def _plain(value: Any) -> Any:
    # Before msgspec, which would write their fields and not their text.
    if isinstance(value, tuple(TEXTS)):
        return str(value) if can_be_read(value) else _UNWRITTEN
    try:
        return msgspec.to_builtins(value)
    except TypeError:
        return _UNWRITTEN


def decode_strategy(
    written: Mapping[str, Any], ask: ReferencePolicy = references.refuse
) -> Strategy:
    """Return the strategy that `encode` has written, from data of any origin.

    ask: returns the reference to follow for a reference in the data, or raises; by default all are
    refused. Raises ValueError for names, fields or values that do not fit, and the errors of `ask`.
    """
    strategy: Strategy = _decoded(strategy_class, written, ask)
    return strategy


def decode_world(written: Mapping[str, Any], ask: ReferencePolicy = references.refuse) -> World:
    """Return the world that `encode` has written; arguments and errors as of `decode_strategy`."""
    world: World = _decoded(world_class, written, ask)
    return world


def _decoded(
    class_of: Callable[[str], type[Any]], written: Mapping[str, Any], ask: ReferencePolicy
) -> Any:
    with references.following_references(ask):
        try:
            return _decode(class_of(_reference(written)), written)
        # Values of types that the class cannot compute with, and texts with endless nesting.
        except (TypeError, OverflowError, RecursionError) as error:
            name = shown(written.get("name"))
            raise ValueError(f"the fields of {name} cannot be read: {described(error)}") from error


def is_lost(written: Mapping[str, Any]) -> bool:
    """Return whether the class exists only in the process that created the strategy or world."""
    # No entry: built in. A text: a reference. null: no other process can find the class.
    return written.get("from", "") is None or _UNWRITTEN in written.values()


def _reference(written: Mapping[str, Any]) -> str:
    name = written.get("name")
    if not isinstance(name, str):
        raise ValueError(f"the name of a strategy or world has to be a str, not {shown(name)}")
    if is_lost(written):
        raise ValueError(f"{name} was created in Python and cannot be found by name")
    if "from" not in written:
        return name
    reference = written["from"]
    # A built-in name here would find another class than `name` says.
    if not isinstance(reference, str) or not references.is_reference(reference):
        raise ValueError(f"from is {shown(reference)}, but it has to be path/to/file.py:Name")
    return reference


def _decode(kind: type[Any], written: Mapping[str, Any]) -> Any:
    # Annotations are strings; get_type_hints evaluates them.
    hints = typing.get_type_hints(kind)
    values = {key: value for key, value in written.items() if key not in ("name", "from")}
    _check_fields(kind, values)
    try:
        # The class checks its own values in __post_init__, and raises ValueError itself.
        return kind(**{key: _typed(value, hints[key]) for key, value in values.items()})
    except msgspec.ValidationError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _check_fields(kind: type[Any], names: Iterable[str]) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}{suggestion(name, known)}")


def _typed(value: Any, hint: Any) -> Any:
    # A value with a text form has its own parser; msgspec checks all other types.
    parse = _reader(hint)
    # None, for an optional field.
    if parse is None or (value is None and hint not in TEXTS):
        return msgspec.convert(value, hint if parse is None else None)
    return parse(msgspec.convert(value, str))


def _reader(hint: Any) -> Callable[[str], Any] | None:
    """Return the parser of a field of this type; None if the type has no text form."""
    # Also of a union such as DPSGD | None.
    kinds = [one for one in (hint, *typing.get_args(hint)) if one in TEXTS]
    return TEXTS[kinds[0]] if kinds else None


def parse_strategy(text: str) -> Strategy:
    """Return the strategy of a text "name" or "name,field=value,…", as in `dure compare`.

    For example "fed-avg,clients=20". The name may be a reference: "my_systems.py:FedNova". Values
    are JSON unless the field is a text; null and None are None. A mesh is written by its degrees:
    "parallel,data=2,pipeline=2". Raises ValueError for malformed text or unknown names.
    """
    kind = strategy_class(text.partition(",")[0])
    strategy: Strategy = _decode(kind, _read(kind, text))
    return strategy


def parse_world(text: str) -> World:
    """Return the world of a text, as `parse_strategy`: "simulated,devices=stragglers:0.1:10"."""
    kind = world_class(text.partition(",")[0])
    world: World = _decode(kind, _read(kind, text))
    return world


def _read(kind: type[Any], text: str) -> dict[str, Any]:
    """Return the form of `encode` for the text "name,field=value,…"."""
    name, *settings = split_settings(text)
    hints = typing.get_type_hints(kind)
    written: dict[str, Any] = {"name": name}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: write a setting as field=value, not {setting!r}")
        # data=2 is short for an entry of the field mesh, if the strategy has one.
        of_mesh = field in AXES and "mesh" in hints
        if of_mesh and not isinstance(written.setdefault("mesh", {}), dict):
            raise ValueError(f"{text!r}: give a mesh either by its degrees or by mesh=, not both")
        if not of_mesh:
            _check_fields(kind, [field])
        try:
            # An axis of a mesh has no type hint of its own: its degree is read as JSON.
            read = _value(value, hints.get(field))
        except msgspec.DecodeError:
            raise ValueError(f"{text!r}: {field} cannot be {value!r}") from None
        if of_mesh:
            written["mesh"][field] = read
        else:
            written[field] = read
    return written


def _value(text: str, hint: Any) -> Any:
    """Return a field's value in JSON form. Raises msgspec.DecodeError for malformed text."""
    # Also for text fields: "None" as in Python, "null" as in JSON.
    if text in ("None", "null"):
        return None
    if typing.get_origin(hint) is tuple and str in typing.get_args(hint):
        # A JSON list of texts, or a single text without quotes.
        return msgspec.json.decode(text.encode()) if text.startswith("[") else [text]
    return text if _is_text(hint) else msgspec.json.decode(text.encode())


def split_settings(text: str) -> list[str]:
    """Split a text at its commas, except for commas inside brackets."""
    # The commas in mesh={"data":2,"pipeline":2} do not separate settings.
    parts = [""]
    depth = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        # Below 0 too: a surplus closing bracket must not join all that follows.
        if sign == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _is_text(hint: Any) -> bool:
    """Return whether a field of this type is written as bare text, and not as JSON."""
    # The words of a Literal, or the parts of a union such as str | None.
    inner = typing.get_args(hint)
    return (
        hint is str
        or _reader(hint) is not None
        or any(word is str or isinstance(word, str) for word in inner)
    )

"""The lists of systems and worlds, and how they are written down: a dataclass to JSON and back.

    {"name": "fed-avg", "clients": 100, "fraction": 0.1, …, "partition": "label-shards:2"}

Fields keep their names; what has a text form, a partition or a compression, is written as its text.
What is written is read again by the types of the dataclass's fields, so a run folder says exactly
what was asked.

A strategy or a world of a user's own has one more entry, `from`: the reference by which its class
is found (`dure.references`), or null where no other process could find it. Fields may hold
references too, such as a partition.

`parse_strategy` and `parse_world` read the user's own text, and import what it refers to.
`decode_strategy` and `decode_world` read data, of a folder or of a server: they import nothing of
a user's own, unless the caller says which references may be followed.
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
from dure.contracts.strategy import Strategy, World
from dure.data import partition
from dure.data.partition import Partition
from dure.errors import described, suggestion
from dure.federated import aggregate
from dure.federated.aggregate import Aggregator
from dure.federated.privacy.choice import Privacy, parse_privacy
from dure.federated.server import sampling
from dure.federated.server.sampling import Selection
from dure.fleet.arrival import Arrival, parse_arrival
from dure.fleet.attacks import Attack, parse_attack
from dure.fleet.availability import Availability, parse_availability
from dure.fleet.devices import Devices, parse_devices
from dure.fleet.energy import Energy, parse_energy
from dure.memory.offload.wanted import Offload, parse_offload
from dure.memory.recompute import Recompute, as_recompute
from dure.parallel.mesh.mesh import AXES
from dure.parallel.tensor.written_plan import TensorPlan
from dure.privacy.dp_sgd import DPSGD, parse_dp_sgd
from dure.references import Ask
from dure.run.asked import not_an_object
from dure.settings import can_be_read
from dure.split.leakage import Defence, parse_defence
from dure.worlds.launched import under_torchrun
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
"""Types of fields that are written as text, and what reads it."""


def strategy_class(name: str) -> type[Strategy]:
    """The strategy called `name`, or the one that a reference finds.

    Raises ValueError with the nearest name if there is none.
    """
    return _class("strategy", name, catalog.SYSTEMS, Strategy)


def world_class(name: str) -> type[World]:
    """The world called `name`, or the one that a reference finds.

    Raises ValueError with the nearest name if there is none.
    """
    return _class("world", name, catalog.WORLDS, World)


def _class(
    what: str, name: str, known: Mapping[str, catalog.System | catalog.World], base: type[Base]
) -> type[Base]:
    # A reference has a colon, which no name of dure's own has.
    if references.is_reference(name):
        return references.load(name, base)
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}{suggestion(name, known)}")
    # The catalog knows modules by name alone; only this one is imported.
    entry = known[name]
    found: type[Base] = getattr(importlib.import_module(entry.module), entry.kind)
    return found


def default_world(strategy: Strategy) -> World:
    """Where a strategy lives if nothing is said.

    The torchrun job if there is one, this machine otherwise.
    """
    check_kind(strategy, Strategy)
    # Also under torchrun, where the world itself says that it is one process.
    if strategy.kind == "clients":
        return world_class("simulated")()
    # Ranks are there already: a strategy that can live in them does.
    if under_torchrun() and "ranks" in strategy.dwellings():
        return world_class("torchrun")()
    if strategy.kind == "threads":
        return world_class("threads")()
    return Processes(strategy.ranks)


def check_kind(thing: Any, base: type[Strategy] | type[World]) -> None:
    """Raises ValueError if the thing is no strategy, or no world.

    A user's own may have been written without the base class, or without its name.
    """
    name = type(thing).__name__
    meant = not_an_object(thing, base.__name__)
    if meant is not None:
        raise ValueError(meant)
    if not isinstance(thing, base) or not dataclasses.is_dataclass(thing):
        raise ValueError(
            f"{name} is no dure.{base.__name__}: derive its class from dure.{base.__name__}, as a "
            f"frozen dataclass, and give an instance"
        )
    # What the base class declares without a value, each subclass has to give.
    missing = [one for one in base.__annotations__ if not hasattr(thing, one)]
    if missing:
        raise ValueError(f"{name} does not say its {', '.join(missing)}")
    check_fields(thing)


def encode(thing: Strategy | World) -> dict[str, Any]:
    """A strategy or world as JSON-able data."""
    names = [field.name for field in dataclasses.fields(thing)]  # type: ignore[arg-type]
    values = {name: _plain(getattr(thing, name)) for name in names}
    if _is_built_in(thing):
        return {"name": thing.name, **values}
    # A class that is found but cannot be filled again is as good as lost.
    readable = _UNWRITTEN not in values.values()
    return {
        "name": thing.name,
        "from": references.reference_of(type(thing)) if readable else None,
        **values,
    }


def _is_built_in(thing: Strategy | World) -> bool:
    entry = (catalog.WORLDS if isinstance(thing, World) else catalog.SYSTEMS).get(thing.name)
    # By class and not by name alone: a user's own may have taken the name of a built-in one.
    kind = type(thing)
    return entry is not None and (entry.module, entry.kind) == (kind.__module__, kind.__name__)


_UNWRITTEN = "(has no text)"
"""What stands for the value of a field that cannot be written, such as a rule of a notebook's."""


def _plain(value: Any) -> Any:
    # Before msgspec, which would write their fields and not their text.
    if isinstance(value, tuple(TEXTS)):
        return str(value) if can_be_read(value) else _UNWRITTEN
    try:
        return msgspec.to_builtins(value)
    except TypeError:
        return _UNWRITTEN


def decode_strategy(written: Mapping[str, Any], ask: Ask = references.refuse) -> Strategy:
    """The inverse of `encode`, for data of any origin.

    ask: says which references in the data may be followed, and as what; by default none.

    Raises ValueError for names, fields or values that do not fit, and what `ask` raises.
    """
    strategy: Strategy = _decoded(strategy_class, written, ask)
    return strategy


def decode_world(written: Mapping[str, Any], ask: Ask = references.refuse) -> World:
    """The inverse of `encode`; arguments and errors as of `decode_strategy`."""
    world: World = _decoded(world_class, written, ask)
    return world


def _decoded(class_of: Callable[[str], type[Any]], written: Mapping[str, Any], ask: Ask) -> Any:
    with references.followed_as(ask):
        try:
            return _decode(class_of(_reference(written)), written)
        # Values of other types than a class computes with, and texts nested without end.
        except (TypeError, OverflowError, RecursionError) as error:
            name = shown(written.get("name"))
            raise ValueError(f"the fields of {name} cannot be read: {described(error)}") from error


def is_lost(written: Mapping[str, Any]) -> bool:
    """Whether only the one who made the strategy or world has its class."""
    # Without the entry: built in. With a text: found by it. With null: nowhere to be found.
    return written.get("from", "") is None or _UNWRITTEN in written.values()


def _reference(written: Mapping[str, Any]) -> str:
    name = written.get("name")
    if not isinstance(name, str):
        raise ValueError(f"the name of a strategy or world is a text, and not {shown(name)}")
    if is_lost(written):
        raise ValueError(f"{name} was made in Python, where only its maker finds it")
    if "from" not in written:
        return name
    reference = written["from"]
    # A name of dure's own here would be another system than the one that `name` tells.
    if not isinstance(reference, str) or not references.is_reference(reference):
        raise ValueError(f"from is {shown(reference)}, but it is path/to/file.py:Name")
    return reference


def _decode(kind: type[Any], written: Mapping[str, Any]) -> Any:
    # Annotations are texts until they are asked for in this way.
    hints = typing.get_type_hints(kind)
    values = {key: value for key, value in written.items() if key not in ("name", "from")}
    _check_fields(kind, values)
    try:
        # The class checks its own values as it is made, and raises ValueError itself.
        return kind(**{key: _typed(value, hints[key]) for key, value in values.items()})
    except msgspec.ValidationError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _check_fields(kind: type[Any], names: Iterable[str]) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}{suggestion(name, known)}")


def _typed(value: Any, hint: Any) -> Any:
    # What has a text form checks itself; msgspec checks that it is a text, and all the rest.
    parse = _reader(hint)
    # None, where a field may be without.
    if parse is None or (value is None and hint not in TEXTS):
        return msgspec.convert(value, hint if parse is None else None)
    return parse(msgspec.convert(value, str))


def _reader(hint: Any) -> Callable[[str], Any] | None:
    """What reads the text form of a field of this type; None where it has none."""
    # Of DPSGD | None, too.
    kinds = [one for one in (hint, *typing.get_args(hint)) if one in TEXTS]
    return TEXTS[kinds[0]] if kinds else None


def parse_strategy(text: str) -> Strategy:
    """A strategy from "name" or "name,field=value,…", as `dure compare` takes it.

    For example "fed-avg,clients=20". The name may be a reference: "my_systems.py:FedNova".

    Values are read as JSON where the field is no text; null and None are None. A mesh is written by
    its degrees: "parallel,data=2,pipeline=2". Raises ValueError for what does not fit.
    """
    kind = strategy_class(text.partition(",")[0])
    strategy: Strategy = _decode(kind, _read(kind, text))
    return strategy


def parse_world(text: str) -> World:
    """A world, as `parse_strategy` reads strategies: "simulated,devices=stragglers:0.1:10"."""
    kind = world_class(text.partition(",")[0])
    world: World = _decode(kind, _read(kind, text))
    return world


def _read(kind: type[Any], text: str) -> dict[str, Any]:
    """What `encode` would have written of "name,field=value,…"."""
    name, *settings = divided(text)
    hints = typing.get_type_hints(kind)
    written: dict[str, Any] = {"name": name}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: a setting is field=value, not {setting!r}")
        # data=2 is short for an entry of the field mesh, where a strategy has one.
        of_mesh = field in AXES and "mesh" in hints
        if of_mesh and not isinstance(written.setdefault("mesh", {}), dict):
            raise ValueError(f"{text!r}: a mesh is given by its degrees, or by mesh=")
        if not of_mesh:
            _check_fields(kind, [field])
        try:
            # An axis of a mesh has no hint of its own: its degree is read as JSON.
            read = _value(value, hints.get(field))
        except msgspec.DecodeError:
            raise ValueError(f"{text!r}: {field} cannot be {value!r}") from None
        if of_mesh:
            written["mesh"][field] = read
        else:
            written[field] = read
    return written


def _value(text: str, hint: Any) -> Any:
    """A field's value as JSON has it. Raises msgspec.DecodeError if it is none."""
    # Also for texts: "None" as Python writes it, "null" as JSON does.
    if text in ("None", "null"):
        return None
    if typing.get_origin(hint) is tuple and str in typing.get_args(hint):
        # Several texts are a list in JSON; one stands as it is.
        return msgspec.json.decode(text.encode()) if text.startswith("[") else [text]
    return text if _is_text(hint) else msgspec.json.decode(text.encode())


def divided(text: str) -> list[str]:
    """The text between commas, of which those inside brackets divide nothing."""
    # The commas in mesh={"data":2,"pipeline":2} divide no settings.
    parts = [""]
    depth = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        # Below 0 too: one bracket too many must not join all that follows.
        if sign == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _is_text(hint: Any) -> bool:
    """Whether a field of this type is text, or words, and not JSON."""
    # The words of a Literal, or the parts of a union such as str | None.
    inner = typing.get_args(hint)
    return (
        hint is str
        or _reader(hint) is not None
        or any(word is str or isinstance(word, str) for word in inner)
    )

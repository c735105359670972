"""Choose the world of a system named on the command line.

Flags describe the world for `dure train`, settings after the system's name for `dure compare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from dure import catalog
from dure.cli.flags import (
    NamedWorld,
    RankOptions,
    WorkerOptions,
    WorldName,
    WorldOptions,
    value_of,
)
from dure.contracts.strategy import Strategy
from dure.contracts.world import World
from dure.fleet.conditions import Conditions
from dure.run.registry import (
    default_world,
    parse_strategy,
    parse_world,
    strategy_class,
    world_class,
)
from dure.worlds.launcher_environment import under_torchrun
from dure.worlds.processes.world import Processes
from dure.worlds.simulated import Simulated
from dure.worlds.threads import Threads
from dure.worlds.torchrun.world import Torchrun

_NAMES: Mapping[str | None, WorldName | None] = {
    None: None,
    "processes": "processes",
    "threads": "threads",
}
"""Values of --world for which the flags are those of workers."""


# dure train: flags


def options_of(kind: type[Strategy], flags: Sequence[str]) -> dict[str, type[Any]]:
    """Return the flags of the world, as dataclasses by the names of their parts.

    The flags of workers, those of a simulated federation, or the fields of the world that --world
    names. Raises ValueError for flags that a world of clients does not have.
    """
    named = value_of("--world", flags)
    if named is not None and named not in _NAMES and named:
        return {"world": world_class(named), "named": NamedWorld}
    if kind.traits.kind != "clients":
        if _counts_workers(kind):
            return {"world": RankOptions}
        return {"world": WorkerOptions if _has_device(kind) else WorldOptions}
    count = value_of("--workers", flags)
    if count is not None:
        raise ValueError(f"{kind.name} counts clients, not workers: use --clients {count}")
    if named is not None:
        raise ValueError(
            f"{kind.__name__} does not run in {named.capitalize()}; it needs a world of clients, "
            "which needs no --world"
        )
    return {"world": Conditions}


_FOLLOW = {"attack": ("attackers", "attackers_change"), "engine": ("processes",)}
"""Conditions that refine another condition, and have no effect without it."""


def hidden_flags(kind: type[Strategy], world: type[Any]) -> set[str]:
    """Return flags of limits, worlds and runs that do not apply to a system, or are refused.

    world: dataclass with the flags of the world.
    """
    hidden: set[str] = set()
    # A name may have another meaning for ranks than for clients, such as deadline.
    if issubclass(world, Conditions):
        hidden |= kind.traits.without
        for name in kind.traits.without & set(_FOLLOW):
            hidden.update(_FOLLOW[name])
    hidden.add("rounds" if kind.traits.unit == "step" else "steps")
    lives = kind.traits.kinds
    if kind.traits.kind != "clients" and not kind.traits.coordinated:
        # A single worker is a single process, so its number and place cannot be chosen.
        if kind.traits.alone:
            hidden |= {"workers", "world", "devices", "deadline", "backend", "bytes"}
        if "threads" not in lives:
            hidden.add("devices")
        if not {"ranks", "threads"} <= set(lives):
            hidden.add("world")
        if "ranks" not in lives:
            hidden |= {"device", "deadline", "backend"}
    # The check tests a strategy's assumptions about a model; this strategy has none.
    if kind.prove is Strategy.prove:
        hidden.add("check")
    return hidden


def world_of(strategy: Strategy, given: Any) -> World:
    """Return the world that the flags describe."""
    if isinstance(given, World):
        return given
    if isinstance(given, RankOptions):
        asked = WorldOptions(device=given.device, deadline=given.deadline, backend=given.backend)
        return _of_workers(strategy, asked)
    if isinstance(given, WorldOptions):
        return _of_workers(strategy, given)
    if isinstance(given, WorkerOptions):
        return _of_workers(strategy, WorldOptions(**vars(given)))
    return Simulated(**{field.name: getattr(given, field.name) for field in fields(given)})


def _counts_workers(kind: type[Strategy]) -> bool:
    """Return whether the strategy's own fields set the number of ranks."""
    return kind.traits.coordinated


def _has_device(kind: type[Strategy]) -> bool:
    """Return whether the strategy's own fields set the device."""
    return "device" in {field.name for field in fields(kind)}  # type: ignore[arg-type]


def _worker_field(kind: type[Strategy]) -> str:
    """Return the field with the number of workers of a strategy that counts them itself."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return "workers" if "workers" in names else "replicas"


# dure compare: settings


def entry(system: str, workers: int | None) -> tuple[Strategy, World]:
    """Return the strategy and the world of a system with its settings.

    For example "data-parallel,world=threads", "fed-avg,clients=20,drop_out=0.1", or
    "fed-avg,world=my_worlds.py:Slow,seconds=3".

    workers: number for systems with workers. Raises ValueError for invalid settings.
    """
    name, *settings = system.split(",")
    kind = strategy_class(name)
    # A strategy with a field for its workers gets the number too, unless its settings have it.
    if workers is not None and _counts_workers(kind):
        counting = _worker_field(kind)
        if not any(text.startswith(f"{counting}=") for text in settings):
            settings.insert(0, f"{counting}={workers}")
    named = _world_named(kind, settings)
    others = [text for text in settings if not text.startswith("world=")]
    if named is None or named in _NAMES:
        device = WorldOptions().device
        if not _has_device(kind):
            for text in [text for text in others if text.startswith("device=")]:
                others.remove(text)
                device = text[len("device=") :]
        strategy = parse_strategy(",".join([name, *others]))
        # A common --workers applies to a whole comparison, in which some systems do not use it.
        alone = kind.traits.kind == "clients" or kind.traits.alone or _counts_workers(kind)
        options = WorldOptions(
            workers=None if alone else workers, world=_NAMES[named], device=device
        )
        return strategy, _of_workers(strategy, options)
    if kind.traits.kind != "clients" and ":" not in named and not _lives_with_clients(kind, named):
        raise ValueError(f"{system!r}: the world has to be threads, processes, or your own class")
    # A setting that both have is the strategy's; an unknown one is reported as the strategy's.
    of_strategy = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    of_world = {field.name for field in fields(world_class(named))} - of_strategy  # type: ignore[arg-type]
    where = [text for text in others if text.partition("=")[0] in of_world]
    own = [text for text in others if text not in where]
    return parse_strategy(",".join([name, *own])), parse_world(",".join([named, *where]))


def settings_of(system: str) -> dict[str, Any]:
    """Return the possible settings behind the system's name, and their defaults, without "world".

    They include the fields of its world, if that is a world of clients or is named. None means that
    there is no default.
    """
    name, *settings = system.split(",")
    kind = strategy_class(name)
    named = _world_named(kind, settings)
    kinds: list[Any] = [kind] if named in _NAMES else [world_class(named or ""), kind]
    device = {} if named not in _NAMES or _has_device(kind) else {"device": WorldOptions().device}
    return device | {
        field.name: None if field.default is MISSING else field.default
        for each in kinds
        for field in fields(each)
    }


def _world_named(kind: type[Strategy], settings: Sequence[str]) -> str | None:
    """Return the world that settings name; for systems of clients by default "simulated"."""
    # After "world=".
    named = next((text[6:] for text in settings if text.startswith("world=")), None)
    return "simulated" if named is None and kind.traits.kind == "clients" else named


def _lives_with_clients(kind: type[Strategy], named: str) -> bool:
    """Return whether this is a world of clients that the strategy supports."""
    world = catalog.WORLDS.get(named)
    return world is not None and world.lives == "clients" and "clients" in kind.traits.kinds


def _of_workers(strategy: Strategy, asked: WorldOptions) -> World:
    """Return the world of the flags --workers, --deadline, --backend, --world and --devices."""
    workers = asked.workers
    world = asked.world
    # By default, the strategy's own kind of world.
    if world is None:
        world = "threads" if default_world(strategy).kind == "threads" else "processes"
    if world == "threads":
        # Only a backend that differs from the default was certainly requested.
        if asked.backend != WorldOptions().backend:
            raise ValueError(
                f"--backend {asked.backend} connects processes, and threads do not need it: leave "
                "it out"
            )
        if asked.device != WorldOptions().device:
            raise ValueError(
                f"--device {asked.device} sets where processes compute: for threads write "
                f"--devices {asked.device}"
            )
        return Threads(workers, asked.devices or None)
    if asked.devices:
        raise ValueError(
            "--devices sets where threads compute: add --world threads, or use --device, which "
            "sets where processes compute"
        )
    if under_torchrun():
        # Under torchrun the number of ranks is fixed; --workers may only agree with it.
        job = Torchrun(asked.deadline, asked.backend, device=asked.device)
        if workers not in (None, job.workers):
            raise ValueError(
                f"--workers is {workers}, but torchrun has started {job.workers} workers: leave "
                "it out"
            )
        return job
    if strategy.traits.alone and workers not in (None, 1):
        raise ValueError(
            f"{strategy.name} has one worker: leave out --workers {workers}, or use data-parallel"
        )
    return Processes(
        workers if workers is not None else strategy.run_traits.ranks,
        asked.deadline,
        asked.backend,
        asked.device,
    )

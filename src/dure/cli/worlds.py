"""Where a system trains that was named on the command line: its world, of flags or of settings in
its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from dure import catalog
from dure.cli.flags import WorldName, WorldOptions
from dure.contracts.strategy import Strategy, World
from dure.fleet.conditions import Conditions
from dure.run.registry import default_world, parse_strategy, parse_world, ranks_of, strategy_class
from dure.worlds.backend import Backend
from dure.worlds.here import under_torchrun
from dure.worlds.processes.world import Processes
from dure.worlds.simulated import Simulated
from dure.worlds.threads import Threads
from dure.worlds.torchrun.world import Torchrun

CONDITIONS = {field.name for field in fields(Conditions)}


# dure train: flags


def conditions_for(system: str, flags: Sequence[str]) -> type[Conditions]:
    """The flags of a simulated federation. Raises ValueError for those of workers, which it has
    not."""
    for flag, following in zip(flags, [*flags[1:], ""], strict=True):
        if flag.partition("=")[0] == "--workers":
            count = flag.partition("=")[2] or following
            raise ValueError(f"{system} counts clients, not workers: use --clients {count}")
        if flag.partition("=")[0] == "--world":
            given = (flag.partition("=")[2] or following).capitalize()
            name = catalog.SYSTEMS[system][1]
            raise ValueError(
                f"{name} does not live in {given}; it needs a world of clients, which needs no "
                f"--world"
            )
    return Conditions


def world_of(strategy: Strategy, given: Any) -> World:
    """The world that the flags describe."""
    if isinstance(given, WorldOptions):
        return _of_workers(
            strategy, given.workers, given.deadline, given.backend, given.world, given.devices
        )
    return Simulated(**{field.name: getattr(given, field.name) for field in fields(given)})


# dure compare: settings


def entry(system: str, workers: int | None) -> tuple[Strategy, World]:
    """What a system with its settings names: "data-parallel,world=threads",
    "fed-avg,clients=20,drop_out=0.1".

    workers: of systems that have them. Raises ValueError for what does not fit.
    """
    name, *settings = system.split(",")
    in_clients = strategy_class(name).kind == "clients"
    of_world = {"world", *(CONDITIONS if in_clients else ())}
    own = [setting for setting in settings if setting.partition("=")[0] not in of_world]
    where = [setting for setting in settings if setting not in own]
    strategy = parse_strategy(",".join([name, *own]))
    if in_clients and not any(setting.startswith("world=") for setting in where):
        return strategy, parse_world(",".join(["simulated", *where]))
    world: WorldName | None = None
    for setting in where:
        if setting not in ("world=threads", "world=processes"):
            raise ValueError(f"{system!r}: the world is threads or processes")
        world = "threads" if setting == "world=threads" else "processes"
    alone = in_clients or strategy.name == "single-worker"
    return strategy, _of_workers(strategy, None if alone else workers, world=world)


def _of_workers(
    strategy: Strategy,
    workers: int | None,
    deadline: float = 60.0,
    backend: Backend = "dure",
    world: WorldName | None = None,
    devices: tuple[str, ...] = (),
) -> World:
    """The world of the flags --workers, --deadline, --backend, --world and --devices."""
    if world is None:
        world = "threads" if default_world(strategy).kind == "threads" else "processes"
    if world == "threads":
        if backend != WorldOptions().backend:
            raise ValueError(
                f"--backend {backend} carries bytes between ranks, which threads are not: leave it "
                f"out"
            )
        return Threads(workers, devices or None)
    if devices:
        raise ValueError("--devices says where threads compute: add --world threads")
    if under_torchrun():
        job = Torchrun(deadline, backend)
        if workers not in (None, job.workers):
            raise ValueError(
                f"--workers is {workers}, but torchrun has started {job.workers}: leave it out"
            )
        return job
    if strategy.name == "single-worker":
        if workers not in (None, 1):
            raise ValueError(
                f"single-worker is one worker: leave out --workers {workers}, or take data-parallel"
            )
        return Processes(1, deadline, backend)
    return Processes(workers if workers is not None else ranks_of(strategy), deadline, backend)

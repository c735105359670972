"""Environment variables that a launcher such as torchrun sets for each process.

An interactive cluster job may leave some of the variables behind. A single variable therefore means
nothing, and a complete set with inconsistent values raises an error that names the variables. This
module does not import torch: the command line calls it first.

Source: PyTorch, "torchrun (Elastic Launch)" and "Environment variable initialization".
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_SAY_SO = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Variables that are all set in a process that a launcher has started."""

UNSET = "start it by torchrun, or unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
"""Remedy for inconsistent variables."""


@dataclass(frozen=True)
class LauncherJob:
    """Process of a launcher's job.

    Args:
        rank: Rank of the process.
        size: Number of ranks.
        address: Host name of the rendezvous.
        port: Port of the rendezvous.
        here: Number of ranks on this machine.
        local_rank: Rank of the process among those of this machine.
        restarts: Number of times that the launcher restarts the ranks.
    """

    rank: int
    size: int
    address: str
    port: int
    here: int
    local_rank: int
    restarts: int


def under_torchrun() -> bool:
    """Return whether torchrun, or a launcher with the same variables, started this process."""
    return all(name in os.environ for name in _SAY_SO)


def launcher_job() -> LauncherJob:
    """Parse the launcher's variables. Raises ValueError, which names inconsistent variables."""
    if not under_torchrun():
        raise ValueError(
            "this process was not started by torchrun: use `torchrun --nproc-per-node 2 -m dure "
            "train …`"
        )
    size = _number("WORLD_SIZE", 1)
    return LauncherJob(
        rank=_number("RANK", 0, size - 1),
        size=size,
        address=os.environ["MASTER_ADDR"],
        port=_number("MASTER_PORT", 0, 65_535),
        here=_number("LOCAL_WORLD_SIZE", 1, default="1"),
        local_rank=_number("LOCAL_RANK", 0, default="0"),
        restarts=_number("TORCHELASTIC_MAX_RESTARTS", 0, default="0"),
    )


def is_leader_process() -> bool:
    """Return whether this process talks to the user: rank 0 under torchrun, else every process."""
    return not under_torchrun() or launcher_job().rank == 0


def refuse_under_torchrun(world: str) -> None:
    """Refuse a launch with several ranks of a world of a single process.

    The ranks would all do the same work and write the same files. Raises ValueError.
    """
    if under_torchrun() and (size := launcher_job().size) > 1:
        raise ValueError(
            f"torchrun has started {size} ranks, but {world} has one: start it without torchrun; "
            f"if torchrun was not used, unset {', '.join(_SAY_SO)}"
        )


def _number(name: str, least: int, most: int | None = None, default: str | None = None) -> int:
    """Return an integer variable within bounds. Raises ValueError, which names the variable."""
    text = os.environ.get(name, default)
    if text is None:
        raise ValueError(
            f"the variables {', '.join(_SAY_SO)} are set by a launcher such as torchrun, but "
            f"{name} is not set: {UNSET}"
        )
    bounds = f"at least {least}" if most is None else f"{least} to {most}"
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        raise ValueError(
            f"the variable {name} is {text!r}, but has to be an integer, {bounds}: {UNSET}"
        )
    return number

"""What a launcher such as torchrun tells each process that it starts, by variables.

An interactive job of a cluster may leave some of them behind. So one alone says nothing, and a
whole set that fits no job is refused by the names of its variables. torch is not imported here: the
command line asks before it is.

Source: PyTorch, "torchrun (Elastic Launch)" and "Environment variable initialization".
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_SAY_SO = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Variables of which all have to be there for a process to have been launched."""

UNSET = "start it by torchrun, or unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
"""What to do where the variables are wrong."""


@dataclass(frozen=True)
class Launched:
    """A process of a launcher's job.

    here: ranks on this machine. restarts: how often the launcher starts them again.
    """

    rank: int
    size: int
    address: str
    port: int
    here: int
    restarts: int


def under_torchrun() -> bool:
    """Whether torchrun (or whoever sets the same variables) has started this process."""
    return all(name in os.environ for name in _SAY_SO)


def launched() -> Launched:
    """What the variables say. Raises ValueError, by their names, where no job is like that."""
    if not under_torchrun():
        raise ValueError(
            "this process was not started by torchrun: use `torchrun --nproc-per-node 2 -m dure "
            "train …`"
        )
    size = _number("WORLD_SIZE", 1)
    return Launched(
        rank=_number("RANK", 0, size - 1),
        size=size,
        address=os.environ["MASTER_ADDR"],
        port=_number("MASTER_PORT", 0, 65_535),
        here=_number("LOCAL_WORLD_SIZE", 1, default="1"),
        restarts=_number("TORCHELASTIC_MAX_RESTARTS", 0, default="0"),
    )


def leads_here() -> bool:
    """Whether this process is the one that talks to the user: of those of torchrun, rank 0."""
    return not under_torchrun() or launched().rank == 0


def refuse_under_torchrun(world: str) -> None:
    """Raises ValueError where N processes would each do the same work and write the same files."""
    if under_torchrun() and (size := launched().size) > 1:
        raise ValueError(
            f"torchrun has started {size} ranks, and {world} is one: start it without; if nobody "
            f"has started them, unset {', '.join(_SAY_SO)}"
        )


def _number(name: str, least: int, most: int | None = None, default: str | None = None) -> int:
    """A variable that is a whole number within these bounds. Raises ValueError with its name."""
    text = os.environ.get(name, default)
    if text is None:
        raise ValueError(
            f"the variables {', '.join(_SAY_SO)} say that a launcher has started this process, and "
            f"{name} is not set: {UNSET}"
        )
    bounds = f"at least {least}" if most is None else f"{least} to {most}"
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        raise ValueError(
            f"the variable {name} is {text!r}, where a job has a whole number, {bounds}: {UNSET}"
        )
    return number

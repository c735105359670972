"""Whether a run fits into memory: asked before it starts, and refused with what would do.

    least a worker needs    its shares of weights, gradients and optimizer's state
    what there is           the least that a limit leaves (`dure.machine.limits`)

Activations are left out, which differ from batch to batch: what is refused cannot fit, and what is
not refused may yet be too much. What is said to do has at least a tenth to spare for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from torch import nn

from dure.contracts.strategy import Strategy, World
from dure.contracts.task import Task
from dure.machine.limits import Room, rooms
from dure.memory.formula import WHOLE, Need, Shares, by_zero, bytes_of, divided, need_of
from dure.memory.mapped import is_mapped

_MOST = 1024
"""Ranks of which one is said to do."""

_SPARE = Fraction(9, 10)
"""The part of what there is that may be needed where something is said to do."""

_MANY = 16
"""No optimizer keeps as many numbers for a weight: with less than this nothing is asked."""


def check_fits(task: Task, strategy: Strategy, world: World, model: nn.Module) -> None:
    """Raises ValueError if training the model cannot fit into the memory that there is.

    Asks nothing of strategies that do not say what their workers hold.
    """
    shares = strategy.shares(world.workers)
    if shares is None:
        return
    here = rooms()
    if all(bytes_of(model) * _MANY < room.nbytes for room in here):
        return
    need = need_of(model, task.optimizer)
    holds = _held_by(model)
    # Processes of this machine have its memory together. Others may be anywhere.
    count = (world.workers or 1) if world.elsewhere else 1
    for room in here:
        free = room.most + (0 if room.shared and world.elsewhere else holds)
        least = _needed(need, shares.without(strategy.offloaded), room, count)
        if least > free:
            raise ValueError(_refusal(need, shares, strategy, room, free, least, count))


def _held_by(model: nn.Module) -> int:
    """Bytes of memory that the model has already, which are those that it needs."""
    held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()) if is_mapped(one))
    return bytes_of(model) - held


def _needed(need: Need, shares: Shares, room: Room, count: int) -> int:
    """Bytes of a room that so many workers of these shares take."""
    own = need.of(shares).total
    # Where the model lies in files until it is divided, it is addressed as a whole.
    own = max(own, need.weights) if room.addressed else own
    return own * (count if room.shared else 1)


def _refusal(
    need: Need, shares: Shares, strategy: Strategy, room: Room, free: int, least: int, count: int
) -> str:
    own = need.of(shares.without(strategy.offloaded))
    who = f"each of {count} workers" if count > 1 else "the worker"
    parts = ", ".join(
        f"{what} {_size(nbytes)}"
        for what, nbytes in zip(
            ("weights", "gradients", "optimizer's state"), own, strict=True
        )
        if nbytes
    )
    together = f", {_size(least)} together" if least > own.total else ""
    ways = list(_ways(need, shares, strategy, room, free))
    would = f": {'; or '.join(ways)} would do" if ways else ": no division of it would do"
    return (
        f"the run does not fit into memory: {who} needs {_size(own.total)} and the activations "
        f"({parts}){together}, and there are {_size(free)}, {room.whose}{would}"
    )


def _ways(
    need: Need, shares: Shares, strategy: Strategy, room: Room, free: int
) -> Iterator[str]:
    """What would fit, in the words of the command line."""
    most = int(free * _SPARE)
    # What one machine has together is not more if more ranks share it.
    where = ", each on a machine of its own," if room.shared else ""
    for name, over in (("tensor-parallel or pipeline", divided), ("zero --stage 3", _zero)):
        ranks = next((n for n in _counts() if _needed(need, over(n), room, 1) <= most), None)
        if ranks is not None:
            yield f"{name} with --workers {ranks}{where} ({_size(need.of(over(ranks)).total)} each)"
    for parts in _offloads(strategy):
        if _needed(need, shares.without(parts), room._replace(addressed=False), 1) <= most:
            if not room.addressed:
                yield f"--offload {','.join(parts)}"
                return


def _zero(ranks: int) -> Shares:
    return by_zero(3, ranks)


def _counts() -> Iterator[int]:
    """2, 4, 8, ...: layers and heads are seldom divided by others."""
    count = 2
    while count <= _MOST:
        yield count
        count *= 2


def _offloads(strategy: Strategy) -> Iterator[tuple[str, ...]]:
    """What the strategy might have elsewhere, the least first."""
    wanted: tuple[str, ...] = ()
    for part in strategy.can_offload:
        wanted = (*wanted, part)
        yield wanted


def _size(nbytes: int) -> str:
    """Bytes as people read them."""
    unit, name = (1e9, "GB") if nbytes >= 1e9 else (1e6, "MB")
    return f"{nbytes / unit:.3g} {name}"

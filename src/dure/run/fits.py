"""Whether a run fits into memory: asked before it starts, and refused with what would do.

    least a worker needs    its shares of weights, gradients and optimizer's state, and what an
                            update makes on its way
    what there is           the least that a limit leaves (`dure.machine.limits`)

Activations are left out, which differ from batch to batch: what is refused cannot fit, and what is
not refused may yet be too much. What is said to do has a tenth to spare for them, and 64 MB for
threads and what they load, or 192 MB in a rank, which may have to trace the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dure.contracts.strategy import Strategy, World
from dure.contracts.task import Task
from dure.machine.compiler import left_out
from dure.machine.limits import Room, rooms
from dure.machine.memory import free_in_heap, give_back
from dure.memory.formula import Need, Shares, bytes_of, divided, need_of, tensors_of
from dure.memory.mapped import LEAST, is_mapped

_MOST = 1024
"""Ranks of which one is said to do."""

_SPARE = Fraction(9, 10)
"""The part of what there is that may be needed where something is said to do."""

_BESIDES = 64 << 20
"""Bytes that the model may not need where something is said to do: stacks of threads, buffers of
libraries."""

_BESIDES_OF_RANK = 192 << 20
"""The same in ranks, which may have to import torch.export."""

_PARTS = ("weights", "gradients", "optimizer's state", "update")
"""What a worker needs, in words."""

_MANY = 16
"""No optimizer keeps as many numbers for a weight: with less than this nothing is asked."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises MemoryError for a tensor that is larger than what is left, before it is written."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.device.type == "cpu" and result.nbytes >= LEAST:
            left = min((room.most for room in rooms() if room.kills), default=result.nbytes)
            # Not what is only looked at: a view, or a tensor that is changed in place.
            if result.nbytes > left and not any(result is one for one in args):
                raise MemoryError
        return result


@contextmanager
def _watched() -> Iterator[None]:
    # The first mode of a process would load the compiler, which takes seconds.
    with left_out(), _Watch():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def made_in_memory() -> Iterator[None]:
    """Around what makes the model. Raises ValueError where there is no memory for it at all."""
    # Who asks a control group for too much is killed, and told nothing.
    killed = any(room.kills for room in rooms())
    try:
        with _watched() if killed else nullcontext():
            yield
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for this.
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        least = min(rooms(), key=lambda room: room.most, default=None)
        whose = "" if least is None else f", of which {least.whose} leaves {_size(least.most)}"
        raise ValueError(
            f"the model cannot be made in memory{whose}: take pipeline, tensor-parallel or zero "
            f"--stage 3 with --workers N, whose ranks hold a part of it each"
        ) from error


def check_fits(task: Task, strategy: Strategy, world: World, model: nn.Module) -> None:
    """Raises ValueError if training the model cannot fit into the memory that there is.

    Asks nothing of strategies that do not say what their workers hold.
    """
    shares = strategy.shares(world.workers)
    # A GPU has memory of its own.
    elsewhere = [*strategy.computes_on, *world.computes_on]
    if shares is None or any(name != "cpu" for name in elsewhere):
        return
    if all(bytes_of(tensors_of(model)) * _MANY < room.nbytes for room in rooms()):
        return
    need = need_of(model, task.optimizer)
    # Processes of this machine have its memory together. Others may be anywhere.
    count = (world.workers or 1) if world.elsewhere else 1
    # What earlier runs have left free counts as used until it is given back.
    give_back()
    for room in rooms():
        # What this process has of it makes way for the workers, or is the worker's.
        free = room.most + held_by(model, room.addressed)
        free += 0 if room.shared else free_in_heap()
        least = _needed(need, _lying_in(room, shares, strategy.offloaded), room, count)
        if least > free:
            raise ValueError(_refusal(need, shares, strategy, room, free, least, count))


def held_by(model: nn.Module, addressed: bool) -> int:
    """Bytes that the model has already in this process, which are those that it needs.

    addressed: also those of what lies in files.
    """
    there = [one for one in tensors_of(model) if not one.is_meta]
    return bytes_of(one for one in there if addressed or not is_mapped(one))


def _lying_in(room: Room, shares: Shares, offloaded: Collection[str]) -> Shares:
    """Those that count in a room: what lies in files is addressed as ever."""
    return shares if room.addressed else shares.without(offloaded)


def _needed(need: Need, shares: Shares, room: Room, count: int) -> int:
    """Bytes of a room that so many workers of these shares take."""
    own = need.of(shares).total
    # Where the model lies in files until it is divided, it is addressed as a whole.
    own = max(own, need.weights) if room.addressed else own
    return own * (count if room.shared else 1)


def _refusal(
    need: Need, shares: Shares, strategy: Strategy, room: Room, free: int, least: int, count: int
) -> str:
    own = need.of(_lying_in(room, shares, strategy.offloaded))
    who = f"each of {count} workers" if count > 1 else "the worker"
    parts = ", ".join(
        f"{what} {_size(nbytes)}" for what, nbytes in zip(_PARTS, own, strict=True) if nbytes
    )
    together = f", {_size(least)} together" if least > own.total else ""
    ways = list(_ways(need, shares, strategy, room, free, count))
    would = f": {'; or '.join(ways)} would do" if ways else ": no division of it would do"
    return (
        f"the run does not fit into memory: {who} needs {_size(own.total)} and the activations "
        f"({parts}){together}, and there are {_size(free)}, {room.whose}{would}"
    )


def _ways(
    need: Need, shares: Shares, strategy: Strategy, room: Room, free: int, count: int
) -> Iterator[str]:
    """What would fit, in the words of the command line."""
    here, in_rank = (
        min(int(free * _SPARE), free - besides) for besides in (_BESIDES, _BESIDES_OF_RANK)
    )
    # What one machine has together is not more if more ranks share it.
    where = ", each on a machine of its own" if room.shared else ""
    for name, over in (("tensor-parallel or pipeline", divided), ("zero --stage 3", _zero)):
        ranks = next(
            (n for n in _counts() if _needed(need, over(n), room, 1) <= in_rank),
            None,
        )
        if ranks is not None:
            yield f"{name} with --workers {ranks}{where} ({_size(need.of(over(ranks)).total)} each)"
    for parts in _offloads(strategy):
        if _needed(need, _lying_in(room, shares, parts), room, count) <= here:
            yield f"--offload {','.join(parts)}"
            return


def _zero(ranks: int) -> Shares:
    return divided(1, 3, ranks)


def _counts() -> Iterator[int]:
    """2, 4, 8, ...: layers and heads are seldom divided by others."""
    count = 2
    while count <= _MOST:
        yield count
        count *= 2


def _offloads(strategy: Strategy) -> Iterator[tuple[str, ...]]:
    """What the strategy might have elsewhere: one part more each time."""
    wanted = tuple(strategy.offloaded)
    for part in strategy.can_offload:
        if part in wanted:
            continue
        wanted = (*wanted, part)
        yield wanted


def _size(nbytes: int) -> str:
    """Bytes as people read them."""
    unit, name = (1e9, "GB") if nbytes >= 1e9 else (1e6, "MB")
    return f"{nbytes / unit:.3g} {name}"

"""Check before a run that it fits into memory, and suggest settings that fit.

    least a worker needs    its shares of weights, gradients and optimizer state, and the
                            temporaries of an update
    free memory             the least that any limit leaves (`dure.machine.limits`)

Activations differ from batch to batch and are left out: a refused run cannot fit, and an accepted
run may still need too much. A suggestion leaves a tenth of the free memory for activations, and
64 MB for threads and libraries, or 192 MB in a rank, which may have to trace the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.machine.compiler import deferred_compiler
from dure.machine.limits import RemainingMemory, remaining_memory
from dure.machine.memory import free_in_heap, trim_heap
from dure.memory.formula import (
    MemoryShares,
    TrainingMemory,
    bytes_of,
    divided_shares,
    tensors_of,
    training_memory_of,
)
from dure.memory.mapped import LEAST, is_mapped
from dure.run.device_memory_check import check_fits_devices

_MOST = 1024
"""Most ranks that a suggestion may name."""

_SPARE = Fraction(9, 10)
"""Share of the free memory that a suggestion may use."""

_BESIDES = 64 << 20
"""Bytes beside the model in a suggestion: stacks of threads, buffers of libraries."""

_BESIDES_OF_RANK = 192 << 20
"""Bytes beside the model in ranks, which may have to import torch.export."""

_PARTS = ("weights", "gradients", "optimizer's state", "update")
"""Names of the parts of `TrainingMemory`, in words."""

_MANY = 16
"""Bound on the numbers per weight of any optimizer: models far below the limits skip the check."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises MemoryError for a new tensor above the free memory, before its pages are written."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.device.type == "cpu" and result.nbytes >= LEAST:
            left = min(
                (room.most for room in remaining_memory() if room.kills), default=result.nbytes
            )
            # New tensors only: neither a view nor a tensor that is changed in place.
            if result.nbytes > left and not any(result is one for one in args):
                raise MemoryError
        return result


@contextmanager
def _watched() -> Iterator[None]:
    # The first dispatch mode of a process would load the compiler, which takes seconds.
    with deferred_compiler(), _Watch():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def made_in_memory() -> Iterator[None]:
    """Context manager around the model's factory. Raises ValueError if memory is too small."""
    # The kernel kills a process above its control group's limit without an exception.
    killed = any(room.kills for room in remaining_memory())
    try:
        with _watched() if killed else nullcontext():
            yield
    except (MemoryError, RuntimeError) as error:
        # torch has no exception class of its own for a failed allocation on the CPU.
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        least = min(remaining_memory(), key=lambda room: room.most, default=None)
        whose = "" if least is None else f", of which {least.whose} allows {_size(least.most)}"
        raise ValueError(
            f"the model does not fit into memory{whose}: use pipeline, tensor-parallel or zero "
            "--stage 3 with --workers N, where each rank holds a part of the model"
        ) from error


def check_fits(task: Task, strategy: Strategy, world: World, model: nn.Module) -> None:
    """Raise ValueError if training the model cannot fit into memory, here or on accelerators.

    Skips strategies that do not declare the shares of their workers.
    """
    check_fits_devices(task, strategy, world, model, _refusal_on_device)
    shares = strategy.shares(world.workers)
    elsewhere = [*strategy.run_traits.computes_on, *world.computes_on]
    if shares is None or any(name != "cpu" for name in elsewhere):
        return
    if all(bytes_of(tensors_of(model)) * _MANY < room.nbytes for room in remaining_memory()):
        return
    need = training_memory_of(model, task.optimizer)
    # Processes of this machine share its memory; ranks of other worlds may be on any machine.
    count = (world.workers or 1) if world.elsewhere else 1
    # The allocator keeps memory of earlier runs, which counts as used until it is returned.
    trim_heap()
    for room in remaining_memory():
        # This process's own copy of the model is released for the workers, or used by the worker.
        free = room.most + held_by(model, room.addressed)
        free += 0 if room.shared else free_in_heap()
        least = _needed(need, _lying_in(room, shares, strategy.run_traits.offloaded), room, count)
        if least > free:
            raise ValueError(_refusal(need, shares, strategy, room, free, least, count))


def _refusal_on_device(
    need: TrainingMemory, shares: MemoryShares, device: torch.device, free: int, count: int
) -> str:
    own = need.of(shares)
    who = f"each of {count} ranks on {device}" if count > 1 else f"a rank on {device}"
    together = f", {_size(own.total * count)} together" if count > 1 else ""
    room = RemainingMemory(free, 0, f"the free memory of {device}", shared=False)
    ways = list(_divisions(need, room, int(free * _SPARE), ", each on its own device"))
    would = f": {'; or '.join(ways)} would fit" if ways else ": it does not fit in any division"
    return (
        f"the run does not fit into memory: {who} needs {_size(own.total)} and the activations "
        f"({_parts(own)}){together}, but only {_size(free)} are available, {room.whose}{would}"
    )


def held_by(model: nn.Module, addressed: bool) -> int:
    """Return the bytes of the model that this process has already allocated.

    addressed: whether tensors in files count too.
    """
    there = [one for one in tensors_of(model) if not one.is_meta]
    return bytes_of(one for one in there if addressed or not is_mapped(one))


def _lying_in(
    room: RemainingMemory, shares: MemoryShares, offloaded: Collection[str]
) -> MemoryShares:
    """Return the shares that count for a limit: tensors in files count as addressed memory only."""
    return shares if room.addressed else shares.without(offloaded)


def _needed(need: TrainingMemory, shares: MemoryShares, room: RemainingMemory, count: int) -> int:
    """Return the bytes that `count` workers with these shares take under a limit."""
    own = need.of(shares).total
    # A model in files is mapped whole before it is divided, so its whole size is addressed.
    own = max(own, need.weights) if room.addressed else own
    return own * (count if room.shared else 1)


def _refusal(
    need: TrainingMemory,
    shares: MemoryShares,
    strategy: Strategy,
    room: RemainingMemory,
    free: int,
    least: int,
    count: int,
) -> str:
    own = need.of(_lying_in(room, shares, strategy.run_traits.offloaded))
    who = f"each of {count} workers" if count > 1 else "the worker"
    together = f", {_size(least)} together" if least > own.total else ""
    ways = list(_ways(need, shares, strategy, room, free, count))
    would = f": {'; or '.join(ways)} would fit" if ways else ": it does not fit in any division"
    return (
        f"the run does not fit into memory: {who} needs {_size(own.total)} and the activations "
        f"({_parts(own)}){together}, but only {_size(free)} are available, {room.whose}{would}"
    )


def _parts(own: TrainingMemory) -> str:
    """Return the bytes of each part in words."""
    named = zip(_PARTS, own, strict=True)
    return ", ".join(f"{what} {_size(nbytes)}" for what, nbytes in named if nbytes)


def _ways(
    need: TrainingMemory,
    shares: MemoryShares,
    strategy: Strategy,
    room: RemainingMemory,
    free: int,
    count: int,
) -> Iterator[str]:
    """Yield settings that would fit, as options of the command line."""
    here, in_rank = (
        min(int(free * _SPARE), free - besides) for besides in (_BESIDES, _BESIDES_OF_RANK)
    )
    # More ranks on the same machine do not have more memory together.
    where = ", each on its own machine" if room.shared else ""
    yield from _divisions(need, room, in_rank, where)
    for parts in _offloads(strategy):
        if _needed(need, _lying_in(room, shares, parts), room, count) <= here:
            yield f"--offload {','.join(parts)}"
            return


def _divisions(need: TrainingMemory, room: RemainingMemory, free: int, where: str) -> Iterator[str]:
    """Yield divisions of the model of which a rank's part fits into `free` bytes.

    where: words on the place of the ranks.
    """
    for name, over in (("tensor-parallel or pipeline", divided_shares), ("zero --stage 3", _zero)):
        ranks = next((n for n in _counts() if _needed(need, over(n), room, 1) <= free), None)
        if ranks is not None:
            yield f"{name} with --workers {ranks}{where} ({_size(need.of(over(ranks)).total)} each)"


def _zero(ranks: int) -> MemoryShares:
    return divided_shares(1, 3, ranks)


def _counts() -> Iterator[int]:
    """Yield 2, 4, 8, ...: other numbers seldom divide layers and heads evenly."""
    count = 2
    while count <= _MOST:
        yield count
        count *= 2


def _offloads(strategy: Strategy) -> Iterator[tuple[str, ...]]:
    """Yield sets of parts to offload, each with one more part."""
    wanted = tuple(strategy.run_traits.offloaded)
    for part in strategy.traits.can_offload:
        if part in wanted:
            continue
        wanted = (*wanted, part)
        yield wanted


def _size(nbytes: int) -> str:
    """Return bytes in MB or GB, as text."""
    unit, name = (1e9, "GB") if nbytes >= 1e9 else (1e6, "MB")
    return f"{nbytes / unit:.3g} {name}"

"""Check before a run that it fits into the memory of its accelerators.

    least a rank needs    its shares of weights, gradients and optimizer state, and the temporaries
                          of an update (`dure.memory.formula`)
    free memory           of its device, which all ranks on the device share

Activations are left out, as on the CPU (`dure.run.memory_check`).
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import nn

from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.machine.devices import cached_bytes, device_of, free_bytes, in_use, is_cpu
from dure.memory.formula import (
    MemoryShares,
    TrainingMemory,
    bytes_of,
    tensors_of,
    training_memory_of,
)

LEAST = 2 << 30
"""Bytes of training on a device that need no check: a first look at a device takes seconds."""

_MANY = 16
"""Bound on the numbers per weight of any optimizer."""

_PATIENCE = 30.0
"""Seconds for the answer of a device."""


def check_fits_devices(
    task: Task,
    strategy: Strategy,
    world: World,
    model: nn.Module,
    refusal: Callable[[TrainingMemory, MemoryShares, torch.device, int, int], str],
) -> None:
    """Raise ValueError if training the model cannot fit into the memory of the ranks' devices.

    Args:
        task: task of the run.
        strategy: strategy of the run; one that declares no shares is not checked.
        world: world of the run; only ranks are checked.
        model: the task's model.
        refusal: returns the message, from the memory of the undivided model, a rank's shares, the
            device, its free bytes and the number of ranks on it.
    """
    shares = strategy.shares(world.workers)
    named = [device_of(name) for name in strategy.run_traits.computes_on or world.computes_on]
    ranks = Counter(device for device in named if not is_cpu(device))
    if shares is None or world.kind != "ranks" or not ranks:
        return
    most = max(ranks.values())
    if bytes_of(tensors_of(model)) * _MANY * most < LEAST:
        return
    shares = shares.without(strategy.run_traits.offloaded)
    need = training_memory_of(model, task.optimizer)
    # A process that will not compute on the devices does not take memory on them either.
    look = _free if in_use() or not world.elsewhere else _free_by_another
    for (device, count), free in zip(ranks.items(), look(list(ranks)), strict=True):
        if free is None:
            continue
        there = (one for one in tensors_of(model) if one.device == device)
        free += bytes_of(there)  # this process's own copy is released for the ranks, or used
        if need.of(shares).total * count > free:
            raise ValueError(refusal(need, shares, device, free, count))


def _free(devices: list[torch.device]) -> list[int | None]:
    """Return the bytes of each device that this process can still allocate."""
    found = [free_bytes(device) for device in devices]
    return [
        None if free is None else free + cached_bytes(device)
        for free, device in zip(found, devices, strict=True)
    ]


def _free_by_another(devices: list[torch.device]) -> list[int | None]:
    """Return the free bytes of each device, asked by a process that ends at once."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        # The child does nothing in which threads of this process could take part.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = multiprocessing.get_context("fork").Process(
            target=_answer, args=(writer, devices), daemon=True
        )
        child.start()
    writer.close()
    try:
        if reader.poll(_PATIENCE):
            answer: list[int | None] = reader.recv()
            return answer
    except EOFError:
        pass
    finally:
        child.kill()
        child.join()
        reader.close()
    return [None] * len(devices)


def _answer(writer: Connection, devices: list[torch.device]) -> None:
    writer.send([free_bytes(device) for device in devices])

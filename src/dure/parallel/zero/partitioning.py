"""Conversion of a model's parameters to shares.

This module decides on the units and blocks, and on the precision in which parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared
from dure.memory.mapped import release_pages
from dure.parallel.zero.host_memory import HostMemoryAllocator, common_memory
from dure.parallel.zero.partition_layout import (
    SEPARATE_BLOCK_ELEMENTS,
    ParameterBlock,
    Stage,
    blocks_of,
)
from dure.parallel.zero.partitioned_parameters import elements_of
from dure.parallel.zero.shares import ParameterShare
from dure.parallel.zero.units import UnitPlan, UnitSpec, plan_units

Precision = Literal["full", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
REDUCED: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes in which parameters are gathered, and the model computes."""


class PartitionedUnit(NamedTuple):
    """A unit after the division.

    modules: names of the modules that need the unit. shares: the shares of its blocks. around:
    whether other units are used within the unit.
    """

    modules: list[str]
    shares: list[ParameterShare]
    around: bool


def partition_model(
    model: nn.Module,
    stage: Stage,
    group: Group,
    precision: Precision,
    units: UnitSpec,
    common: bool,
    alone: int = SEPARATE_BLOCK_ELEMENTS,
    memory: Callable[[int, torch.dtype], Tensor] | None = None,
) -> list[PartitionedUnit]:
    """Divide the parameters of a model over the ranks and return its units. All ranks call it.

    In stages 1 and 2 frozen parameters stay as they are, unless their precision is reduced.

    Args:
        model: The model, whose parameters become shares.
        stage: Stage of ZeRO.
        group: The ranks.
        precision: "bf16" gathers parameters in bfloat16, "fp16" in float16.
        units: Which parameters are gathered together (`dure.parallel.zero.units`).
        common: Whether stage 3 may use memory that all ranks read, if the ranks can share memory.
        alone: Number of elements from which on a parameter is a separate block.
        memory: Allocates the elements of a share; by default memory that messages are sent from.

    Returns:
        The units that have elements, in the order of the plan.
    """
    named = dict(model.named_parameters())
    short = _shortened(model, REDUCED[precision]) if precision in REDUCED else {}
    planned: list[tuple[UnitPlan, list[ParameterBlock]]] = []
    for plan in plan_units(model, units):
        # Without elements there is nothing to divide, gather or send.
        names = [name for name in plan.parameters if named[name].numel()]
        names = [name for name in names if named[name].requires_grad or stage == 3 or name in short]
        # the dtype in which each parameter is gathered
        dtypes = [short.get(name, named[name].dtype) for name in names]
        planned.append(
            (plan, blocks_of([(name, named[name]) for name in names], group.size, dtypes, alone))
        )
    device = next(iter(named.values())).device
    # `_slices` finds out together with the other ranks whether they share memory.
    common = common and stage == 3 and device.type == "cpu"
    # All shares are in a single piece of common memory: its creation costs two exchanges, whatever
    # the number of blocks.
    slices = (
        _slices([block for _, blocks in planned for block in blocks], group) if common else None
    )

    def share(block: ParameterBlock) -> ParameterShare:
        parameters = [named[name] for name in block.names]
        if slices is not None:
            room = slices.take(block.padded, block.dtype)
        else:
            elements = block.chunk if stage == 3 else block.padded
            if memory is not None:
                room = memory(elements, block.dtype)
            else:
                room = _sent_from(elements, block.dtype, group, device)
        made = ParameterShare(block, parameters, group.rank, room, common=slices is not None)
        # Pages of memory-mapped parameters (`dure.memory.mapped`) that were read leave memory.
        release_pages(map(elements_of, parameters))
        return made

    return [
        PartitionedUnit(plan.modules, list(map(share, blocks)), plan.around)
        for plan, blocks in planned
        if blocks
    ]


def _slices(blocks: list[ParameterBlock], group: Group) -> HostMemoryAllocator | None:
    memory = common_memory(
        group,
        sum(HostMemoryAllocator.room(block.padded * block.dtype.itemsize) for block in blocks),
    )
    return HostMemoryAllocator(memory) if memory is not None else None


def _sent_from(elements: int, dtype: torch.dtype, group: Group, device: torch.device) -> Tensor:
    """Return memory to send from: shared memory if the backend is dure."""
    if group.size > 1 and elements and group.backend(device) == "dure":
        return empty_shared(elements, dtype=dtype)
    return torch.empty(elements, dtype=dtype, device=device)


def _shortened(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the parameters that are computed with in a reduced dtype, with that dtype.

    Norms with running statistics keep their precision.
    """
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    kept = {id(parameter) for module in norms for parameter in module.parameters(recurse=False)}
    return {
        name: dtype
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and id(parameter) not in kept
    }


def cast_inputs(model: nn.Module, dtype: torch.dtype, rests: Callable[[], bool]) -> None:
    """Add hooks that convert the model's inputs to a reduced dtype, and its outputs to float32.

    rests: returns whether the parameters are whole and in their own dtype; inputs are not converted
    then.
    """

    def shorten(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if rests():
            return None
        return tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
        )

    def lengthen(module: nn.Module, args: Any, outputs: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.float() if t.dtype == dtype else t, outputs)

    model.register_forward_pre_hook(shorten, with_kwargs=True, prepend=True)
    model.register_forward_hook(lengthen)

"""Facts about a rank of a mesh for the report: memory of its tensors, and traffic of its stages.

    at        its data, pipeline and tensor index
    schedule  of a full step, as text (rank 0 alone)
    stages    for each: its number, its first module, its parameters, and the bytes that cross the
              boundary after it in a full step: values there, gradients back; 0 if the next stage is
              on the same rank
    held      bytes of parameters, gradients, the optimizer's state and buffers, as the memory that
              they occupy
    inside    seconds of collectives inside layers, including waits for neighbours, and the number
              of steps with such collectives

In ZeRO's stages 2 and 3 the buffers of its messages count as buffers. Gradients are those that the
last step has left. Tensors that share memory count once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from dure.parallel.mesh.rank_state import RankState
from dure.parallel.pipeline.rng import STATE_BYTES
from dure.parallel.zero.partitioned_parameters import gradient_of


def facts_of(held: RankState, batch_size: int, carried: bool) -> dict[str, Any]:
    """Return the facts of this rank, as JSON.

    batch_size: examples of a full step, over all data groups. carried: whether the state of a
    random generator travels with the values from stage to stage.
    """
    facts: dict[str, Any] = {"at": held.at._asdict()}
    if held.group.rank == 0:
        facts["schedule"] = held.schedule.text()
    facts["stages"] = [_stage(held, number, batch_size, carried) for number in held.own]
    facts["held"] = _bytes_held(held)
    return facts


def bytes_in_memory(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' memory; shared memory counts once."""
    nbytes: dict[int, int] = {}
    for tensor in tensors:
        for part in _parts(tensor):
            # Several views of a storage have the same address.
            storage = part.untyped_storage()
            nbytes[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes.values())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of which a sparse tensor consists; a dense tensor itself."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _bytes_held(held: RankState) -> dict[str, int]:
    buffers = bytes_in_memory(
        buffer for name, buffer in held.model.named_buffers() if name in held.names
    )
    if held.zero is not None and held.zero.stage > 1:
        # Between steps the model's parameters have no memory, or are views of ZeRO's memory.
        divided = held.zero.memory()
        return {
            "parameters": divided.parameters,
            "gradients": divided.gradients,
            "optimizer": divided.optimizer,
            "buffers": buffers + divided.buffers,
        }
    parameters = [
        parameter for name, parameter in held.model.named_parameters() if name in held.names
    ]
    optimized: list[Tensor] = []
    for group in held.optimizer.param_groups if held.optimizer is not None else ():
        # With ZeRO these are parts of parameters, which have separate gradients.
        optimized += group["params"]
    gradients = [gradient_of(parameter) for parameter in [*parameters, *optimized]]
    states = tree_flatten(dict(held.optimizer.state))[0] if held.optimizer is not None else []
    return {
        "parameters": bytes_in_memory(parameters),
        "gradients": bytes_in_memory(one for one in gradients if one is not None),
        "optimizer": bytes_in_memory(state for state in states if isinstance(state, Tensor)),
        "buffers": buffers,
    }


def _stage(held: RankState, number: int, batch_size: int, carried: bool) -> dict[str, Any]:
    size = held.cut.sizes()[number]
    there, back = _crossing(held, number, batch_size, carried)
    return {
        "stage": number,
        "begins": size.first,
        "parameters": size.parameters,
        "there": there,
        "back": back,
    }


def _crossing(held: RankState, number: int, batch_size: int, carried: bool) -> tuple[int, int]:
    """Return the bytes of a full step over the boundary after a stage: values, gradients."""
    home = held.schedule.home
    if number + 1 >= len(home) or home[number] == home[number + 1]:
        return 0, 0
    # with the values of each micro-batch; gradients travel without it
    state = STATE_BYTES if carried else 0
    examples = part_length(batch_size, held.mesh.data, held.at.data)
    there = 0
    back = 0
    for place in range(held.schedule.microbatches):
        # Micro-batches may differ by an example, and so may their messages.
        length = part_length(examples, held.schedule.microbatches, place)
        if length:
            values, gradients = held.cut.message_bytes(number, length)
            there += values + state
            back += gradients
    return there, back


def part_length(length: int, parts: int, place: int) -> int:
    """Return the length of a part of `tensor_split`, whose first parts may be longer by 1."""
    return length // parts + (place < length % parts)

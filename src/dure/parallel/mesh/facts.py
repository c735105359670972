"""Facts about a rank of a mesh for the report: memory of its tensors, and traffic of its stages.

    at        its data, pipeline and tensor index
    schedule  of a full step, as text (rank 0 alone)
    stages    for each: its number, its first module, its parameters, and the bytes that cross the
              boundary after it in a full step: values there, gradients back; 0 if the next stage is
              on the same rank
    held      bytes of parameters, gradients, the optimizer's state and buffers, as the memory that
              they occupy
    step_costs  of a pipeline's rank: seconds of a computation and of a step, and messages of a
              step, which the learner adds (`dure.parallel.pipeline.message_cost`)
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


def facts_of(rank_state: RankState, batch_size: int, carried: bool) -> dict[str, Any]:
    """Return the facts of this rank, as JSON.

    batch_size: examples of a full step, over all data groups. carried: whether the state of a
    random generator travels with the values from stage to stage.
    """
    facts: dict[str, Any] = {"at": rank_state.at._asdict()}
    if rank_state.group.rank == 0:
        facts["schedule"] = rank_state.schedule.text()
    facts["stages"] = [_stage(rank_state, number, batch_size, carried) for number in rank_state.own]
    facts["held"] = _bytes_held(rank_state)
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


def _bytes_held(rank_state: RankState) -> dict[str, int]:
    buffers = bytes_in_memory(
        buffer for name, buffer in rank_state.model.named_buffers() if name in rank_state.names
    )
    if rank_state.zero is not None and rank_state.zero.stage > 1:
        # Between steps the model's parameters have no memory, or are views of ZeRO's memory.
        divided = rank_state.zero.memory()
        return {
            "parameters": divided.parameters,
            "gradients": divided.gradients,
            "optimizer": divided.optimizer,
            "buffers": buffers + divided.buffers,
        }
    parameters = [
        parameter
        for name, parameter in rank_state.model.named_parameters()
        if name in rank_state.names
    ]
    optimized: list[Tensor] = []
    for group in rank_state.optimizer.param_groups if rank_state.optimizer is not None else ():
        # With ZeRO these are parts of parameters, which have separate gradients.
        optimized += group["params"]
    gradients = [gradient_of(parameter) for parameter in [*parameters, *optimized]]
    states = (
        tree_flatten(dict(rank_state.optimizer.state))[0]
        if rank_state.optimizer is not None
        else []
    )
    return {
        "parameters": bytes_in_memory(parameters),
        "gradients": bytes_in_memory(one for one in gradients if one is not None),
        "optimizer": bytes_in_memory(state for state in states if isinstance(state, Tensor)),
        "buffers": buffers,
    }


def _stage(rank_state: RankState, number: int, batch_size: int, carried: bool) -> dict[str, Any]:
    size = rank_state.cut.sizes()[number]
    there, back = _crossing(rank_state, number, batch_size, carried)
    return {
        "stage": number,
        "begins": size.first,
        "parameters": size.parameters,
        "there": there,
        "back": back,
    }


def _crossing(
    rank_state: RankState, number: int, batch_size: int, carried: bool
) -> tuple[int, int]:
    """Return the bytes of a full step over the boundary after a stage: values, gradients."""
    home = rank_state.schedule.home
    if number + 1 >= len(home) or home[number] == home[number + 1]:
        return 0, 0
    # with the values of each micro-batch; gradients travel without it
    state = STATE_BYTES if carried else 0
    examples = part_length(batch_size, rank_state.mesh.data, rank_state.at.data)
    there = 0
    back = 0
    for place in range(rank_state.schedule.microbatches):
        # Micro-batches may differ by an example, and so may their messages.
        length = part_length(examples, rank_state.schedule.microbatches, place)
        if length:
            values, gradients = rank_state.cut.message_bytes(number, length)
            there += values + state
            back += gradients
    return there, back


def part_length(length: int, parts: int, place: int) -> int:
    """Return the length of a part of `tensor_split`, whose first parts may be longer by 1."""
    return length // parts + (place < length % parts)

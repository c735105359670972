"""What a rank of a mesh holds, and what crosses the boundaries of its stages: counted once, for the
report.

    at        its data, pipeline and tensor index
    schedule  of a full step, as text (rank 0 alone)
    stages    of each: its number, the module in which it begins, its parameters, and the bytes that cross the boundary
              behind it in a full step: values there, gradients back; 0 where the next stage is on
              the same rank
    held      bytes of parameters, gradients, the optimizer's state and buffers, as the memory that they lie in
    inside    seconds of collectives inside of layers, waiting for neighbours included, and the steps that had any

In ZeRO's stages 2 and 3 the buffers of its messages count among the buffers. Gradients are those
that the last step has left. Tensors that share memory count once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.draws import STATE_BYTES
from dure.parallel.zero.away import gradient_of

if TYPE_CHECKING:
    from dure.parallel.mesh.strategy import ParallelLearner


def facts_of(learner: ParallelLearner) -> dict[str, Any]:
    """Of one rank, as JSON."""
    meter = learner.group.meter
    return {
        "at": learner.at._asdict(),
        **({"schedule": learner.schedule.text()} if learner.group.rank == 0 else {}),
        "stages": [_stage(learner, number) for number in learner.own],
        "held": _held(learner),
        "inside": {"seconds": meter.inside_seconds, "steps": meter.inside_steps},
    }


def bytes_in_memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory in which these lie; what several share counts once."""
    dense = (part for tensor in tensors for part in _parts(tensor))
    storages = (tensor.untyped_storage() for tensor in dense)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a sparse tensor consists of; any other is one."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _held(learner: ParallelLearner) -> dict[str, int]:
    held, model, optimizer = set(learner.held), learner.model, learner.optimizer
    buffers = bytes_in_memory(buffer for name, buffer in model.named_buffers() if name in held)
    if learner.zero is not None and learner.zero.stage > 1:
        divided = learner.zero.memory()
        parts = {
            "parameters": divided.parameters,
            "gradients": divided.gradients,
            "optimizer": divided.optimizer,
        }
        return {**parts, "buffers": buffers + divided.buffers}
    parameters = [parameter for name, parameter in model.named_parameters() if name in held]
    optimized = (
        [p for group in optimizer.param_groups for p in group["params"]]
        if optimizer is not None
        else []
    )
    gradients = [
        gradient for gradient in map(gradient_of, [*parameters, *optimized]) if gradient is not None
    ]
    states = tree_flatten(dict(optimizer.state))[0] if optimizer is not None else []
    return {
        "parameters": bytes_in_memory(parameters),
        "gradients": bytes_in_memory(gradients),
        "optimizer": bytes_in_memory(state for state in states if isinstance(state, Tensor)),
        "buffers": buffers,
    }


def _stage(learner: ParallelLearner, number: int) -> dict[str, Any]:
    cut = learner.cut
    if not isinstance(cut, CutModel):  # one stage, as it is
        elements = sum(parameter.numel() for parameter in learner.model.parameters())
        return {"stage": number, "begins": "", "parameters": elements, "there": 0, "back": 0}
    size = cut.sizes()[number]
    there, back = _crossing(learner, cut, number)
    return {
        "stage": number,
        "begins": size.first,
        "parameters": size.parameters,
        "there": there,
        "back": back,
    }


def _crossing(learner: ParallelLearner, cut: CutModel, number: int) -> tuple[int, int]:
    """Bytes of a full step over the boundary behind a stage."""
    home = learner.schedule.home
    if number + 1 >= len(home) or home[number] == home[number + 1]:
        return 0, 0
    mesh, most = learner.strategy.mesh, learner.strategy.most
    examples = len(
        range(learner.batches.batch_size)[learner.at.data :: mesh.data]
    )  # tensor_split's lengths
    lengths = [length for place in range(most) if (length := len(range(examples)[place::most]))]
    state = STATE_BYTES if learner.stream.carried else 0
    messages = [cut.message_bytes(number, length) for length in lengths]
    return sum(there + state for there, _ in messages), sum(back for _, back in messages)

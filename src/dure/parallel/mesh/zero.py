"""ZeRO on a mesh: what the ranks of a data group would hold alike is divided over them.

    1      the optimizer's state, of whatever stages and parts of layers a rank holds
    2, 3   the gradients too, and the parameters too, of a model in one stage; its layers may be
           divided over a tensor group, so that each parameter is cut twice: along its rows or
           columns, and what is left over the data group

In a pipeline the gradients of a batch's micro-batches add up on the rank of their stage, whole, so
that to divide them would save no memory; there it is stage 1. In stages 2 and 3 micro-batches
follow one another, each forward and backward at once, and the gradients of each are reduced. A rank
that has fewer micro-batches than others of its data group computes an example that counts nothing,
so that all gather the same units in the same order, whatever the model does with them.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

from dure.parallel.mesh.held import Held
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.speaker import check_weights_stay
from dure.parallel.zero.redundancy import ZeroRedundancy

Stage = Literal[0, 1, 2, 3]
"""What is divided; 0 is nothing."""


def check(stage: Stage, mesh: Mesh, stages: int, model: nn.Module) -> None:
    """Raises ValueError where ZeRO does not fit the mesh or the model.

    stages: into how many the model is cut.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero is {stage}, but ZeRO has the stages 1, 2 and 3; 0 divides nothing")
    if stage < 2:
        return
    if stages > 1:
        raise ValueError(
            f"zero is {stage}, but in a pipeline the gradients of all micro-batches add up before "
            "they are divided: zero=1 there, or one stage"
        )
    check_weights_stay(model, mesh.data)


def zero_of(held: Held, stage: Stage) -> ZeroRedundancy | None:
    """Divides what this rank trains, in place; returns None where nothing is divided."""
    group = held.groups.data
    # A data group of one has nobody to divide with.
    if stage == 0 or held.optimizer is None or group.size == 1:
        return None
    # In stage 1 a rank may hold some stages' parameters alone, which are no module: a list of them.
    divided = nn.ParameterList(held.parameters.values()) if stage == 1 else held.model
    return ZeroRedundancy(divided, held.optimizer, stage, group, reduce="sum", prefetch=0)


def names_of(held: Held) -> dict[str, str]:
    """The model's names of its parameters, by ZeRO's names: in stage 1 the places in a list."""
    assert held.zero is not None
    names = list(held.parameters)
    # An nn.ParameterList calls its parameters "0", "1", …
    known = map(str, range(len(names))) if held.zero.stage == 1 else names
    return dict(zip(known, names, strict=True))


def trained_parts(held: Held) -> dict[str, nn.Parameter]:
    """What is updated on this rank, by the model's names: parameters, or pieces of them."""
    if held.zero is None:
        return held.parameters
    names = names_of(held)
    return {names[name]: part for name, part in held.zero.parts_by_name()}


@contextmanager
def parts_changed(held: Held) -> Iterator[None]:
    """Around a change of `trained_parts`, by all ranks together; what travels is not counted."""
    if held.zero is None:
        yield
        return
    with held.zero.uncounted(), held.zero.parts_changed():
        yield


@contextmanager
def whole(held: Held) -> Iterator[None]:
    """Inside, the parameters here are whole, but for their division over the tensor group."""
    if held.zero is None or held.zero.stage == 1:
        yield
        return
    with held.zero.gathered():
        yield


def account(held: Held, computing: bool) -> None:
    """Tells the meter what was sent since the last call.

    computing: whether the meter has counted these waits as computing; they are taken out there.
    """
    if held.zero is not None:
        waited = held.zero.wire.account(held.step + 1)
        if computing:
            held.group.meter.counters.compute_seconds -= waited

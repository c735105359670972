"""ZeRO on a mesh: state that the ranks of a data group would replicate is divided over them.

    1      the optimizer's state, of the stages and parts of layers on a rank
    2, 3   the gradients too, and the parameters too, of a model in a single stage; its layers may
           be divided over a tensor group, so that each parameter is divided twice: along its rows
           or columns, and then over the data group

In a pipeline the gradients of a batch's micro-batches add up on the rank of their stage, whole, so
dividing them would save no memory; pipelines support stage 1 only. In stages 2 and 3 micro-batches
follow one another, each forward and backward, and the gradients of each are reduced. A rank with
fewer micro-batches than others of its data group computes an example with zero weight. So all ranks
gather the same units in the same order.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

from dure.parallel.buffer_broadcast import check_forward_keeps_weights
from dure.parallel.mesh.mesh import Mesh
from dure.parallel.mesh.rank_state import RankState
from dure.parallel.zero.redundancy import ZeroRedundancy

ZeroStage = Literal[0, 1, 2, 3]
"""Stage of ZeRO; 0 divides nothing."""


def check(stage: ZeroStage, mesh: Mesh, stages: int, model: nn.Module) -> None:
    """Raise ValueError if ZeRO does not fit the mesh or the model.

    stages: the number of stages of the cut model.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero is {stage}, but ZeRO has the stages 1, 2 and 3; 0 divides nothing")
    if stage < 2:
        return
    if stages > 1:
        raise ValueError(
            f"zero is {stage}, but a pipeline sums the gradients of all micro-batches before it "
            "divides them: use zero=1 there, or one stage"
        )
    check_forward_keeps_weights(model, mesh.data)


def zero_of(rank_state: RankState, stage: ZeroStage) -> ZeroRedundancy | None:
    """Divide this rank's trained parameters in place; return None if nothing is divided."""
    group = rank_state.groups.data
    # A data group of size 1 cannot divide.
    if stage == 0 or rank_state.optimizer is None or group.size == 1:
        return None
    # In stage 1 a rank may have the parameters of some stages only, which form no module.
    divided = nn.ParameterList(rank_state.parameters.values()) if stage == 1 else rank_state.model
    return ZeroRedundancy(divided, rank_state.optimizer, stage, group, reduce="sum", prefetch=0)


def names_of(rank_state: RankState) -> dict[str, str]:
    """Return the model's parameter names by ZeRO's names, which are list indices in stage 1."""
    assert rank_state.zero is not None
    names = list(rank_state.parameters)
    # An nn.ParameterList calls its parameters "0", "1", …
    known = map(str, range(len(names))) if rank_state.zero.stage == 1 else names
    return dict(zip(known, names, strict=True))


def trained_parts(rank_state: RankState) -> dict[str, nn.Parameter]:
    """Return the tensors updated on this rank, by the model's names: parameters or their parts."""
    if rank_state.zero is None:
        return rank_state.parameters
    names = names_of(rank_state)
    return {names[name]: part for name, part in rank_state.zero.parts_by_name()}


@contextmanager
def parts_changed(rank_state: RankState) -> Iterator[None]:
    """Context manager for a change of `trained_parts` on all ranks; transfers do not count."""
    if rank_state.zero is None:
        yield
        return
    with rank_state.zero.uncounted(), rank_state.zero.parts_changed():
        yield


def account(rank_state: RankState, computing: bool) -> None:
    """Report the traffic since the last call to the meter.

    computing: whether the meter has counted the waits as computing time; they are then subtracted.
    """
    if rank_state.zero is not None:
        waited = rank_state.zero.wire.account(rank_state.step + 1)
        if computing:
            rank_state.group.meter.counters.compute_seconds -= waited

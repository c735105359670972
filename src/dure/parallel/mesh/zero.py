"""ZeRO on a mesh: what the ranks of a data group would hold alike is divided over them.

    1      the optimizer's state, of whatever stages and parts of layers a rank holds
    2, 3   the gradients too, and the parameters too, of a model in one stage; its layers may be divided over a tensor
           group, so that each parameter is cut twice: along its rows or columns, and what is left
           over the data group

In a pipeline the gradients of a batch's micro-batches add up on the rank of their stage, whole, so
that to divide them would save no memory; there it is stage 1. In stages 2 and 3 micro-batches
follow one another, each forward and backward at once, and the gradients of each are reduced. A rank
whose data group has more of them than its share computes an example that counts nothing, so that
all gather the same units in the same order, whatever the model does with them.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from dure.parallel.speaker import check_weights_stay
from dure.parallel.zero.redundancy import ZeroRedundancy

if TYPE_CHECKING:
    from dure.parallel.mesh.strategy import Parallel, ParallelLearner


def check(strategy: Parallel, model: nn.Module) -> None:
    """Raises ValueError where ZeRO does not fit the mesh or the model."""
    if strategy.zero not in (0, 1, 2, 3):
        raise ValueError(
            f"zero is {strategy.zero}, but ZeRO has the stages 1, 2 and 3; 0 divides nothing"
        )
    if strategy.zero < 2:
        return
    if strategy.mesh.pipeline > 1 or (strategy.stages_per_rank or 1) > 1:
        raise ValueError(
            f"zero is {strategy.zero}, but in a pipeline the gradients of all micro-batches add up "
            f"before they are "
            "divided: zero=1 there, or one stage"
        )
    check_weights_stay(model, strategy.mesh.data)


def zero_of(learner: ParallelLearner) -> ZeroRedundancy | None:
    """The division of what a learner holds, which it makes in place; None where nothing is
    divided."""
    stage, group = learner.strategy.zero, learner.groups.data
    if not stage or group.size == 1:
        return None
    held = nn.ParameterList(learner.parameters.values()) if stage == 1 else learner.model
    return ZeroRedundancy(held, learner.optimizer, stage, group, reduce="sum", prefetch=0)  # type: ignore[arg-type]


def names_of(learner: ParallelLearner) -> dict[str, str]:
    """The model's names of its parameters, by those that ZeRO knows them under: in stage 1 the
    places in a list."""
    assert learner.zero is not None
    names = list(learner.parameters)
    known = map(str, range(len(names))) if learner.zero.stage == 1 else names
    return dict(zip(known, names, strict=True))


@contextmanager
def whole(learner: ParallelLearner) -> Iterator[None]:
    """Inside, the parameters here are whole, but for their division over the tensor group."""
    if learner.zero is None or learner.zero.stage == 1:
        yield
        return
    with learner.zero.gathered():
        yield


def account(learner: ParallelLearner, computing: bool) -> None:
    """Tells the meter what was sent since the last call. computing: it has counted these waits as
    computing."""
    if learner.zero is not None:
        waited = learner.zero.wire.account(learner.step + 1)
        if computing:
            learner.group.meter.counters.compute_seconds -= waited

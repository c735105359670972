"""State of a rank of a mesh, which its gradients, checkpoints and report use.

    model, cut, schedule     the model, its cut into stages, and the schedule of its stages
    names, keepers           the parameters and buffers stored here, and the ranks that store each
    parameters, tied         the trained parameters, and those of them that several stages use
    optimizer, zero          the optimizer of these parameters, and its division over the data group
    written, speaking        buffers that a step changes, to be synchronised between data groups

A rank builds the state once, before the first step. Only `step`, the optimizer and the tensors
change afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.collectives.group import Group
from dure.memory.file_backed_init import in_files_if, move_to_memory, tensors_of
from dure.parallel.buffer_broadcast import BufferSync
from dure.parallel.mesh.mesh import Coordinates, Groups, Mesh
from dure.parallel.pipeline.cut import CutModel, release_tensors
from dure.parallel.pipeline.schedule import Schedule
from dure.parallel.pipeline.single_stage import SingleStageModel
from dure.parallel.zero.redundancy import ZeroRedundancy


@dataclass
class RankState:
    """State of this rank.

    Args:
        mesh: the degrees.
        group: all ranks of the mesh.
        groups: the ranks along each axis.
        model: the model; parameters of other ranks' stages have no memory.
        cut: the model in stages.
        schedule: the schedule of a full batch.
        names: names of the parameters and buffers stored here.
        parameters: trained parameters among these, by name.
        keepers: for each name the pipeline ranks that store the tensor, in ascending order.
        tied: trained parameters here that other pipeline ranks use as well.
        first_name: for each name of the state_dict the first name of the same tensor.
        written: buffers here that a forward pass changes, according to the traces.
        optimizer: None if nothing is trained here.
        zero: the division of the optimizer by ZeRO; None without ZeRO.
        speaking: detector of changed buffers, for a model without a trace.
        step: completed steps of the optimizer.
        folder: the run folder, on whose disk checkpoints are built; None for any disk.
    """

    mesh: Mesh
    group: Group
    groups: Groups
    model: nn.Module
    cut: CutModel | SingleStageModel
    schedule: Schedule
    names: frozenset[str]
    parameters: dict[str, nn.Parameter]
    keepers: Mapping[str, list[int]]
    tied: list[str]
    first_name: Mapping[str, str]
    written: list[str] = field(default_factory=list)
    optimizer: Optimizer | None = None
    zero: ZeroRedundancy | None = None
    buffer_sync: BufferSync | None = None
    step: int = 0
    folder: Path | None = None

    @property
    def at(self) -> Coordinates:
        """Position of this rank on the mesh."""
        return self.groups.at

    @property
    def own(self) -> tuple[int, ...]:
        """Stages that this rank computes."""
        return self.schedule.stages_of(self.at.pipeline)

    def is_first(self, name: str) -> bool:
        """Return whether no earlier pipeline rank stores `name`.

        The first of several ranks that store a tensor counts and writes it.
        """
        return self.keepers[name][0] == self.at.pipeline


def build_rank_state(
    mesh: Mesh,
    group: Group,
    groups: Groups,
    model: nn.Module,
    cut: CutModel | SingleStageModel,
    schedule: Schedule,
    zero: int = 0,
) -> RankState:
    """Store the tensors that this rank's stages or no stages use in training; free all others.

    Tensors that training does not use may be used in evaluation, by any stage. Stored tensors move
    into memory if the undivided model is in files.

    Args:
        mesh: the degrees.
        group: all ranks of the mesh.
        groups: the ranks along each axis.
        model: the model; other ranks' tensors become zeros without memory (`release_tensors`).
        cut: the model in stages.
        schedule: the schedule of a full batch.
        zero: the stage of ZeRO that will divide the tensors.
    """
    known = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    keepers = storing_ranks(known, cut, schedule)
    mine = groups.at.pipeline
    kept = frozenset(name for name in known if mine in keepers[name])
    if mesh.pipeline > 1:
        release_tensors(model, [name for name in known if name not in kept])
    # Tensors that ZeRO divides move into memory when they are divided.
    move_to_memory(model.buffers() if zero == 3 else tensors_of(model))
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in kept and parameter.requires_grad
    }
    return RankState(
        mesh=mesh,
        group=group,
        groups=groups,
        model=model,
        cut=cut,
        schedule=schedule,
        names=kept,
        parameters=parameters,
        keepers=keepers,
        tied=[name for name in parameters if name in cut.learned and len(keepers[name]) > 1],
        first_name=first_names(model),
    )


def storing_ranks(
    names: Iterable[str], cut: CutModel | SingleStageModel, schedule: Schedule
) -> dict[str, list[int]]:
    """Return the pipeline ranks that store each tensor by name: all ranks if no stage uses it."""
    everywhere = list(range(schedule.ranks))
    keepers: dict[str, list[int]] = {}
    for name in names:
        stages = cut.holders.get(name)
        # a tensor that no stage uses in training may be used in evaluation, by any stage
        ranks = everywhere if stages is None else [schedule.home[stage] for stage in stages]
        # a rank may have several stages that use the tensor; list it once
        keepers[name] = sorted(set(ranks))
    return keepers


def optimizer_of(
    rank_state: RankState, make: Callable[[list[nn.Parameter]], Optimizer]
) -> Optimizer | None:
    """Return the optimizer of this rank's trained parameters; None without trained parameters."""
    # Parameters that no gradient reaches are not trained, even if they require gradients.
    if not rank_state.cut.learned & rank_state.parameters.keys():
        return None
    # Pass all parameters, because a user's function may group them by their position.
    with in_files_if(rank_state.mesh.pipeline > 1):
        optimizer = make(list(rank_state.model.parameters()))
    # All groups stay, also empty groups, so that each has an unchanged number and settings.
    mine = {id(parameter) for parameter in rank_state.parameters.values()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in mine]
    # Some optimizers create their state in the constructor.
    for parameter in list(optimizer.state):
        if id(parameter) not in mine:
            del optimizer.state[parameter]
    for state in optimizer.state.values():
        move_to_memory(one for one in state.values() if isinstance(one, Tensor))
    return optimizer


def first_names(model: nn.Module) -> dict[str, str]:
    """Return for each name of the state_dict the first name of its tensor."""
    # named_parameters gives a shared tensor once, by its first name.
    firsts = {
        id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    return {
        name: firsts.get(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }

"""What one rank of a mesh holds: the state that its gradients, checkpoints and report work on.

    model, cut, schedule     the model, where it is cut, and who computes its stages
    names, keepers           the parameters and buffers kept here, and which ranks keep each
    parameters, tied         those that are trained, and those of them that several stages use
    optimizer, zero          the optimizer of these parameters, and its division over the data group
    written, speaking        buffers that a step changes, to be the same in all data groups

A rank makes it once, before the first step. Only `step`, the optimizer and the tensors change
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.collectives.group import Group
from dure.memory.undivided import aside, bring, tensors_of
from dure.parallel.mesh.mesh import Coordinates, Groups, Mesh
from dure.parallel.pipeline.cut import CutModel, forget
from dure.parallel.pipeline.schedule import Schedule
from dure.parallel.pipeline.uncut import UncutModel
from dure.parallel.speaker import Speaker
from dure.parallel.zero.redundancy import ZeroRedundancy


@dataclass
class Held:
    """What this rank holds.

    group: all ranks of the mesh; groups: those along each of its axes.
    names: of the parameters and buffers that are kept here.
    parameters: those of them that are trained, by name.
    keepers: for each name the pipeline's ranks that keep it, in ascending order.
    tied: the trained parameters here that other ranks of the pipeline use as well.
    first_name: for each name of the state_dict the first name of the same tensor.
    written: the buffers here that a forward pass changes, as far as traces show it.
    optimizer: None where nothing is trained here. zero: None where it is whole.
    speaking: for a model that nobody has traced, which of its buffers forward passes have changed.
    step: steps of the optimizer that are done.
    folder: of the run, on whose disk checkpoints are put together; None: on any disk.
    """

    mesh: Mesh
    group: Group
    groups: Groups
    model: nn.Module
    cut: CutModel | UncutModel
    schedule: Schedule
    names: frozenset[str]
    parameters: dict[str, nn.Parameter]
    keepers: Mapping[str, list[int]]
    tied: list[str]
    first_name: Mapping[str, str]
    written: list[str] = field(default_factory=list)
    optimizer: Optimizer | None = None
    zero: ZeroRedundancy | None = None
    speaking: Speaker | None = None
    step: int = 0
    folder: Path | None = None

    @property
    def at(self) -> Coordinates:
        """Where this rank is on the mesh."""
        return self.groups.at

    @property
    def own(self) -> tuple[int, ...]:
        """The stages that are computed here."""
        return self.schedule.stages_of(self.at.pipeline)

    def is_first(self, name: str) -> bool:
        """Whether no earlier stage's rank keeps `name`.

        What several ranks keep counts once, and is written once: by the first of them.
        """
        return self.keepers[name][0] == self.at.pipeline


def hold(
    mesh: Mesh,
    group: Group,
    groups: Groups,
    model: nn.Module,
    cut: CutModel | UncutModel,
    schedule: Schedule,
    zero: int = 0,
) -> Held:
    """Keeps what this rank's stages use in training, and what none uses, and lets go of the rest.

    What training does not use evaluation may, in any stage. What is kept moves into memory, where
    the undivided model lies in files. zero: the stage of ZeRO that will divide it.
    """
    known = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    keepers = keepers_of(known, cut, schedule)
    mine = groups.at.pipeline
    kept = frozenset(name for name in known if mine in keepers[name])
    if mesh.pipeline > 1:
        forget(model, [name for name in known if name not in kept])
    # What ZeRO divides moves into memory when it is divided.
    bring(model.buffers() if zero == 3 else tensors_of(model))
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in kept and parameter.requires_grad
    }
    return Held(
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


def keepers_of(
    names: Iterable[str], cut: CutModel | UncutModel, schedule: Schedule
) -> dict[str, list[int]]:
    """The pipeline's ranks that keep each parameter or buffer: all, where no stage uses it."""
    everywhere = list(range(schedule.ranks))
    keepers: dict[str, list[int]] = {}
    for name in names:
        stages = cut.holders.get(name)
        # what no stage uses in training may still be used in evaluation, by any stage
        ranks = everywhere if stages is None else [schedule.home[stage] for stage in stages]
        # a rank with several stages that use it is there once
        keepers[name] = sorted(set(ranks))
    return keepers


def optimizer_of(held: Held, make: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer | None:
    """The optimizer of what this rank trains; None where it trains nothing."""
    # What no gradient reaches is not trained, though it may ask for gradients.
    if not held.cut.learned & held.parameters.keys():
        return None
    # It is made of all parameters, for a user's function may group them by their places.
    with aside(held.mesh.pipeline > 1):
        optimizer = make(list(held.model.parameters()))
    # All groups stay, also empty ones, so that each keeps its number and its settings.
    mine = {id(parameter) for parameter in held.parameters.values()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in mine]
    # Some optimizers make their state when they are made.
    for parameter in list(optimizer.state):
        if id(parameter) not in mine:
            del optimizer.state[parameter]
    for state in optimizer.state.values():
        bring(one for one in state.values() if isinstance(one, Tensor))
    return optimizer


def first_names(model: nn.Module) -> dict[str, str]:
    """Each name of the state_dict to the first name of its tensor, where several share it."""
    # named_parameters gives a shared tensor once, by its first name.
    firsts = {
        id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    return {
        name: firsts.get(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }

"""The checkpoint of a run on a mesh: what is kept is that of the undivided model, so it loads onto
any other mesh.

weights     each from the first stage that holds it, its parts joined over the tensor group
optimizer   the state of each parameter, by its name, undivided
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.machine.devices import to_cpu
from dure.parallel.mesh import zero as mesh_zero
from dure.parallel.tensor.division import Division
from dure.parallel.tensor.functions import gathered
from dure.parallel.tensor.state import divisions, whole_state_dict
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from dure.record.weights import weights_from_bytes, weights_to_bytes
from dure.tensors.buffers import load_passing_buffers, passing_buffers

if TYPE_CHECKING:
    from dure.parallel.mesh.strategy import ParallelLearner


def weights_of(learner: ParallelLearner) -> dict[str, Tensor]:
    """The undivided model's state_dict, on rank 0; all ranks call it."""
    whole: dict[str, Tensor] = {}
    with mesh_zero.whole(learner):
        state = whole_state_dict(learner.model)
    mine = {name: state[name] for name in state if _keeper(learner, name) == learner.at.pipeline}
    sends = learner.at.data == 0 and learner.at.tensor == 0
    content = weights_to_bytes(to_cpu(mine)) if sends else b""
    for part in learner.group.gather_bytes(content):
        if part:
            whole |= weights_from_bytes(part)
    return {name: whole[name] for name in state} if learner.group.rank == 0 else {}


def _keeper(learner: ParallelLearner, name: str) -> int:
    """The stage's rank from which an entry of the state_dict is taken: for what a module adds to
    it, the first."""
    return learner.keepers.get(learner.first_name[name], [0])[0]


def state_of(learner: ParallelLearner) -> dict[str, Any]:
    """What all ranks have alike."""
    return {"step": learner.step, "buffers": _passing_buffers(learner)}


def _passing_buffers(learner: ParallelLearner) -> dict[str, Tensor]:
    """Those of all stages that a state_dict leaves out, on rank 0; all ranks call it."""
    sends = learner.at.data == 0 and learner.at.tensor == 0
    own = passing_buffers(learner.model) if sends else {}
    mine = {
        name: value
        for name, value in own.items()
        if learner.keepers[name][0] == learner.at.pipeline
    }
    found: dict[str, Tensor] = {}
    for part in learner.group.gather_bytes(tree_to_bytes(to_cpu(mine))):
        found |= tree_from_bytes(part)
    return found


def part_of(learner: ParallelLearner) -> dict[str, Any]:
    """The optimizer's state of what this rank holds, by name."""
    if learner.optimizer is None:
        return {"groups": [], "state": {}}
    written = to_cpu(
        (learner.zero.optimizer_state_dict if learner.zero else learner.optimizer.state_dict)()
    )
    names = [name for group in _names_in_the_optimizer(learner) for name in group]
    divided = divisions(learner.model)
    states = {
        names[index]: _joined(value, learner.parameters[names[index]], divided.get(names[index]))
        for index, value in written["state"].items()
    }
    if learner.at.tensor > 0 or learner.at.data > 0:
        states = {}
    groups = [
        {**group, "params": [names[index] for index in group["params"]]}
        for group in written["param_groups"]
    ]
    return {"groups": groups, "state": states}


def _names_in_the_optimizer(learner: ParallelLearner) -> list[list[str]]:
    """The parameters' names, for each group of the optimizer, in the order in which it counts
    them."""
    assert learner.optimizer is not None
    names = {id(parameter): name for name, parameter in learner.parameters.items()}
    groups = [group["params"] for group in learner.optimizer.param_groups]
    if learner.zero is not None:
        groups = learner.zero.division.original
    return [[names[id(parameter)] for parameter in group] for group in groups]


def _joined(
    state: Mapping[str, Any], parameter: Tensor, how: tuple[Division, Group] | None
) -> dict[str, Any]:
    """An optimizer's state of one parameter, undivided; all tensor neighbours call it."""
    if how is None:
        return dict(state)
    division, group = how
    return {
        key: gathered(value, group.unmetered(), division)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def _own_part(learner: ParallelLearner, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_joined`."""
    how, parameter = divisions(learner.model).get(name), learner.parameters[name]
    if how is None:
        return dict(state)
    division, group = how
    shape = list(parameter.shape)
    shape[division.dim] = division.length
    return {
        key: division.part(value, group.rank, group.size)
        if isinstance(value, Tensor) and list(value.shape) == shape
        else value
        for key, value in state.items()
    }


def restore(
    learner: ParallelLearner, weights: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Takes this rank\'s part of a checkpoint, of this mesh or another."""
    own, held, divided = (
        learner.model.state_dict(keep_vars=True),
        set(learner.held),
        divisions(learner.model),
    )
    with mesh_zero.whole(learner), torch.no_grad():
        for name, value in weights.items():
            module, _, entry = name.rpartition(".")
            if entry == "_extra_state":
                learner.model.get_submodule(module).set_extra_state(value)
            elif learner.first_name[name] in held:
                if name in divided:
                    division, group = divided[name]
                    value = division.part(value, group.rank, group.size)
                own[name].copy_(value)
    if learner.zero is not None and learner.zero.stage == 1:
        held_here = {
            str(i): parameter.detach().clone()
            for i, parameter in enumerate(learner.parameters.values())
        }
        learner.zero.load_state_dict(held_here)
    buffers = {name: value for name, value in state["buffers"].items() if name in held}
    load_passing_buffers(learner.model, buffers)
    if learner.optimizer is not None:
        states: dict[str, Any] = {}
        for part in state["parts"]:
            own_names = part["state"].keys() & learner.parameters.keys()
            states |= {name: _own_part(learner, name, part["state"][name]) for name in own_names}
        names = _names_in_the_optimizer(learner)
        settings = {
            name: group
            for part in state["parts"]
            for group in part["groups"]
            for name in group["params"]
        }
        now = (
            learner.zero.division.groups()
            if learner.zero
            else learner.optimizer.state_dict()["param_groups"]
        )
        # one may be empty, as of biases where a stage has none, or unknown, where nobody trained it
        # there
        groups = [
            {
                **next((settings[name] for name in own if name in settings), group),
                "params": group["params"],
            }
            for own, group in zip(names, now, strict=True)
        ]
        numbered = enumerate(name for group in names for name in group)
        load_state = (
            learner.zero.load_optimizer_state_dict
            if learner.zero
            else learner.optimizer.load_state_dict
        )
        load_state(
            {
                "state": {index: states[name] for index, name in numbered if name in states},
                "param_groups": groups,
            }
        )
    learner.step = state["step"]

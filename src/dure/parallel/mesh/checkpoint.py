"""The checkpoint of a run on a mesh: that of the undivided model, which loads onto any other mesh.

weights     each from the first stage that holds it, its parts joined over the tensor group
optimizer   the state of each parameter, by its name, undivided
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.machine.devices import to_cpu
from dure.parallel.mesh.held import Held
from dure.parallel.mesh.zero import whole
from dure.parallel.tensor.division import Division
from dure.parallel.tensor.functions import gathered
from dure.parallel.tensor.state import divisions, whole_state_dict
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from dure.record.weights import weights_from_bytes, weights_to_bytes
from dure.tensors.buffers import load_passing_buffers, passing_buffers
from dure.tensors.optimizer_state import load_optimizer


def weights_of(held: Held) -> dict[str, Tensor]:
    """The undivided model's state_dict, on rank 0; all ranks call it."""
    joined: dict[str, Tensor] = {}
    # All ranks gather, though only some write.
    with whole(held):
        state = whole_state_dict(held.model)
    # One after another, so that rank 0 needs room for the model, and not for messages as large.
    for name, value in state.items():
        stage = _keeper(held, name)
        if stage == 0:  # where rank 0 is
            joined[name] = to_cpu(value)
            continue
        # The others send nothing, and take part all the same.
        sends = _writes(held) and stage == held.at.pipeline
        content = weights_to_bytes({name: to_cpu(value)}) if sends else b""
        for part in held.group.gather_bytes(content):
            if part:
                joined |= weights_from_bytes(part)
    return joined if held.group.rank == 0 else {}


def _writes(held: Held) -> bool:
    """Whether this rank writes what its stages hold: one of those that hold the same does."""
    return held.at.data == 0 and held.at.tensor == 0


def _keeper(held: Held, name: str) -> int:
    """The stage's rank from which an entry of the state_dict is taken."""
    # What a module adds to the state_dict by itself is no parameter or buffer: all ranks have it.
    return held.keepers.get(held.first_name[name], [0])[0]


def state_of(held: Held) -> dict[str, Any]:
    """What all ranks have alike."""
    return {"step": held.step, "buffers": _passing_buffers(held)}


def _passing_buffers(held: Held) -> dict[str, Tensor]:
    """Those of all stages that a state_dict leaves out, on rank 0; all ranks call it."""
    divided = divisions(held.model)
    own = {}
    for name, value in passing_buffers(held.model).items():
        # Every tensor neighbour takes part in the joining, though only the first one writes.
        own[name] = _whole(value, divided.get(name)) if name in held.names else value
    mine = {name: value for name, value in own.items() if held.is_first(name)}
    mine = mine if _writes(held) else {}
    found: dict[str, Tensor] = {}
    for part in held.group.gather_bytes(tree_to_bytes(to_cpu(mine))):
        found |= tree_from_bytes(part)
    return found


def _whole(tensor: Tensor, how: tuple[Division, Group] | None) -> Tensor:
    """A tensor of which this rank may hold a part; all tensor neighbours call it."""
    if how is None:
        return tensor
    division, group = how
    return gathered(tensor, group.unmetered(), division)


def part_of(held: Held) -> dict[str, Any]:
    """The optimizer's state of what this rank holds, by name."""
    if held.optimizer is None:
        return {"groups": [], "state": {}}
    state = held.zero.optimizer_state_dict() if held.zero else held.optimizer.state_dict()
    written = to_cpu(state)
    # torch numbers parameters through all groups; names hold on any other mesh.
    names = list(chain.from_iterable(_names_in_the_optimizer(held)))
    divided = divisions(held.model)
    states = {}
    for index, value in written["state"].items():
        name = names[index]
        # Every tensor neighbour takes part in the joining, though only the first one writes.
        states[name] = _joined(value, held.parameters[name], divided.get(name))
    groups = []
    for group in written["param_groups"]:
        groups.append({**group, "params": [names[index] for index in group["params"]]})
    return {"groups": groups, "state": states if _writes(held) else {}}


def _names_in_the_optimizer(held: Held) -> list[list[str]]:
    """The parameters' names, for each group of the optimizer, in the order of its numbers."""
    assert held.optimizer is not None
    names = {id(parameter): name for name, parameter in held.parameters.items()}
    groups = [group["params"] for group in held.optimizer.param_groups]
    if held.zero is not None:
        groups = held.zero.division.original
    named = []
    for group in groups:
        named.append([names[id(parameter)] for parameter in group])
    return named


def _joined(
    state: Mapping[str, Any], parameter: Tensor, how: tuple[Division, Group] | None
) -> dict[str, Any]:
    """An optimizer's state of one parameter, undivided; all tensor neighbours call it."""
    return {
        key: _whole(value, how)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def _own_part(held: Held, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_joined`."""
    how = divisions(held.model).get(name)
    if how is None:
        return dict(state)
    division, _ = how
    # the undivided shape, by which tensors that are to be cut are told from numbers
    shape = list(held.parameters[name].shape)
    shape[division.dim] = division.length
    return {
        key: _part(value, how)
        if isinstance(value, Tensor) and list(value.shape) == shape
        else value
        for key, value in state.items()
    }


def _part(whole: Tensor, how: tuple[Division, Group] | None) -> Tensor:
    """What this rank holds of a tensor."""
    if how is None:
        return whole
    division, group = how
    return division.part(whole, group.rank, group.size)


def restore(held: Held, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Takes this rank's part of a checkpoint, of this mesh or another."""
    _restore_weights(held, weights)
    divided = divisions(held.model)
    buffers = {}
    for name, value in state["buffers"].items():
        if name in held.names:
            buffers[name] = _part(value, divided.get(name))
    load_passing_buffers(held.model, buffers)
    _restore_optimizer(held, state["parts"])
    held.step = state["step"]


@torch.no_grad()
def _restore_weights(held: Held, weights: Mapping[str, Tensor]) -> None:
    own = held.model.state_dict(keep_vars=True)
    divided = divisions(held.model)
    with whole(held):
        for name, value in weights.items():
            module, _, entry = name.rpartition(".")
            # What a module adds by itself is no tensor of the model, and goes through its own
            # method.
            if entry == "_extra_state":
                held.model.get_submodule(module).set_extra_state(value)
            # Other stages' parameters have no memory here (`forget`).
            elif held.first_name[name] in held.names:
                own[name].copy_(_part(value, divided.get(name)))
    if held.zero is not None and held.zero.stage == 1:
        # In stages 2 and 3 ZeRO takes what was written when `whole` ends; in stage 1, where `whole`
        # does nothing, it is told here. It knows the parameters by their places.
        here = {}
        for place, parameter in enumerate(held.parameters.values()):
            here[str(place)] = parameter.detach().clone()
        held.zero.load_state_dict(here)


def _restore_optimizer(held: Held, parts: Sequence[Mapping[str, Any]]) -> None:
    """Takes what this rank trains out of what all ranks of the run before have written."""
    if held.optimizer is None:
        return
    states: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for part in parts:
        # The run before may have had another mesh: a parameter's state is looked for in what all of
        # its ranks have written.
        for name in part["state"].keys() & held.parameters.keys():
            states[name] = _own_part(held, name, part["state"][name])
        for group in part["groups"]:
            settings.update(dict.fromkeys(group["params"], group))
    names = _names_in_the_optimizer(held)
    now = held.zero.division.groups() if held.zero else held.optimizer.state_dict()["param_groups"]
    groups = []
    for own, group in zip(names, now, strict=True):
        # A group may be empty, such as that of biases where a stage has none, or unknown, where
        # no rank trained it: then it has the settings that it was made with.
        known = next((settings[name] for name in own if name in settings), group)
        groups.append({**known, "params": group["params"]})
    numbered = enumerate(chain.from_iterable(names))
    restored = {
        "state": {index: states[name] for index, name in numbered if name in states},
        "param_groups": groups,
    }
    if held.zero is not None:
        held.zero.load_optimizer_state_dict(restored)
    else:
        load_optimizer(held.optimizer, restored)

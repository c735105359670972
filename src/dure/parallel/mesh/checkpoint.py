"""Checkpoint of a run on a mesh: the checkpoint of the undivided model, which loads onto any mesh.

weights     each from the first stage that stores it, its parts joined over the tensor group
optimizer   the state of each parameter, by its name, undivided

The checkpoint is built tensor by tensor, in files (`dure.memory.spill_store`), and each rank reads
its part from it: no rank needs memory for more than its part and one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.collectives.tensor_transfer import gathered
from dure.machine.devices import to_cpu
from dure.memory.spill_store import SpillStore, spilled_copy
from dure.parallel.mesh.rank_state import RankState
from dure.parallel.tensor.division import Division
from dure.parallel.tensor.functions import gathered as joined
from dure.parallel.tensor.state import divisions
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from dure.record.disk_tensors import DiskTensor, DiskTensors, Leaf, in_memory, leaves_of
from dure.tensors.buffers import load_non_persistent_buffers, non_persistent_buffers_of
from dure.tensors.optimizer_state import load_optimizer


def weights_of(rank_state: RankState) -> Mapping[str, Tensor]:
    """Return the undivided model's state_dict on rank 0; all ranks call this function together."""
    shelf = SpillStore(rank_state.folder)
    found: dict[str, Leaf] = {}
    for part in gathered(rank_state.group, _weights_here(rank_state, shelf), shelf.place):
        found |= part
    # In the model's order, not in the order of stages.
    names = rank_state.model.state_dict(keep_vars=True) if found else ()
    return DiskTensors({name: found[name] for name in names})


@torch.no_grad()
def _weights_here(rank_state: RankState, store: SpillStore) -> dict[str, Leaf]:
    """Return the entries of the undivided model's state_dict that this rank writes."""
    own: dict[str, Any] = rank_state.model.state_dict(keep_vars=True)
    if rank_state.zero is not None and rank_state.zero.stage > 1:
        own = leaves_of(rank_state.zero.weights(store))
    # Other data groups have equal tensors, or have just gathered them to the first data group.
    if rank_state.at.data:
        return {}
    divided = divisions(rank_state.model)
    places: dict[int, Leaf] = {}
    found: dict[str, Leaf] = {}
    for name, value in own.items():
        if _keeper(rank_state, name) != rank_state.at.pipeline:
            continue
        if id(value) not in places:
            places[id(value)] = _joined(value, divided.get(name), store, _writes(rank_state))
        found[name] = places[id(value)]
    return found if _writes(rank_state) else {}


def _joined(
    value: Leaf, how: tuple[Division, Group] | None, store: SpillStore, keeps: bool
) -> Leaf:
    """Return a tensor, of which this rank may hold a part, undivided and in a file.

    keeps: whether this rank needs the result. All tensor neighbours call this function together.
    """
    if how is None and isinstance(value, DiskTensor):
        return value
    whole = _whole(in_memory(value).detach(), how)
    if not keeps:
        return value
    return spilled_copy(whole, store)


def _writes(rank_state: RankState) -> bool:
    """Return whether this rank writes its stages' tensors, for all ranks with the same tensors."""
    return rank_state.at.data == 0 and rank_state.at.tensor == 0


def _keeper(rank_state: RankState, name: str) -> int:
    """Return the pipeline rank from which an entry of the state_dict is taken."""
    # Extra state of a module is no parameter or buffer: all ranks have it.
    return rank_state.keepers.get(rank_state.first_name[name], [0])[0]


def state_of(rank_state: RankState) -> dict[str, Any]:
    """Return the state that is equal on all ranks: step and buffers."""
    return {"step": rank_state.step, "buffers": _passing_buffers(rank_state)}


def _passing_buffers(rank_state: RankState) -> dict[str, Tensor]:
    """Return all stages' buffers that a state_dict omits, on rank 0; all ranks call it together."""
    divided = divisions(rank_state.model)
    own = {}
    for name, value in non_persistent_buffers_of(rank_state.model).items():
        # Every tensor neighbour takes part in the all-gather, although only the first one writes.
        own[name] = _whole(value, divided.get(name)) if name in rank_state.names else value
    mine = {name: value for name, value in own.items() if rank_state.is_first(name)}
    mine = mine if _writes(rank_state) else {}
    found: dict[str, Tensor] = {}
    for part in rank_state.group.gather_bytes(tree_to_bytes(to_cpu(mine))):
        found |= tree_from_bytes(part)
    return found


def _whole(tensor: Tensor, how: tuple[Division, Group] | None) -> Tensor:
    """Return a whole tensor from the ranks' parts; all tensor neighbours call it together."""
    if how is None:
        return tensor
    division, group = how
    return joined(tensor, group.unmetered(), division)


def part_of(rank_state: RankState) -> dict[str, Any]:
    """Return the optimizer's state of the parameters on this rank, by name."""
    if rank_state.optimizer is None:
        return {"groups": [], "state": {}}
    shelf = SpillStore(rank_state.folder)
    if rank_state.zero is not None:
        written = rank_state.zero.optimizer_state_dict(shelf)
    else:
        written = rank_state.optimizer.state_dict()
    # torch numbers parameters through all groups; names are valid on any mesh.
    names = list(chain.from_iterable(_names_in_the_optimizer(rank_state)))
    groups = []
    for group in written["param_groups"]:
        groups.append({**group, "params": [names[index] for index in group["params"]]})
    # Other data groups have equal states.
    if rank_state.at.data:
        return {"groups": to_cpu(groups), "state": {}}
    divided = divisions(rank_state.model)
    states = {}
    for index, value in written["state"].items():
        name = names[index]
        shape = rank_state.parameters[name].shape
        states[name] = _state_joined(rank_state, value, shape, divided.get(name), shelf)
    return to_cpu({"groups": groups, "state": states if _writes(rank_state) else {}})  # type: ignore[no-any-return]


def _state_joined(
    rank_state: RankState,
    state: Mapping[str, Any],
    shape: torch.Size,
    how: tuple[Division, Group] | None,
    store: SpillStore,
) -> dict[str, Any]:
    """Return the undivided state of a parameter; all tensor neighbours call it together."""
    if how is None:
        return dict(state)
    return {
        key: _joined(value, how, store, _writes(rank_state)) if _is_of(value, shape) else value
        for key, value in state.items()
    }


def _is_of(value: Any, shape: Sequence[int]) -> bool:
    """Return whether a value is a tensor of this shape, which is divided like its parameter."""
    return isinstance(value, (Tensor, DiskTensor)) and tuple(value.shape) == tuple(shape)


def _names_in_the_optimizer(rank_state: RankState) -> list[list[str]]:
    """Return the parameters' names for each group of the optimizer, in the optimizer's order."""
    assert rank_state.optimizer is not None
    names = {id(parameter): name for name, parameter in rank_state.parameters.items()}
    groups = [group["params"] for group in rank_state.optimizer.param_groups]
    if rank_state.zero is not None:
        groups = rank_state.zero.division.original
    named = []
    for group in groups:
        named.append([names[id(parameter)] for parameter in group])
    return named


def _own_part(
    rank_state: RankState,
    name: str,
    state: Mapping[str, Any],
    how: tuple[Division, Group] | None,
    store: SpillStore,
) -> dict[str, Any]:
    """Return this rank's part of an optimizer's state: the inverse of `_state_joined`.

    The result is in memory, unless ZeRO divides it further.
    """
    # the undivided shape, which distinguishes tensors to be cut from numbers
    shape = list(rank_state.parameters[name].shape)
    if how is not None:
        shape[how[0].dim] = how[0].length
    own = {
        key: _cut(value, how, store) if _is_of(value, shape) else value
        for key, value in state.items()
    }
    if rank_state.zero is not None:
        return own
    return {key: in_memory(one) if isinstance(one, DiskTensor) else one for key, one in own.items()}


def _cut(value: Leaf, how: tuple[Division, Group] | None, store: SpillStore) -> Leaf:
    """Return this rank's part of a tensor; the part of a file is in a file."""
    if how is None or not isinstance(value, DiskTensor):
        return _part(in_memory(value), how)
    return spilled_copy(_part(value.mapped(), how), store)


def _part(whole: Tensor, how: tuple[Division, Group] | None) -> Tensor:
    """Return this rank's part of a tensor."""
    if how is None:
        return whole
    division, group = how
    return division.part(whole, group.rank, group.size)


def restore(rank_state: RankState, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Load this rank's part of a checkpoint of this mesh or another mesh."""
    _restore_weights(rank_state, weights)
    divided = divisions(rank_state.model)
    buffers = {}
    for name, value in state["buffers"].items():
        if name in rank_state.names:
            buffers[name] = _part(in_memory(value), divided.get(name))
    load_non_persistent_buffers(rank_state.model, buffers)
    _restore_optimizer(rank_state, state["parts"])
    rank_state.step = state["step"]


@torch.no_grad()
def _restore_weights(rank_state: RankState, weights: Mapping[str, Tensor]) -> None:
    own = rank_state.model.state_dict(keep_vars=True)
    divided = divisions(rank_state.model)
    leaves = leaves_of(weights)
    shelf = SpillStore(rank_state.folder)
    if rank_state.zero is not None and rank_state.zero.stage > 1:
        rank_state.zero.load_state_dict(
            {name: _cut(leaf, divided.get(name), shelf) for name, leaf in leaves.items()}
        )
        return
    # ZeRO loads its divided parameters itself.
    taken = set() if rank_state.zero is None else set(rank_state.parameters)
    for name in leaves:
        module, _, entry = name.rpartition(".")
        # Extra state of a module is no tensor of the model, and has a separate method.
        if entry == "_extra_state":
            rank_state.model.get_submodule(module).set_extra_state(weights[name])
        # Other stages' parameters have no memory here (`forget`).
        elif rank_state.first_name[name] in rank_state.names - taken:
            own[name].copy_(_part(weights[name], divided.get(name)))
    if rank_state.zero is not None:
        # In stage 1 ZeRO names parameters by their index.
        here = {}
        for place, name in enumerate(rank_state.parameters):
            here[str(place)] = _cut(leaves[name], divided.get(name), shelf)
        rank_state.zero.load_state_dict(here)


def _restore_optimizer(rank_state: RankState, parts: Sequence[Mapping[str, Any]]) -> None:
    """Load the state of this rank's parameters from the parts of all ranks of the earlier run."""
    if rank_state.optimizer is None:
        return
    states: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    divided = divisions(rank_state.model)
    shelf = SpillStore(rank_state.folder)
    for part in parts:
        # The earlier run may have had another mesh: search the parts of all its ranks for a
        # parameter's state.
        for name in part["state"].keys() & rank_state.parameters.keys():
            state = part["state"][name]
            states[name] = _own_part(rank_state, name, state, divided.get(name), shelf)
        for group in part["groups"]:
            settings.update(dict.fromkeys(group["params"], group))
    names = _names_in_the_optimizer(rank_state)
    now = (
        rank_state.zero.division.groups()
        if rank_state.zero
        else rank_state.optimizer.state_dict()["param_groups"]
    )
    groups = []
    for own, group in zip(names, now, strict=True):
        # A group may be empty, such as a group of biases in a stage without biases, or unknown, if
        # no rank trained it. Then the group's initial settings stay.
        known = next((settings[name] for name in own if name in settings), group)
        groups.append({**known, "params": group["params"]})
    numbered = enumerate(chain.from_iterable(names))
    restored = {
        "state": {index: states[name] for index, name in numbered if name in states},
        "param_groups": groups,
    }
    if rank_state.zero is not None:
        rank_state.zero.load_optimizer_state_dict(restored)
    else:
        load_optimizer(rank_state.optimizer, restored)

"""Optimizers that update a rank's pieces, and the collection of their whole state.

An optimizer is divided by replacing the parameters of its groups with the pieces. Its settings, and
objects that refer to the optimizer (such as a scheduler of learning rates), stay as they are. This
is right for element-wise optimizers; others are refused (`dure.parallel.optimizer_sharding`).

The whole state has the form of `Optimizer.state_dict()` over the undivided parameters. It therefore
loads into the same optimizer of one process, of DataParallel, and of ZeRO on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.collectives.group import Group
from dure.collectives.tensor_transfer import gathered
from dure.memory.spill_store import IN_MEMORY, SpillStore
from dure.parallel.zero.shares import OptimizerPiece, ParameterShare
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from dure.record.disk_tensors import (
    DiskTensor,
    Leaf,
    TensorMeta,
    elements,
    form_of,
    forms_of,
    in_memory,
    put,
    run_of,
)
from dure.tensors.optimizer_state import load_optimizer


class PartitionedOptimizer:
    """An optimizer whose parameter groups have this rank's pieces.

    original: the undivided parameters of each group, in order.
    """

    def __init__(self, optimizer: Optimizer, shares: Sequence[ParameterShare]) -> None:
        self.optimizer = optimizer
        self.shares = list(shares)
        held = {id(share.parameters[part.place]): part for share in shares for part in share.held}
        self.original: list[list[nn.Parameter]] = []
        for group in optimizer.param_groups:
            parameters = list(group["params"])
            self.original.append(parameters)
            # A parameter without a piece on this rank leaves the group; the group remains, with its
            # settings.
            group["params"] = [
                held[id(parameter)].part for parameter in parameters if id(parameter) in held
            ]
        for parameters in self.original:
            for parameter in parameters:
                # An optimizer that has made steps before has state to divide.
                state = optimizer.state.pop(parameter, None)
                if state is not None and id(parameter) in held:
                    optimizer.state[held[id(parameter)].part] = _divided(
                        state, parameter.shape, held[id(parameter)]
                    )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Undivided parameters in the order of the groups."""
        return [parameter for group in self.original for parameter in group]

    def state_dict(self, group: Group, store: SpillStore = IN_MEMORY) -> dict[str, Any]:
        """Return the whole state on rank 0; on other ranks only the settings. All ranks call it.

        Tensors of other ranks go to their place on the shelf, a few million bytes at a time.
        """
        mine = _Rows(self)
        told = group.gather_bytes(tree_to_bytes(mine.rows))
        # Only rank 0 receives the rows of the others and allocates the whole state.
        whole = _Whole(store)
        for rows in [mine.rows, *map(tree_from_bytes, told[1:])] if group.rank == 0 else []:
            whole.make_room(rows)
        gathered(group, mine.tensors, whole.place)
        if group.rank == 0:
            for form in forms_of(mine.tensors):
                put(whole.place(form), 0, mine.tensors[form.name])
        return {"state": dict(sorted(whole.state.items())), "param_groups": self.groups()}

    def state_of(self, part: nn.Parameter | None) -> Mapping[str, Any]:
        """Return the state of a piece; empty if there is none."""
        found: Mapping[str, Any] = self.optimizer.state.get(part, {}) if part is not None else {}
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups' settings, with parameters numbered as in torch's state_dict."""
        groups = []
        first = 0
        for settings, parameters in zip(self.optimizer.param_groups, self.original, strict=True):
            numbers = list(range(first, first + len(parameters)))
            groups.append(
                {**{k: v for k, v in settings.items() if k != "params"}, "params": numbers}
            )
            first += len(parameters)
        return groups

    def load_state_dict(self, whole: Mapping[str, Any]) -> None:
        """Load this rank's pieces of a whole state, which is given on every rank.

        Raises ValueError if the state is that of an optimizer over other parameters.
        """
        sizes = [len(group["params"]) for group in whole["param_groups"]]
        if sizes != [len(parameters) for parameters in self.original]:
            raise ValueError(
                f"this state has groups of {sizes} parameters, but the optimizer has groups of "
                f"{[len(parameters) for parameters in self.original]}"
            )
        numbers = [number for group in whole["param_groups"] for number in group["params"]]
        states = dict(
            zip(map(id, self.parameters), (whole["state"].get(n) for n in numbers), strict=True)
        )
        parts: dict[int, Any] = {}
        for share in self.shares:
            for held in share.held:
                state = states.get(id(share.parameters[held.place]))
                parts[id(held.part)] = (
                    _divided(state, share.block.shapes[held.place], held) if state else {}
                )
        self.load_parts(parts, whole["param_groups"])

    def load_parts(
        self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Load the states of this rank's pieces, by the piece's id, and the settings of the groups.

        Raises ValueError if the number of groups differs.
        """
        self.check_groups(groups)
        # torch's load_state_dict numbers parameters through all groups; pieces are numbered in the
        # same way.
        mine: dict[int, Any] = {}
        settings = []
        first = 0
        for group, given in zip(self.optimizer.param_groups, groups, strict=True):
            for number, part in enumerate(group["params"], start=first):
                if states.get(id(part)):
                    mine[number] = dict(states[id(part)])
            here = list(range(first, first + len(group["params"])))
            settings.append({**{k: v for k, v in given.items() if k != "params"}, "params": here})
            first += len(here)
        load_optimizer(self.optimizer, {"state": mine, "param_groups": settings})

    def check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that a state has as many groups as the optimizer. Raises ValueError otherwise."""
        if len(groups) != len(self.optimizer.param_groups):
            raise ValueError(
                f"this state has {len(groups)} parameter groups, but the optimizer has "
                f"{len(self.optimizer.param_groups)}"
            )


def _divided(
    state: Mapping[str, Any], shape: Sequence[int], held: OptimizerPiece
) -> dict[str, Any]:
    """Return the state of a piece, from the state of its parameter.

    Tensors of the parameter's shape are cut; other values stay as they are.
    """
    piece = held.piece

    def cut(value: Any) -> Any:
        if not isinstance(value, (Tensor, DiskTensor)):
            return value
        # A tensor without dimensions is not cut: a count of steps, or the state of a parameter with
        # a single element.
        if tuple(value.shape) == tuple(shape) and value.dim():
            return elements(value, piece.start, piece.stop).clone()
        return in_memory(value).clone()

    return {key: cut(value) for key, value in state.items()}


class _Rows:
    """The optimizer's state on this rank, as rows for rank 0 and tensors.

    rows: for each piece, the number of its parameter, the parameter's shape, and its state: for
    each name either a single number, or the dtype of a tensor. tensors: the tensors, by "number
    start name".
    """

    def __init__(self, division: PartitionedOptimizer) -> None:
        self.rows: list[list[Any]] = []
        self.tensors: dict[str, Tensor] = {}
        number_of = {id(parameter): n for n, parameter in enumerate(division.parameters)}
        for share in division.shares:
            for held in share.held:
                # The optimizer may not have every trained parameter.
                number = number_of.get(id(share.parameters[held.place]))
                if number is not None:
                    shape = share.block.shapes[held.place]
                    self._add(number, shape, held.piece.start, division.state_of(held.part))

    def _add(self, number: int, shape: Sequence[int], start: int, state: Mapping[str, Any]) -> None:
        row: list[list[Any]] = []
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                self.tensors[f"{number} {start} {key}"] = value
                row.append([key, form_of(key, value.dtype, ()).dtype, None])
            else:
                row.append([key, None, value])
        # A parameter that was never used has no state.
        if row:
            self.rows.append([number, list(shape), row])


class _Whole:
    """The whole state of the undivided optimizer, as rank 0 collects it."""

    def __init__(self, store: SpillStore) -> None:
        self.store = store
        self.state: dict[int, dict[str, Any]] = {}

    def make_room(self, rows: Sequence[Sequence[Any]]) -> None:
        """Allocate the tensors of a rank's rows. Single numbers are taken from the first piece."""
        for number, shape, row in rows:
            own = self.state.setdefault(number, {})
            for key, dtype, value in row:
                if key not in own:
                    own[key] = (
                        value if dtype is None else self.store.place(TensorMeta(key, dtype, shape))
                    )

    def place(self, form: TensorMeta) -> Leaf:
        """Return the memory of a run of elements, by "number start name"."""
        number, start, key = form.name.split(" ", 2)
        (length,) = form.shape
        return run_of(self.state[int(number)][key], int(start), int(start) + length)

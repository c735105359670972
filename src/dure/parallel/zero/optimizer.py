"""Optimizers that update a rank's pieces, and how their state becomes whole again.

An optimizer is divided by giving its parameter groups the pieces instead of the parameters, so all
its settings, and the objects that hold it (a scheduler of learning rates), stay as they are. That
is right for optimizers that treat every element for itself; others are refused
(`dure.parallel.divisible`).

The whole state has the form of `Optimizer.state_dict()` over the undivided parameters, and so loads
into the same optimizer of one process, of DataParallel, and of ZeRO on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dure.collectives.group import Group
from dure.collectives.leaves import gathered
from dure.memory.shelf import IN_MEMORY, Shelf
from dure.parallel.zero.shares import Held, Share
from dure.record.checkpoint import tree_from_bytes, tree_to_bytes
from dure.record.on_disk import (
    Form,
    Leaf,
    OnDisk,
    elements,
    form_of,
    forms_of,
    in_memory,
    put,
    run_of,
)
from dure.tensors.optimizer_state import load_optimizer


class Division:
    """An optimizer whose groups hold this rank's pieces.

    original: the undivided parameters of each group, in order.
    """

    def __init__(self, optimizer: Optimizer, shares: Sequence[Share]) -> None:
        self.optimizer = optimizer
        self.shares = list(shares)
        held = {id(share.parameters[part.place]): part for share in shares for part in share.held}
        self.original: list[list[nn.Parameter]] = []
        for group in optimizer.param_groups:
            parameters = list(group["params"])
            self.original.append(parameters)
            # A parameter of which this rank has no piece leaves the group here; the group remains,
            # with its settings.
            group["params"] = [
                held[id(parameter)].part for parameter in parameters if id(parameter) in held
            ]
        for parameters in self.original:
            for parameter in parameters:
                # An optimizer that has made steps before brings its state along.
                state = optimizer.state.pop(parameter, None)
                if state is not None and id(parameter) in held:
                    optimizer.state[held[id(parameter)].part] = _divided(
                        state, parameter.shape, held[id(parameter)]
                    )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The undivided parameters in the order of the groups."""
        return [parameter for group in self.original for parameter in group]

    def state_dict(self, group: Group, shelf: Shelf = IN_MEMORY) -> dict[str, Any]:
        """The whole state on rank 0, elsewhere without that of the parameters. All ranks call it.

        What comes from others goes into its place on the shelf, a few million bytes at a time.
        """
        mine = _Rows(self)
        told = group.gather_bytes(tree_to_bytes(mine.rows))
        # Elsewhere than on rank 0 nothing is told, and so nothing is made room for.
        whole = _Whole(shelf)
        for rows in [mine.rows, *map(tree_from_bytes, told[1:])] if group.rank == 0 else []:
            whole.make_room(rows)
        gathered(group, mine.tensors, whole.place)
        if group.rank == 0:
            for form in forms_of(mine.tensors):
                put(whole.place(form), 0, mine.tensors[form.name])
        return {"state": dict(sorted(whole.state.items())), "param_groups": self.groups()}

    def state_of(self, part: nn.Parameter | None) -> Mapping[str, Any]:
        """The state of a piece, if it has any."""
        found: Mapping[str, Any] = self.optimizer.state.get(part, {}) if part is not None else {}
        return found

    def groups(self) -> list[dict[str, Any]]:
        """The settings, with the numbers of the parameters as in a state_dict of torch."""
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
        """Takes this rank's pieces of a whole state, which every rank gives.

        Raises ValueError if it is that of an optimizer over other parameters.
        """
        sizes = [len(group["params"]) for group in whole["param_groups"]]
        if sizes != [len(parameters) for parameters in self.original]:
            raise ValueError(
                f"this state is of groups of {sizes} parameters, and the optimizer has groups of "
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
        """Takes the states of this rank's pieces, by their id, and the settings of the groups.

        Raises ValueError if there are not as many groups.
        """
        self.check_groups(groups)
        # torch's load_state_dict knows parameters by their number through all groups: pieces are
        # numbered in the same way.
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
        """Raises ValueError if a state of so many groups is not the optimizer's."""
        if len(groups) != len(self.optimizer.param_groups):
            raise ValueError(
                f"this state has {len(groups)} parameter groups, the optimizer "
                f"{len(self.optimizer.param_groups)}"
            )


def _divided(state: Mapping[str, Any], shape: Sequence[int], held: Held) -> dict[str, Any]:
    """The piece of one parameter's state.

    Tensors of the parameter's shape are cut; single numbers stay as they are.
    """
    piece = held.piece

    def cut(value: Any) -> Any:
        if not isinstance(value, (Tensor, OnDisk)):
            return value
        # Without dimensions there is nothing to cut: a count of steps, or the state of a single
        # number.
        if tuple(value.shape) == tuple(shape) and value.dim():
            return elements(value, piece.start, piece.stop).clone()
        return in_memory(value).clone()

    return {key: cut(value) for key, value in state.items()}


class _Rows:
    """What a rank has of the optimizer's state.

    rows: for each piece the number of its parameter, the parameter's shape, and what there is by
    name: either a single number, or the dtype of a tensor. tensors: these, by "number start name".
    """

    def __init__(self, division: Division) -> None:
        self.rows: list[list[Any]] = []
        self.tensors: dict[str, Tensor] = {}
        number_of = {id(parameter): n for n, parameter in enumerate(division.parameters)}
        for share in division.shares:
            for held in share.held:
                # A trained parameter may not be the optimizer's.
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
        # One that was never used has no state.
        if row:
            self.rows.append([number, list(shape), row])


class _Whole:
    """The state of the undivided optimizer, as rank 0 puts it together."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.state: dict[int, dict[str, Any]] = {}

    def make_room(self, rows: Sequence[Sequence[Any]]) -> None:
        """Takes a rank's rows. Single numbers are those of the first piece."""
        for number, shape, row in rows:
            own = self.state.setdefault(number, {})
            for key, dtype, value in row:
                if key not in own:
                    own[key] = value if dtype is None else self.shelf.place(Form(key, dtype, shape))

    def place(self, form: Form) -> Leaf:
        """Where a run of elements belongs."""
        number, start, key = form.name.split(" ", 2)
        (length,) = form.shape
        return run_of(self.state[int(number)][key], int(start), int(start) + length)

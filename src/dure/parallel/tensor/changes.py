"""Plan entries that change modules without replacing them: hooks, and parts of their tensors.

    Tensors    parameters and buffers of the module itself are divided, such as a table of biases
               with a column per head
    Enter      an input enters the divided region, once for several Columns inside
    Leave      the ranks' outputs are summed, for Rows inside that do not sum
    Cut, Join  a shard of an input is taken; shards of an output are joined
    OnShards   parameters get the sum of the ranks' gradients, because the module computes on shards
    OwnDraws   the module draws different random numbers on each rank

Each entry is checked first, and applied later, after the whole plan has been checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dure.collectives.group import Group
from dure.parallel.tensor.divided import DividedLayer, rank_parameter
from dure.parallel.tensor.division import Division, check_even
from dure.parallel.tensor.functions import (
    check_is_sequence,
    enter,
    enter_sequence,
    leave,
    leave_sequence,
    of_shard,
    of_whole,
    scatter_sequence,
    summed,
)
from dure.parallel.tensor.io_hooks import USUAL_ARGUMENT, on_input, on_output
from dure.parallel.tensor.opaque import is_tracing, opaque
from dure.parallel.tensor.plan_entry import DivisionContext, Positive, ValidatedEntry
from dure.parallel.tensor.rng import RngTracker, mark_on_shards
from dure.tensors.backward import has_hooks


@dataclass(frozen=True)
class Tensors(ValidatedEntry):
    """Plan entry: parameters and buffers of the module itself are divided.

    names: names of the tensors. dim: the dimension that is divided. blocks, unit: as in `Column`.
    """

    names: tuple[str, ...]
    dim: int = -1
    blocks: Positive = 1
    unit: Positive = 1

    def __init__(self, *names: str, dim: int = -1, blocks: int = 1, unit: int = 1) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "unit", unit)
        self.__post_init__()

    def parts(
        self, name: str, module: nn.Module, at: DivisionContext
    ) -> dict[str, tuple[Tensor, Division]]:
        """Return this rank's part of each tensor, and its division.

        Raises ValueError if a tensor is missing, has hooks, or cannot be divided evenly.
        """
        if isinstance(module, DividedLayer):
            raise ValueError(f"{name} is a layer that the plan divides: leave Tensors out")
        return {own: self._part(name, module, own, at.group) for own in self.names}

    def _part(
        self, name: str, module: nn.Module, own: str, group: Group
    ) -> tuple[Tensor, Division]:
        where = f"{name}.{own}" if name else own
        whole = module._parameters.get(own, module._buffers.get(own, vars(module).get(own)))
        if not isinstance(whole, Tensor):
            raise ValueError(
                f"{name or 'the model'} does not have its own parameter or buffer {own!r} to divide"
            )
        dims = whole.dim()
        if not -dims <= self.dim < dims:
            raise ValueError(f"{where} has {dims} dimensions, and no dimension {self.dim}")
        if has_hooks(whole):
            raise ValueError(
                f"{where} has hooks, which its part would not have, so it cannot be divided"
            )
        dim = self.dim % dims
        length = whole.shape[dim]
        if length % self.blocks:
            raise ValueError(f"{where} has {length} to divide, not {self.blocks} equal blocks")
        blocks = (length // self.blocks,) * self.blocks
        check_even(f"{where} of shape {list(whole.shape)}", blocks, group.size, self.unit)
        division = Division(dim, blocks)
        if isinstance(whole, nn.Parameter):
            return rank_parameter(whole, division, group), division
        return division.part(whole.detach(), group.rank, group.size), division


@dataclass(frozen=True)
class Enter(ValidatedEntry):
    """Plan entry: an input of a module enters the divided region.

    sequence: the dimension along which the input is a shard, and along which all shards are
    gathered; None: the input is whole. argument: its name in the module's forward; the default
    takes the usual name, or the first argument if no argument has the usual name.
    """

    sequence: int | None = None
    argument: str = USUAL_ARGUMENT

    def change(self, name: str, module: nn.Module, at: DivisionContext) -> Callable[[], None]:
        """Return a function that installs the hook on the module's input."""
        group = at.group
        draws = at.draws
        sequence = self.sequence

        def entered(tensor: Tensor) -> Tensor:
            check_is_sequence(name or "the model", tensor.dim(), sequence)
            # A trace has a single opaque operation here; the program calls this function again when
            # it runs.
            if is_tracing():
                shape = list(tensor.shape)
                if sequence is not None:
                    shape = of_whole(shape, sequence, group)
                return opaque(entered, tensor, shape, opens=1)
            if sequence is not None:
                return enter_sequence(tensor, group, sequence)
            # Evaluation draws nothing, so no seed has to be drawn.
            if module.training:
                draws.enter()
            return enter(tensor, group)

        return on_input(name, module, entered, self.argument)


@dataclass(frozen=True)
class Leave(ValidatedEntry):
    """Plan entry: the ranks' outputs are summed, for a module that ends with `Row(leaves=False)`.

    sequence: the dimension of the output along which each rank gets a shard of the sum; None gives
    each rank the whole sum.
    """

    sequence: int | None = None

    def change(self, name: str, module: nn.Module, at: DivisionContext) -> Callable[[], None]:
        """Return a function that installs the hook on the module's output."""
        group = at.group
        sequence = self.sequence

        def left(tensor: Tensor) -> Tensor:
            check_is_sequence(name or "the model", tensor.dim(), sequence)
            if is_tracing():
                shape = list(tensor.shape)
                if sequence is not None:
                    shape = of_shard(shape, sequence, group)
                return opaque(left, tensor, shape, opens=-1)
            if sequence is not None:
                return leave_sequence(tensor, group, sequence)
            return leave(tensor, group)

        return on_output(name, module, left)


@dataclass(frozen=True)
class Cut(ValidatedEntry):
    """Plan entry: a module takes a shard of an input.

    dim: the dimension that is cut. argument: as in `Enter`. units: if `dim` consists of runs of
    this many units, such as heads in a dimension of examples·heads, each run is cut; None: `dim` is
    cut once.
    """

    dim: int = 1
    argument: str = USUAL_ARGUMENT
    units: Positive | None = None

    def change(self, name: str, module: nn.Module, at: DivisionContext) -> Callable[[], None]:
        """Return a function that installs the hook on the module's input.

        Raises ValueError if the degree does not divide `units`.
        """
        group = at.group
        units = self.units
        if units is not None and units % group.size:
            raise ValueError(
                f"{name or 'the model'} cuts {units} units, not a multiple of the degree "
                f"{group.size}: choose a degree that divides them"
            )

        def shard(tensor: Tensor) -> Tensor:
            if is_tracing():
                return opaque(shard, tensor, of_shard(tensor.shape, self.dim, group))
            if units is None:
                return scatter_sequence(tensor, group, self.dim)
            dim = self.dim % tensor.dim()
            runs = tensor.unflatten(dim, (-1, units))  # type: ignore[no-untyped-call]
            return scatter_sequence(runs, group, dim + 1).flatten(dim, dim + 1)

        return on_input(name, module, shard, self.argument)


@dataclass(frozen=True)
class Join(ValidatedEntry):
    """Plan entry: a module's output shards are joined. dim: the dimension of the shards."""

    dim: int = 1

    def change(self, name: str, module: nn.Module, at: DivisionContext) -> Callable[[], None]:
        """Return a function that installs the hook on the module's output."""
        group = at.group
        dim = self.dim

        def joined(tensor: Tensor) -> Tensor:
            if is_tracing():
                return opaque(joined, tensor, of_whole(tensor.shape, dim, group))
            return enter_sequence(tensor, group, dim)

        return on_output(name, module, joined)


@dataclass(frozen=True)
class OnShards(ValidatedEntry):
    """Plan entry: a module computes on shards, so ranks sum its parameters' gradients.

    names: parameters of the module itself; empty: all parameters, including those of submodules.
    Each parameter costs an all-reduce, which begins as soon as autograd has the gradient.
    """

    names: tuple[str, ...] = ()

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)
        self.__post_init__()

    def change(self, name: str, module: nn.Module, at: DivisionContext) -> Callable[[], None]:
        """Return a function that installs hooks on the module's parameters.

        Raises ValueError for an unknown parameter.
        """
        group = at.group
        for own in self.names:
            if module._parameters.get(own) is None:
                raise ValueError(f"{name or 'the model'} has no parameter {own!r} of its own")

        def watch(module: nn.Module, inputs: Any = None) -> None:
            # A tracer replaces parameters by its own tensors, which must not get the hooks.
            for parameter in () if is_tracing() else self._of(module):
                hooks: Any = parameter._backward_hooks or {}
                # Once for each parameter: this runs at every call, and for every module on shards
                # that has the parameter, nested or tied.
                if parameter.requires_grad and not any(
                    isinstance(hook, _OverRanks) for hook in hooks.values()
                ):
                    parameter.register_hook(_OverRanks(group))  # type: ignore[no-untyped-call]

        def install() -> None:
            if group.size > 1:
                # Now, for programs that contain its operations and do not call the module; and at
                # each call, for copies of the model, whose parameters have no hooks.
                watch(module)
                module.register_forward_pre_hook(watch)

        return install

    def _of(self, module: nn.Module) -> list[nn.Parameter]:
        if not self.names:
            return list(module.parameters())
        return [module.get_parameter(own) for own in self.names]


@dataclass(frozen=True)
class _OverRanks:
    """Hook of `OnShards` on a parameter: sum the gradient over the ranks."""

    group: Group

    def __call__(self, gradient: Tensor) -> Tensor:
        return summed(gradient, self.group)


@dataclass(frozen=True)
class OwnDraws:
    """Plan entry: each rank draws different random numbers inside the module."""

    def change(self, name: str, module: nn.Module, at: DivisionContext) -> Callable[[], None]:
        """Return a function that installs hooks around the module's forward."""
        # a separate object: the row-parallel layers inside leave `at.draws`
        draws = RngTracker(at.group, at.draws.device)

        def before(module: nn.Module, inputs: Any) -> None:
            if module.training and not is_tracing():
                draws.enter()

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            draws.leave()

        def install() -> None:
            mark_on_shards(module)
            module.register_forward_pre_hook(before)
            # after an error as well: other modules must not continue with this rank's own draws
            module.register_forward_hook(after, always_call=True)

        return install

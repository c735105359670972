"""A model is divided from outside: a plan says which of its modules become which, and the model's code stays.

    plan = {
        "blocks.*.query_key_value": Column(blocks=3, unit=head_width),
        "blocks.*.projection": Row(),
        "blocks.*": Attributes("heads"),
    }
    parallelize(model, plan, group)

A plan maps patterns of module names, as `fnmatch` has them but a name's segments one by one (`*` does not cross a dot),
to what is done there: one thing, or several in order. Every pattern must match. Nothing is changed before all of it
has been checked. Parameters that several modules share are divided once, and remain shared.

    Column, Row             a linear layer becomes ColumnParallel, RowParallel
    Vocabulary, Output      an embedding, an output layer divided by symbols
    Attributes              integers of the module, such as its number of heads, are divided by the degree, or by how
                            many ranks share a unit
    Enter                   the module's input enters the divided region, once for several Columns inside
    Cut                     the module takes this rank's shard of an input that all ranks have whole
    Join                    the module's output shards are joined for a divided region behind it
    OnShards                the module computes on shards: gradients of its parameters are summed over the ranks
    OwnDraws                inside the module every rank draws for itself: its dropout is on shards

Between a Column and the Row behind it every rank draws for itself, while the model trains, and elsewhere all draw
alike, if they have seeded torch's generator alike (`dure.parallel.tensor.draws`).

Sources: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models" (shards of a sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.parallel.tensor.draws import Draws, mark_on_shards
from dure.parallel.tensor.functions import enter, enter_sequence, scatter_sequence, summed
from dure.parallel.tensor.layers import ColumnParallel, Divided, RowParallel, is_transposed
from dure.parallel.tensor.opaque import is_tracing, of_shard, of_whole, opaque
from dure.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyOutput

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class Checked:
    """What all kinds have in common: values of other types than a kind's fields have are refused."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, msgspec.convert(value, hint))
            except msgspec.ValidationError as error:
                raise ValueError(f"{type(self).__name__}({name}={value!r}): {error}") from None


@dataclass(frozen=True)
class Column(Checked):
    """blocks: how many equal blocks the outputs are made of, or their lengths. unit, gather_output, enters, sequence,
    shares: as in `ColumnParallel`."""

    blocks: Positive | tuple[Positive, ...] = 1
    unit: Positive = 1
    gather_output: bool = False
    enters: bool = True
    sequence: int | None = None
    shares: bool = False

    def make(self, name: str, module: nn.Module, at: At) -> Divided:
        layer = ColumnParallel.from_linear(
            linear_of(name, module),
            at.group,
            blocks=self._lengths(name, module),
            unit=self.unit,
            gather_output=self.gather_output,
            enters=self.enters,
            sequence=self.sequence,
            overlap=at.overlap,
            shares=self.shares,
            name=name,
        )
        if self.enters and not self.gather_output and self.sequence is None:
            layer.draws = at.draws
        return layer

    def _lengths(self, name: str, module: nn.Module) -> Sequence[int]:
        if not isinstance(self.blocks, int):
            return self.blocks
        weight: Any = module.weight
        outputs = weight.shape[1 if is_transposed(module) else 0]
        if outputs % self.blocks:
            raise ValueError(f"{name} has {outputs} outputs, which are not {self.blocks} equal blocks: give lengths")
        return (outputs // self.blocks,) * self.blocks


@dataclass(frozen=True)
class Row(Checked):
    """unit, input_is_parallel, sequence: as in `RowParallel`."""

    unit: Positive = 1
    input_is_parallel: bool = True
    sequence: int | None = None

    def make(self, name: str, module: nn.Module, at: At) -> Divided:
        layer = RowParallel.from_linear(
            linear_of(name, module),
            at.group,
            unit=self.unit,
            input_is_parallel=self.input_is_parallel,
            sequence=self.sequence,
            name=name,
        )
        layer.draws = at.draws
        return layer


@dataclass(frozen=True)
class Vocabulary(Checked):
    """sequence: as in `VocabularyEmbedding`."""

    sequence: int | None = None

    def make(self, name: str, module: nn.Module, at: At) -> Divided:
        return VocabularyEmbedding.from_embedding(module, at.group, sequence=self.sequence, name=name)


@dataclass(frozen=True)
class Output(Checked):
    """gather: all scores on every rank; False leaves their parts for `vocabulary_parallel_cross_entropy`.

    enters, sequence: as in `ColumnParallel`.
    """

    gather: bool = True
    enters: bool = True
    sequence: int | None = None

    def make(self, name: str, module: nn.Module, at: At) -> Divided:
        return VocabularyOutput.from_linear(
            linear_of(name, module),
            at.group,
            gather_output=self.gather,
            enters=self.enters,
            sequence=self.sequence,
            overlap=at.overlap,
            name=name,
        )


@dataclass(frozen=True)
class Attributes(Checked):
    """names: attributes that are integers. units: they are divided by how many ranks share one of so many units, as
    the number of queries to a key; None: by the degree."""

    names: tuple[str, ...]
    units: Positive | None = None

    def __init__(self, *names: str, units: int | None = None) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "units", units)
        self.__post_init__()

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        parts, degree = {}, at.group.size
        by = f"the degree {degree}: choose a degree that divides it"
        if self.units is not None:
            degree = max(1, degree // self.units)
            by = f"the {degree} ranks that would share one of {self.units} units: choose a smaller degree"
        for each in self.names:
            value = getattr(module, each, None)
            if not isinstance(value, int):
                raise ValueError(f"{name or 'the model'} has no integer {each!r} that could be divided")
            if value % degree:
                raise ValueError(f"{name or 'the model'} has {each} = {value}, not a multiple of {by}")
            parts[each] = value // degree

        def divide() -> None:
            for each, part in parts.items():
                setattr(module, each, part)

        return divide


@dataclass(frozen=True)
class Enter(Checked):
    """sequence: the dimension along which the input is a shard, of which all are gathered; None: it is whole.

    argument: the input's name, where it is given by name; else it is the first one.
    """

    sequence: int | None = None
    argument: str = "hidden_states"

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        group, draws, sequence = at.group, at.draws, self.sequence

        def entered(tensor: Tensor) -> Tensor:
            if is_tracing():
                shape = tensor.shape if sequence is None else of_whole(tensor.shape, sequence, group)
                return opaque(entered, tensor, shape, opens=1)
            if sequence is not None:
                return enter_sequence(tensor, group, sequence)
            if module.training:
                draws.enter()
            return enter(tensor, group)

        return lambda: on_input(module, entered, self.argument)


@dataclass(frozen=True)
class Cut(Checked):
    """dim: along which the input is cut. argument: as in `Enter`."""

    dim: int = 1
    argument: str = "hidden_states"

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        group, dim = at.group, self.dim

        def shard(tensor: Tensor) -> Tensor:
            if is_tracing():
                return opaque(shard, tensor, of_shard(tensor.shape, dim, group))
            return scatter_sequence(tensor, group, dim)

        return lambda: on_input(module, shard, self.argument)


@dataclass(frozen=True)
class Join(Checked):
    """dim: along which the output is a shard."""

    dim: int = 1

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        group, dim = at.group, self.dim

        def joined(tensor: Tensor) -> Tensor:
            if is_tracing():
                return opaque(joined, tensor, of_whole(tensor.shape, dim, group))
            return enter_sequence(tensor, group, dim)

        return lambda: _keep(module.register_forward_hook(lambda module, inputs, output: joined(output)))


@dataclass(frozen=True)
class OnShards:
    """The sums travel when autograd has such a gradient: an all-reduce of each parameter's elements."""

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        group = at.group

        def over_ranks(gradient: Tensor) -> Tensor:
            return summed(gradient, group)

        def watch(module: nn.Module, inputs: Any = None) -> None:
            for parameter in () if is_tracing() else module.parameters():
                hooks: Any = parameter._backward_hooks or {}
                if parameter.requires_grad and over_ranks not in hooks.values():
                    parameter.register_hook(over_ranks)  # type: ignore[no-untyped-call]

        def install() -> None:
            if group.size > 1:
                watch(module)  # for programs of its operations, which do not call it
                module.register_forward_pre_hook(watch)  # for copies of the model, which come without hooks

        return install


@dataclass(frozen=True)
class OwnDraws:
    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        draws = Draws(at.group, at.draws.device)

        def before(module: nn.Module, inputs: Any) -> None:
            if module.training and not is_tracing():
                draws.enter()

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            draws.leave()

        def install() -> None:
            mark_on_shards(module)
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after, always_call=True)

        return install


Replacement: TypeAlias = Column | Row | Vocabulary | Output
Change: TypeAlias = Attributes | Enter | Cut | Join | OnShards | OwnDraws
Kind: TypeAlias = Replacement | Change
Plan: TypeAlias = Mapping[str, Kind | Sequence[Kind]]


@dataclass(frozen=True)
class At:
    """Where a model is divided. overlap: as in `ColumnParallel`. draws: of the whole model."""

    group: Group
    overlap: bool | None
    draws: Draws


def parallelize(
    model: nn.Module,
    plan: Plan,
    process_group: Group | dist.ProcessGroup | None = None,
    *,
    overlap: bool | None = None,
) -> None:
    """Divides a model over the ranks of a group by a plan, in place. All ranks call it, with models of one shape.

    Rank 0's weights and buffers become everybody's before. Optimizers are made behind it, of what is left of the
    parameters. overlap: as in `ColumnParallel`.

    Raises ValueError, with the model as it was, for a pattern that matches nothing, for a module that cannot become
    what the plan says, for a degree that does not divide it, and for a model that is divided already.
    """
    group = Group.of(process_group)
    found = _found(model, plan)
    for tensor in (*model.parameters(), *model.buffers()):
        group.broadcast_values([tensor.detach()], counted=False)
    at = At(group, overlap, Draws(group, _device_of(model)))
    layers, changes = _made(model, found, at)
    for change in changes:
        change()
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in layers:
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, layers[id(module)].train(module.training))
    _leave_at_the_end(model, at.draws)


def check_plan(model: nn.Module, plan: Plan, degree: int) -> None:
    """Raises ValueError where `parallelize` would over so many ranks, of which none is needed; changes nothing."""
    group = Group()
    group.size = degree
    _made(model, _found(model, plan), At(group, False, Draws(group, _device_of(model))))


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _found(model: nn.Module, plan: Plan) -> list[tuple[str, Kind]]:
    """The modules that a plan speaks of, by name."""
    if any(isinstance(module, Divided) for module in model.modules()):
        raise ValueError("this model is divided already: divide a new one, and load_whole a state into it")
    return [(name, kind) for pattern, kinds in plan.items() for name, kind in _matches(model, pattern, kinds)]


def _made(
    model: nn.Module, found: Sequence[tuple[str, Kind]], at: At
) -> tuple[dict[int, Divided], list[Callable[[], None]]]:
    """The divided layers, by the id of what they replace, and what is to be done to other modules."""
    layers: dict[int, Divided] = {}
    said: dict[int, Replacement] = {}
    changes: dict[tuple[int, Change], Callable[[], None]] = {}  # a module that has several names is changed once
    for name, kind in found:
        module = model.get_submodule(name)
        if isinstance(kind, Replacement):
            if name == "":
                raise ValueError("a plan divides layers inside a model, and cannot replace the model itself")
            if said.setdefault(id(module), kind) != kind:
                raise ValueError(f"the plan makes {name} two things: {said[id(module)]} and {kind}")
            if id(module) not in layers:
                layers[id(module)] = kind.make(name, module, at)
        else:
            changes.setdefault((id(module), kind), kind.change(name, module, at))
    _share(model, layers)
    return layers, list(changes.values())


def _matches(model: nn.Module, pattern: str, kinds: Kind | Sequence[Kind]) -> list[tuple[str, Kind]]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if fits(name, pattern)]
    if not names:
        raise ValueError(f"the plan's {pattern!r} matches no module of this {type(model).__name__}")
    each: Sequence[Any] = kinds if isinstance(kinds, tuple | list) else [kinds]
    for kind in each:
        if not isinstance(kind, Kind):
            raise ValueError(f"the plan says {kind!r} for {pattern!r}, which is none of the kinds that there are")
    return [(name, kind) for name in names for kind in each]


def fits(name: str, pattern: str) -> bool:
    """Whether a module's name matches, segment by segment."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _share(model: nn.Module, layers: Mapping[int, Divided]) -> None:
    """Parameters that were one remain one. Raises ValueError if they are divided differently."""
    divided: dict[int, tuple[str, nn.Parameter, object]] = {}
    for name, module in model.named_modules():
        layer = layers.get(id(module))
        if layer is None:
            continue
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            division = layer.divisions.get(own)
            first, kept, other = divided.setdefault(id(parameter), (name, layer.get_parameter(own), division))
            if other != division:
                raise ValueError(f"{first} and {name} share a parameter, and the plan divides it in two ways")
            layer.register_parameter(own, kept)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if id(module) not in layers and parameter is not None and id(parameter) in divided:
                first = divided[id(parameter)][0]
                raise ValueError(f"{first} and {name} share a parameter: the plan has to divide both of them")


def _leave_at_the_end(model: nn.Module, draws: Draws) -> None:
    """However a forward pass ends, what comes behind it draws as all ranks do."""

    def before(module: nn.Module, inputs: Any) -> None:
        draws.forget()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        draws.leave()

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)


def linear_of(name: str, module: nn.Module) -> nn.Module:
    """The layer. Raises ValueError, with its name, if it is not linear."""
    try:
        is_transposed(module)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return module


def on_input(module: nn.Module, function: Callable[[Tensor], Tensor], argument: str) -> None:
    """Puts a function before a module's first argument, or the one of that name."""

    def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (function(args[0]), *args[1:]), named
        return args, {**named, argument: function(named[argument])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _keep(handle: object) -> None:
    """A hook that is never taken off."""

"""What a plan can say of a module: what it becomes, or what is done to it.

    plan = {
        "blocks.*.query_key_value": Column(blocks=3, unit=head_width),
        "blocks.*.projection": Row(),
        "blocks.*": Attributes("heads"),
    }

A plan maps patterns of module names, as `fnmatch` has them but a name's segments one by one (`*`
does not cross a dot), to what is done there: one thing, or several in order.
`dure.parallel.tensor.dividing` does it.

    Column, Row         a linear layer becomes ColumnParallel, RowParallel
    Vocabulary, Output  an embedding, an output layer divided by symbols
    Attributes          integers of the module, such as its number of heads, are divided by the
                        degree, or by how many ranks share a unit
    Enter               the module's input enters the divided region, once for several Columns
                        inside
    Cut                 the module takes this rank's shard of an input that all ranks have whole
    Join                the module's output shards are joined for a divided region after it
    OnShards            the module computes on shards: gradients of its parameters are summed over
                        the ranks
    OwnDraws            inside the module every rank draws for itself: its dropout is on shards

Between a Column and the Row after it every rank draws for itself, while the model trains, and
elsewhere all draw alike, if they have seeded torch's generator alike
(`dure.parallel.tensor.draws`).

Sources: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models" (shards of a sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgspec
from torch import Tensor, nn

from dure.collectives.group import Group
from dure.parallel.tensor.divided import Divided, is_transposed
from dure.parallel.tensor.draws import Draws, mark_on_shards
from dure.parallel.tensor.functions import (
    enter,
    enter_sequence,
    of_shard,
    of_whole,
    scatter_sequence,
    summed,
)
from dure.parallel.tensor.layers import ColumnParallel, RowParallel
from dure.parallel.tensor.opaque import is_tracing, opaque
from dure.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyOutput

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class Checked:
    """What all kinds have in common: their fields refuse values of other types."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            try:
                # Frozen: a value that is converted, such as a list to a tuple, is put back this
                # way.
                object.__setattr__(self, name, msgspec.convert(value, hint))
            except msgspec.ValidationError as error:
                raise ValueError(f"{type(self).__name__}({name}={value!r}): {error}") from None


@dataclass(frozen=True)
class Column(Checked):
    """A linear layer becomes a `ColumnParallel`.

    blocks: how many equal blocks the outputs are made of, or their lengths. unit, gather_output,
    enters, sequence, shares: as in `ColumnParallel`.
    """

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
        # With gathered outputs no divided region follows; along a sequence, or after an Enter,
        # somebody else begins it.
        if self.enters and not self.gather_output and self.sequence is None:
            layer.draws = at.draws
        return layer

    def _lengths(self, name: str, module: nn.Module) -> Sequence[int]:
        if not isinstance(self.blocks, int):
            return self.blocks
        weight: Any = module.weight
        outputs = weight.shape[1 if is_transposed(module) else 0]
        if outputs % self.blocks:
            raise ValueError(
                f"{name} has {outputs} outputs, which are not {self.blocks} equal blocks: give "
                "lengths"
            )
        return (outputs // self.blocks,) * self.blocks


@dataclass(frozen=True)
class Row(Checked):
    """A linear layer becomes a `RowParallel`.

    unit, input_is_parallel, sequence: as in `RowParallel`.
    """

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
    """An embedding is divided by symbols. sequence: as in `VocabularyEmbedding`."""

    sequence: int | None = None

    def make(self, name: str, module: nn.Module, at: At) -> Divided:
        return VocabularyEmbedding.from_embedding(
            module, at.group, sequence=self.sequence, name=name
        )


@dataclass(frozen=True)
class Output(Checked):
    """An output layer is divided by symbols.

    gather: all scores on every rank; False leaves their parts for
    `vocabulary_parallel_cross_entropy`. enters, sequence: as in `ColumnParallel`.
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
    """Integers of a module are divided.

    names: of these attributes. units: they are divided by how many ranks share one of so many
    units, such as the number of queries to a key; None: by the degree.
    """

    names: tuple[str, ...]
    units: Positive | None = None

    def __init__(self, *names: str, units: int | None = None) -> None:
        # `Attributes("heads", "width")`: names by place, which a dataclass would not write so.
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "units", units)
        self.__post_init__()

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        parts = {}
        degree = at.group.size
        by = f"the degree {degree}: choose a degree that divides it"
        if self.units is not None:
            # how many ranks share a unit; with more units than ranks none is shared, and nothing is
            # divided
            degree = max(1, degree // self.units)
            by = (
                f"the {degree} ranks that would share one of {self.units} units: choose a smaller "
                "degree"
            )
        for each in self.names:
            value = getattr(module, each, None)
            if not isinstance(value, int):
                raise ValueError(
                    f"{name or 'the model'} has no integer {each!r} that could be divided"
                )
            if value % degree:
                raise ValueError(
                    f"{name or 'the model'} has {each} = {value}, not a multiple of {by}"
                )
            parts[each] = value // degree

        # Later: a plan is checked as a whole before anything is changed.
        def divide() -> None:
            for each, part in parts.items():
                setattr(module, each, part)

        return divide


@dataclass(frozen=True)
class Enter(Checked):
    """A module's input enters the divided region.

    sequence: the dimension along which the input is a shard, and all are gathered; None: it is
    whole.
    argument: the input's name, where it is given by name; else it is the first one.
    """

    sequence: int | None = None
    argument: str = "hidden_states"

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        group = at.group
        draws = at.draws
        sequence = self.sequence

        def entered(tensor: Tensor) -> Tensor:
            # A trace has one opaque operation here, which is this function itself, called when the
            # program runs.
            if is_tracing():
                shape = list(tensor.shape)
                if sequence is not None:
                    shape = of_whole(shape, sequence, group)
                return opaque(entered, tensor, shape, opens=1)
            if sequence is not None:
                return enter_sequence(tensor, group, sequence)
            # In evaluation nothing draws, and no number has to be drawn to seed by.
            if module.training:
                draws.enter()
            return enter(tensor, group)

        return lambda: on_input(module, entered, self.argument)


@dataclass(frozen=True)
class Cut(Checked):
    """A module takes a shard of its input. dim: along which it is cut. argument: as in `Enter`."""

    dim: int = 1
    argument: str = "hidden_states"

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        group = at.group
        dim = self.dim

        def shard(tensor: Tensor) -> Tensor:
            if is_tracing():
                return opaque(shard, tensor, of_shard(tensor.shape, dim, group))
            return scatter_sequence(tensor, group, dim)

        return lambda: on_input(module, shard, self.argument)


@dataclass(frozen=True)
class Join(Checked):
    """A module's output shards are joined. dim: along which they are shards."""

    dim: int = 1

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        group = at.group
        dim = self.dim

        def joined(tensor: Tensor) -> Tensor:
            if is_tracing():
                return opaque(joined, tensor, of_whole(tensor.shape, dim, group))
            return enter_sequence(tensor, group, dim)

        # Changes are made later: a plan is checked as a whole first.
        return lambda: _keep(
            module.register_forward_hook(lambda module, inputs, output: joined(output))
        )


@dataclass(frozen=True)
class OnShards:
    """A module computes on shards, so that its parameters' gradients are summed over the ranks.

    Each is an all-reduce, which travels as soon as autograd has the gradient.
    """

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        group = at.group

        def watch(module: nn.Module, inputs: Any = None) -> None:
            # A tracer puts its own tensors in the place of parameters: hooks would be put on those.
            for parameter in () if is_tracing() else module.parameters():
                hooks: Any = parameter._backward_hooks or {}
                # Once for each parameter: this runs at every call, and in every module on shards
                # that has the parameter, inside of another one or tied to it.
                if parameter.requires_grad and not any(
                    isinstance(hook, _OverRanks) for hook in hooks.values()
                ):
                    parameter.register_hook(_OverRanks(group))  # type: ignore[no-untyped-call]

        def install() -> None:
            if group.size > 1:
                # Now, for programs that are made of its operations and do not call the module; and
                # at each call, for copies of the model, whose parameters come without hooks.
                watch(module)
                module.register_forward_pre_hook(watch)

        return install


@dataclass(frozen=True)
class _OverRanks:
    """The hook of `OnShards` on a parameter."""

    group: Group

    def __call__(self, gradient: Tensor) -> Tensor:
        return summed(gradient, self.group)


@dataclass(frozen=True)
class OwnDraws:
    """Inside the module every rank draws for itself."""

    def change(self, name: str, module: nn.Module, at: At) -> Callable[[], None]:
        # of its own: `at.draws` is left by the row-parallel layers inside
        draws = Draws(at.group, at.draws.device)

        def before(module: nn.Module, inputs: Any) -> None:
            if module.training and not is_tracing():
                draws.enter()

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            draws.leave()

        def install() -> None:
            mark_on_shards(module)
            module.register_forward_pre_hook(before)
            # after an error as well: other modules must not go on with this rank's own draws
            module.register_forward_hook(after, always_call=True)

        return install


Replacement: TypeAlias = Column | Row | Vocabulary | Output
Change: TypeAlias = Attributes | Enter | Cut | Join | OnShards | OwnDraws
Kind: TypeAlias = Replacement | Change
Plan: TypeAlias = Mapping[str, Kind | Sequence[Kind]]


def several(kinds: Kind | Sequence[Kind]) -> Sequence[Any]:
    """What a plan says for one pattern, one thing or several in order, as several."""
    return kinds if isinstance(kinds, tuple | list) else [kinds]


def divides_sequences(plan: Plan) -> bool:
    """Whether ranks hold shards of sequences somewhere."""
    return any(map(_divides_sequence, chain.from_iterable(map(several, plan.values()))))


def _divides_sequence(kind: Kind) -> bool:
    if isinstance(kind, Column | Row | Vocabulary | Output | Enter):
        return kind.sequence is not None
    return isinstance(kind, Cut | Join)


@dataclass(frozen=True)
class At:
    """Where a model is divided. overlap: as in `ColumnParallel`. draws: of the whole model."""

    group: Group
    overlap: bool | None
    draws: Draws


def linear_of(name: str, module: nn.Module) -> nn.Module:
    """The layer. Raises ValueError, with its name, if it is not linear."""
    try:
        is_transposed(module)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return module


def on_input(module: nn.Module, function: Callable[[Tensor], Tensor], argument: str) -> None:
    """Puts a function before a module's first argument, or the one of that name."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Hugging Face gives some inputs by name.
        if args:
            return (function(args[0]), *args[1:]), named
        return args, {**named, argument: function(named[argument])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _keep(handle: object) -> None:
    """A hook that is never taken off."""

"""Entries of a plan: replacements of modules, and changes of modules.

    plan = {
        "blocks.*.query_key_value": Column(blocks=3, unit=head_width),
        "blocks.*.projection": Row(),
        "blocks.*": Attributes("heads"),
    }

A plan maps patterns of module names to an entry, or to several entries in order. Patterns are those
of `fnmatch`, applied to each segment of a name (`*` does not cross a dot).
`dure.parallel.tensor.dividing` applies a plan.

    Column, Row         a linear layer becomes ColumnParallel, RowParallel; an embedding by columns
                        ColumnEmbedding
    Vocabulary, Output  an embedding, an output layer divided by symbols
    Tensors             parameters and buffers of the module itself are divided
    Attributes          integers of the module, such as its number of heads, are divided by the
                        degree, or by the number of ranks that share a unit
    Enter, Leave        an input enters the divided region, once for several Columns inside; the
                        outputs are summed at the exit, for Rows that do not sum
    Cut, Join           the module takes this rank's shard of an input that all ranks have whole;
                        its output shards are joined for a divided region after it
    OnShards            the module computes on shards: gradients of its parameters are summed over
                        the ranks
    OwnDraws            each rank draws different numbers inside the module: dropout is on shards

Between a Column and the Row after it each rank draws different random numbers in training.
Elsewhere all ranks draw equal numbers, if they have seeded torch's generator equally
(`dure.parallel.tensor.rng`).

Sources: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models" (shards of a sequence).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from torch import nn

from dure.parallel.tensor.attributes import Attributes
from dure.parallel.tensor.changes import (
    Cut,
    Enter,
    Join,
    Leave,
    OnShards,
    OwnDraws,
    Tensors,
)
from dure.parallel.tensor.divided import DividedLayer, is_transposed
from dure.parallel.tensor.embedding import ColumnEmbedding
from dure.parallel.tensor.layers import ColumnParallel, RowParallel
from dure.parallel.tensor.plan_entry import DivisionContext, Positive, ValidatedEntry
from dure.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyOutput


@dataclass(frozen=True)
class Column(ValidatedEntry):
    """Plan entry: a linear layer becomes a `ColumnParallel`, an embedding a `ColumnEmbedding`.

    blocks: the number of equal blocks of the outputs, or their lengths. unit, gather_output,
    enters, sequence, shares, features: as in `ColumnParallel`.
    """

    blocks: Positive | tuple[Positive, ...] = 1
    unit: Positive = 1
    gather_output: bool = False
    enters: bool = True
    sequence: int | None = None
    shares: bool = False
    features: bool = False

    def make(self, name: str, module: nn.Module, at: DivisionContext) -> DividedLayer:
        """Return the divided layer that replaces a linear layer or an embedding."""
        if isinstance(module, nn.Embedding):
            return self._embedding(name, module, at)
        layer = ColumnParallel.from_linear(
            linear_of(name, module),
            at.group,
            blocks=self._lengths(name, _outputs(module)),
            unit=self.unit,
            gather_output=self.gather_output,
            enters=self.enters,
            sequence=self.sequence,
            overlap=at.overlap,
            shares=self.shares,
            features=self.features,
            name=name,
        )
        # With gathered outputs no divided region follows, but a region may end. Along a sequence,
        # or after an Enter, another module begins the region.
        begins = self.enters and not self.gather_output and self.sequence is None
        if begins or self.features:
            layer.draws = at.draws
        return layer

    def _embedding(self, name: str, module: nn.Embedding, at: DivisionContext) -> DividedLayer:
        if self.sequence is not None or self.shares or self.features:
            raise ValueError(
                f"{name} is an embedding, whose input is indices: leave sequence, shares and "
                "features out"
            )
        return ColumnEmbedding.from_embedding(
            module,
            at.group,
            blocks=self._lengths(name, module.embedding_dim),
            unit=self.unit,
            gather_output=self.gather_output,
            name=name,
        )

    def _lengths(self, name: str, outputs: int) -> Sequence[int]:
        if not isinstance(self.blocks, int):
            return self.blocks
        if outputs % self.blocks:
            raise ValueError(
                f"{name} has {outputs} outputs, which are not {self.blocks} equal blocks: give "
                "lengths"
            )
        return (outputs // self.blocks,) * self.blocks


@dataclass(frozen=True)
class Row(ValidatedEntry):
    """Plan entry: a linear layer becomes a `RowParallel`.

    unit, input_is_parallel, sequence, leaves, features: as in `RowParallel`.
    """

    unit: Positive = 1
    input_is_parallel: bool = True
    sequence: int | None = None
    leaves: bool = True
    features: bool = False

    def make(self, name: str, module: nn.Module, at: DivisionContext) -> DividedLayer:
        """Return the divided layer that replaces a linear layer."""
        layer = RowParallel.from_linear(
            linear_of(name, module),
            at.group,
            unit=self.unit,
            input_is_parallel=self.input_is_parallel,
            sequence=self.sequence,
            leaves=self.leaves,
            features=self.features,
            name=name,
        )
        layer.draws = at.draws
        return layer


@dataclass(frozen=True)
class Vocabulary(ValidatedEntry):
    """Plan entry: an embedding is divided by symbols. sequence: as in `VocabularyEmbedding`."""

    sequence: int | None = None

    def make(self, name: str, module: nn.Module, at: DivisionContext) -> DividedLayer:
        """Return the divided embedding that replaces an embedding."""
        return VocabularyEmbedding.from_embedding(
            module, at.group, sequence=self.sequence, name=name
        )


@dataclass(frozen=True)
class Output(ValidatedEntry):
    """Plan entry: an output layer is divided by symbols.

    gather: whether every rank gets all scores; False leaves each rank its part for
    `vocabulary_parallel_cross_entropy`. enters, sequence: as in `ColumnParallel`.
    """

    gather: bool = True
    enters: bool = True
    sequence: int | None = None

    def make(self, name: str, module: nn.Module, at: DivisionContext) -> DividedLayer:
        """Return the divided layer that replaces an output layer."""
        return VocabularyOutput.from_linear(
            linear_of(name, module),
            at.group,
            gather_output=self.gather,
            enters=self.enters,
            sequence=self.sequence,
            overlap=at.overlap,
            name=name,
        )


Replacement: TypeAlias = Column | Row | Vocabulary | Output
Change: TypeAlias = Attributes | Enter | Leave | Cut | Join | OnShards | OwnDraws
PlanEntry: TypeAlias = Replacement | Tensors | Change
DivisionPlan: TypeAlias = Mapping[str, PlanEntry | Sequence[PlanEntry]]


def entries_of(kinds: PlanEntry | Sequence[PlanEntry]) -> Sequence[Any]:
    """Return the entries of a pattern, a single entry or several in order, as a sequence."""
    return kinds if isinstance(kinds, tuple | list) else [kinds]


def divides_sequences(plan: DivisionPlan) -> bool:
    """Return whether a plan has entries that shard sequences."""
    return any(map(_divides_sequence, chain.from_iterable(map(entries_of, plan.values()))))


def _divides_sequence(kind: PlanEntry) -> bool:
    if isinstance(kind, Column | Row | Vocabulary | Output | Enter | Leave):
        return kind.sequence is not None
    return isinstance(kind, Cut | Join)


def linear_of(name: str, module: nn.Module) -> nn.Module:
    """Return the layer. Raises ValueError, with its name, if the layer is not linear."""
    try:
        is_transposed(module)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return module


def _outputs(linear: nn.Module) -> int:
    weight: Any = linear.weight
    outputs: int = weight.shape[1 if is_transposed(linear) else 0]
    return outputs

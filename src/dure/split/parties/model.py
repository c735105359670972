"""Models for vertical split learning, and their division among parties.

    VerticalModel    tail(join(head_1(x_1), ..., head_P(x_P))),  x_p the columns of party p
                     join: the activations one after another (concat), or their sum

    a linear layer   x W^T + b = sum_p x_p W_p^T + b,  W_p the columns of W that belong to party p:
    of all columns   the heads are linear, the join is their sum, and the tail begins with b

The division goes by the model's modules, not by a trace of the model, so that a party needs the
code of its own part alone. Each undivided model is an ordinary module, which every other system
trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dure.tasks.models import LogisticRegression
from dure.tasks.modes import in_mode

Join = Literal["concat", "sum"]
Columns = tuple[int, ...]
"""Numbers of the columns of a party, counted from 0."""


class VerticalModel(nn.Module):
    """Model tail(join(heads of their own columns)) for vertical split learning.

    heads: a module for each party, from its columns (B, n_p, ...) to its activations (B, q_p, ...).
    tail: from the joined activations to the outputs. join: "concat" concatenates the activations in
        dimension 1; "sum" adds them up, and they must have the same shape.
    features: the columns of each party, counted from 0; several parties may know the same column.

    Raises ValueError if join is unknown, or if heads and features have different lengths.
    """

    def __init__(
        self,
        heads: Sequence[nn.Module],
        tail: nn.Module,
        join: Join = "concat",
        features: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__()
        if join not in ("concat", "sum"):
            raise ValueError(f"join is {join!r}, but it has to be concat or sum")
        if not heads or len(heads) != len(features):
            raise ValueError(
                f"there are {len(heads)} heads, but the columns of {len(features)} parties: give "
                "as many features as heads, and at least one"
            )
        self.heads = nn.ModuleList(heads)
        self.tail = tail
        self.join = join
        self.features: tuple[Columns, ...] = tuple(tuple(own) for own in features)
        check_columns(self.features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs. inputs: all columns, (B, n, ...)."""
        parts = zip(self.heads, self.features, strict=True)
        outputs: Tensor = self.tail(
            joined([head(select(inputs, own)) for head, own in parts], self.join)
        )
        return outputs


def joined(activations: Sequence[Tensor], join: str) -> Tensor:
    """Return the joined activations of all parties, the input of the tail.

    Raises ValueError for a sum of different shapes, which would broadcast.
    """
    if join == "concat":
        return torch.cat(list(activations), 1)
    if any(one.shape != activations[0].shape for one in activations[1:]):
        shapes = ", ".join(str(list(one.shape)) for one in activations)
        raise ValueError(
            f"activations of the shapes {shapes} cannot be summed: heads have to return one shape"
        )
    return reduce(add, activations)


def select(inputs: Tensor, columns: Columns) -> Tensor:
    """Return these columns of inputs of shape (B, n, ...)."""
    first = columns[0]
    last = columns[-1]
    # Contiguous columns, the usual case, need a view only and no index tensor in a trace.
    if columns == tuple(range(first, last + 1)):
        return inputs[:, first : last + 1]
    return inputs[:, list(columns)]


def check_columns(features: Sequence[Columns]) -> None:
    """Raise ValueError for a party without columns, an invalid column, or a repeated column."""
    for number, own in enumerate(features):
        if not own:
            raise ValueError(f"party {number} has no columns: give at least one")
        for column in own:
            if type(column) is not int or column < 0:
                raise ValueError(
                    f"party {number} has the column {column!r}: columns are counted from 0"
                )
        if len(set(own)) < len(own):
            raise ValueError(f"party {number} has a column twice in {list(own)}: give it once")


@dataclass(frozen=True)
class ParameterPiece:
    """A parameter of a part and the corresponding parameter of the model.

    columns: columns of the model's parameter that the part has; None if it has all.
    """

    here: nn.Parameter
    there: nn.Parameter
    columns: Columns | None = None

    def cut(self, whole: Tensor) -> Tensor:
        """Return a copy of the part's columns of a tensor of the model's shape."""
        return whole.clone() if self.columns is None else whole[:, list(self.columns)].clone()

    @torch.no_grad()
    def load(self) -> None:
        """Copy the model's values into the part."""
        if self.here is not self.there:
            self.here.copy_(self.cut(self.there))

    @torch.no_grad()
    def store(self) -> None:
        """Copy the part's values into the model."""
        if self.here is not self.there:
            assert self.columns is not None
            self.there[:, list(self.columns)] = self.here


@dataclass(frozen=True)
class VerticalPart:
    """Part of the model at one party: a module, and its parameters' counterparts in the model."""

    module: nn.Module
    pieces: list[ParameterPiece] = field(default_factory=list)

    @staticmethod
    def whole(module: nn.Module) -> VerticalPart:
        """Return a part that is a module of the model."""
        return VerticalPart(module, [ParameterPiece(one, one) for one in module.parameters()])


@dataclass(frozen=True)
class VerticalDivision:
    """Division of a model into a head for each party and the tail."""

    heads: list[VerticalPart]
    tail: VerticalPart
    join: str
    features: list[Columns]

    def load(self) -> None:
        """Copy the model's values into the parts."""
        for piece in self._pieces():
            piece.load()

    def store(self) -> None:
        """Copy the parts' values into the model."""
        for piece in self._pieces():
            piece.store()

    def _pieces(self) -> list[ParameterPiece]:
        return [piece for part in (*self.heads, self.tail) for piece in part.pieces]

    @property
    def cuts_parameters(self) -> bool:
        """Whether several parties share the columns of one parameter."""
        return any(piece.columns is not None for piece in self._pieces())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of heads, join and tail."""
        parts = zip(self.heads, self.features, strict=True)
        outputs: Tensor = self.tail.module(
            joined([head.module(select(inputs, own)) for head, own in parts], self.join)
        )
        return outputs


class JoinedParts(nn.Module):
    """Module that runs all parts of a division on the inputs of all columns."""

    def __init__(self, division: VerticalDivision) -> None:
        super().__init__()
        self.division = division
        self.parts = nn.ModuleList(part.module for part in (*division.heads, division.tail))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.division.forward(inputs)


def divide(
    model: nn.Module, inputs: object, features: Sequence[Columns], parties: int | None
) -> VerticalDivision:
    """Divide the model into heads and a tail.

    inputs: of an example, or of many. features: the columns of each party; empty for the features
    of the model, or else for equal parts. parties: expected number of parties; None for no
    expectation.

    Raises ValueError for a model or inputs that cannot be divided.
    """
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        raise ValueError(
            "parties have columns of the inputs, which have to be one tensor of shape (n, columns)"
        )
    _check_plain(model)
    if any(is_lazy(one) for one in model.parameters()):
        raise ValueError(
            "the model has parameters without a shape yet: give the sizes of its layers"
        )
    if isinstance(model, VerticalModel):
        division = _by_parts(model, features)
    else:
        division = _by_columns(model, inputs, features, parties)
    _check(division, inputs.shape[1], parties)
    return division


def _by_parts(model: VerticalModel, features: Sequence[Columns]) -> VerticalDivision:
    if type(model).forward is not VerticalModel.forward:
        raise ValueError(
            f"{type(model).__name__} has its own forward, which parties would not run: move it "
            "into the heads or the tail"
        )
    if features and tuple(features) != model.features:
        raise ValueError(
            "features differ from those of the model's heads: leave them out, the model defines "
            "them"
        )
    heads = [VerticalPart.whole(head) for head in model.heads]
    return VerticalDivision(heads, VerticalPart.whole(model.tail), model.join, list(model.features))


class _Rest(nn.Module):
    """Part behind x W^T: the bias, and the layers that follow."""

    def __init__(self, bias: nn.Parameter | None, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.bias = bias
        self.layers = nn.Sequential(*layers)

    def forward(self, summed: Tensor) -> Tensor:
        outputs: Tensor = self.layers(summed if self.bias is None else summed + self.bias)
        return outputs


def _by_columns(
    model: nn.Module, inputs: Tensor, features: Sequence[Columns], parties: int | None
) -> VerticalDivision:
    linear, layers = _linear_first(model)
    for one in model.children():
        _check_plain(one)
    if inputs.ndim != 2 or inputs.shape[1] != linear.in_features:
        raise ValueError(
            f"the model's first layer has {linear.in_features} columns, but inputs have the shape "
            f"(n, {', '.join(map(str, inputs.shape[1:]))}): parties divide columns, (n, columns)"
        )
    own = list(features) or equal_parts(linear.in_features, 2 if parties is None else parties)
    named = sorted(column for columns in own for column in columns)
    if named != list(range(linear.in_features)):
        raise ValueError(
            f"the model has {linear.in_features} input columns, but features list {len(named)}: "
            "give each column to one party"
        )
    whole = linear.weight
    assert isinstance(whole, nn.Parameter)
    heads: list[VerticalPart] = []
    for columns in own:
        weight = nn.Parameter(
            whole[:, list(columns)].detach().clone(), requires_grad=whole.requires_grad
        )
        head = nn.Linear(len(columns), linear.out_features, bias=False, device="meta")
        head.weight = weight
        heads.append(VerticalPart(head, [ParameterPiece(weight, whole, columns)]))
    rest = VerticalPart.whole(_Rest(linear.bias, layers))
    if any(piece.there is whole for piece in rest.pieces):
        raise ValueError("the first layer's weight is used again after it: give each its own")
    return VerticalDivision(heads, rest, "sum", own)


def _linear_first(model: nn.Module) -> tuple[nn.Linear, list[nn.Module]]:
    """Return the first linear layer and the layers behind it; raise ValueError for other models."""
    layers: list[nn.Module] = [model]
    if type(model) is LogisticRegression:
        layers = [model.linear]
    elif type(model) is nn.Sequential:
        layers = [layer for layer in model if not isinstance(layer, nn.Identity)]
        if layers and type(layers[0]) is nn.Flatten and layers[0].start_dim == 1:
            layers = layers[1:]
    first, *rest = layers or [model]
    if type(first) is nn.Linear:
        return first, rest
    raise ValueError(
        f"{type(model).__name__} cannot be divided by columns: use dure.VerticalModel(heads, "
        "tail, join, features), a logistic regression, or an nn.Sequential that begins with "
        "nn.Linear"
    )


def activations_of(division: VerticalDivision, inputs: Tensor) -> list[Tensor]:
    """Return the output of each head in evaluation mode.

    Raises ValueError for outputs that cannot be joined.
    """
    values: list[Tensor] = []
    for number, (head, columns) in enumerate(zip(division.heads, division.features, strict=True)):
        with in_mode(head.module, training=False):
            value = head.module(select(inputs, columns))
        if not isinstance(value, Tensor) or value.ndim < 2 or len(value) != len(inputs):
            what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the head of party {number} returns {what} for {len(inputs)} examples: "
                "activations have to be a tensor of shape (B, q, ...)"
            )
        values.append(value)
    joined(values, division.join)
    return values


def equal_parts(columns: int, parties: int) -> list[Columns]:
    """Return contiguous columns for each party, as equal in number as possible."""
    bounds = [number * columns // parties for number in range(parties + 1)]
    return [tuple(range(a, b)) for a, b in pairwise(bounds)]


def _check_plain(module: nn.Module) -> None:
    """Raise ValueError for a module with hooks, which its parts would not call."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ValueError(
            f"{type(module).__name__} has hooks, which its parts would not call: remove them"
        )


def _check(division: VerticalDivision, columns: int, parties: int | None) -> None:
    if parties is not None and parties != len(division.heads):
        raise ValueError(
            f"parties is {parties}, but {len(division.heads)} parties have features: leave it out"
        )
    check_columns(division.features)
    largest = max(max(own) for own in division.features)
    if largest >= columns:
        raise ValueError(
            f"features name column {largest}, but inputs have {columns} columns, counted from 0"
        )
    owners: dict[int, int] = {}
    for number, part in enumerate((*division.heads, division.tail)):
        for piece in part.pieces:
            if owners.setdefault(id(piece.here), number) != number:
                raise ValueError(
                    "a parameter is in two parts of the model, but each part needs its own: give "
                    "heads and tail separate parameters"
                )
        for buffer in part.module.buffers():
            if owners.setdefault(id(buffer), number) != number:
                raise ValueError(
                    "a buffer is in two parts of the model: give heads and tail separate buffers"
                )

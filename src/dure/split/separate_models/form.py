"""Form of a part's output, as data: its nesting, and the shapes of its tensors.

A separate tail is called with the output of the head: a tensor, or a tuple, list or dict of
tensors, nested to any depth. Each step sends the tensors alone. The nesting is sent once, as JSON;
nothing is unpickled.

The dimension that counts examples is the dimension that grows between batches of two sizes.
Numbers, texts and None are part of the form, and constant.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from dure.parallel.pipeline.trace import ValueSpec
from dure.split.leakage.guard import CutValue


class TensorPlaceholder(msgspec.Struct, frozen=True, tag="tensor"):
    """Placeholder of the next tensor in a nest."""


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """Value other than a tensor, the same for every batch."""

    value: bool | int | float | str | None


class Nest(msgspec.Struct, frozen=True, tag="nest"):
    """A tuple, list or dict. keys: of a dict."""

    kind: Literal["tuple", "list", "dict"]
    items: tuple[TensorPlaceholder | Constant | Nest, ...]
    keys: tuple[int | str, ...] = ()


Node = TensorPlaceholder | Constant | Nest


class OutputTensorForm(msgspec.Struct, frozen=True):
    """Form of a tensor of a part's output.

    few, many: shapes for batches of two sizes. order: dimensions by stride, the dimension with the
    smallest stride last. differentiable: whether the tensor gets a gradient.
    """

    dtype: str
    few: tuple[int, ...]
    many: tuple[int, ...]
    order: tuple[int, ...]
    differentiable: bool

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return the tensor in this memory layout, on which the last bits of sums may depend."""
        if tensor.ndim != len(self.order):
            return tensor.contiguous()
        value = ValueSpec(tuple(tensor.shape), tensor.dtype, self.differentiable, self.order)
        return value.laid_out(tensor)

    @classmethod
    def of(cls, few: Tensor, many: Tensor) -> OutputTensorForm:
        """Return the form of a tensor from its values for both batch sizes."""
        value = ValueSpec.of(few, few.requires_grad)
        name = _name(few.dtype)
        return cls(name, value.shape, tuple(many.shape), value.order, value.differentiable)


class OutputForm(msgspec.Struct, frozen=True):
    """Form of a part's output. few, many: the two batch sizes of the trial."""

    nest: Node
    tensors: tuple[OutputTensorForm, ...]
    few: int
    many: int

    def dim(self, place: int) -> int | None:
        """Return the dimension of a tensor that counts examples; None unless it is unique."""
        one = self.tensors[place]
        if len(one.few) != len(one.many):
            return None
        grown = [n for n, (a, b) in enumerate(zip(one.few, one.many, strict=True)) if a != b]
        if len(grown) != 1 or one.many[grown[0]] * self.few != one.few[grown[0]] * self.many:
            return None
        return grown[0]

    def shape(self, place: int, examples: int) -> tuple[int, ...]:
        """Return the shape of a tensor for this number of examples."""
        shape = list(self.tensors[place].few)
        dim = self.dim(place)
        if dim is not None:
            shape[dim] = shape[dim] * examples // self.few
        return tuple(shape)

    def crossings(self) -> list[CutValue]:
        """Return the `CutValue` of each tensor, by which batches are concatenated."""
        return [
            CutValue(self.dim(place), one.differentiable) for place, one in enumerate(self.tensors)
        ]

    def check_dims(self) -> None:
        """Raise ValueError for a tensor that cannot be concatenated over several clients.

        Such a tensor grows with the batch in no single dimension, or belongs to the whole batch and
        has gradients.
        """
        for place, one in enumerate(self.tensors):
            if self.dim(place) is None and (one.differentiable or one.few != one.many):
                raise ValueError(
                    f"a value at the cut has the shape {list(one.few)} for {self.few} examples "
                    f"and {list(one.many)} for {self.many}: batches of several clients cannot be "
                    "joined; let the head return values whose rows are examples"
                )

    def nbytes(self, examples: int) -> tuple[int, int]:
        """Return the bytes of a batch: of the tensors, and of their gradients."""
        values = gradients = 0
        for place, one in enumerate(self.tensors):
            size = math.prod(self.shape(place, examples)) * dtype_of(one.dtype).itemsize
            values += size
            gradients += size if one.differentiable else 0
        return values, gradients

    def of_gradients(self) -> OutputForm:
        """Return the form of the gradients that come back, for the differentiable tensors alone."""
        tensors = tuple(one for one in self.tensors if one.differentiable)
        nest = Nest("tuple", tuple(TensorPlaceholder() for _ in tensors))
        return msgspec.structs.replace(self, nest=nest, tensors=tensors)

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value that these tensors form together with nests and constants."""
        return _build(self.nest, iter(tensors))

    @property
    def structure(self) -> TreeSpec:
        """The nesting as a `TreeSpec` of torch."""
        return tree_flatten(self.whole([torch.empty(0) for _ in self.tensors]))[1]

    def check(self, values: Sequence[Tensor], examples: int, who: str) -> None:
        """Raise ValueError for tensors that do not have this form for `examples` examples."""
        fits = len(values) == len(self.tensors) and all(
            self._fits(place, value, examples) for place, value in enumerate(values)
        )
        if not fits:
            given = ", ".join(f"{_name(one.dtype)} {list(one.shape)}" for one in values)
            raise ValueError(
                f"{who} returns {given or 'no tensor'} for {examples} examples, but has to return "
                f"{self}"
            )

    def _fits(self, place: int, value: Tensor, examples: int) -> bool:
        one = self.tensors[place]
        dim = self.dim(place)
        if _name(value.dtype) != one.dtype or value.ndim not in (len(one.few), len(one.many)):
            return False
        # Other dimensions may differ from batch to batch, as the length of texts does.
        return dim is None or value.shape[dim] * self.few == one.few[dim] * examples

    def __str__(self) -> str:
        shapes = [self._shape(place) for place in range(len(self.tensors))]
        return _told(self.nest, iter(shapes))

    def _shape(self, place: int) -> str:
        one = self.tensors[place]
        dim = self.dim(place)
        if dim is None:
            return f"{one.dtype} ({', '.join(map(str, one.few))})"
        each = one.few[dim] // self.few
        sizes = list(map(str, one.few))
        sizes[dim] = "B" if each == 1 else f"{each} B"
        return f"{one.dtype} ({', '.join(sizes)})"


def form_of(few: Any, many: Any, sizes: tuple[int, int], who: str) -> OutputForm:
    """Return the form of a part's output from its outputs for two batch sizes.

    Raises ValueError for an output that contains anything but tensors, numbers, texts, None,
    tuples, lists and dicts, or that differs between the two batches in more than shapes.
    """
    nest, one = flatten(few, who)
    other_nest, other = flatten(many, who)
    if nest != other_nest:
        raise ValueError(
            f"{who} returns {_told(nest, None)} for {sizes[0]} examples and "
            f"{_told(other_nest, None)} for {sizes[1]}: values that are not tensors have to be "
            "the same for every batch"
        )
    return OutputForm(
        nest=nest,
        tensors=tuple(map(OutputTensorForm.of, one, other)),
        few=sizes[0],
        many=sizes[1],
    )


def encoded(form: OutputForm) -> bytes:
    """Return the form as JSON."""
    return msgspec.json.encode(form)


def decoded(text: bytes) -> OutputForm:
    """Return the form that `encoded` encoded. Raises ValueError for invalid input."""
    try:
        form = msgspec.json.decode(text, type=OutputForm)
        for one in form.tensors:
            dtype_of(one.dtype)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"this is not a form of a head's output: {error}") from error
    fits = all(sorted(one.order) == list(range(len(one.few))) for one in form.tensors)
    sizes = [size for one in form.tensors for size in (*one.few, *one.many)]
    counts = _count(form.nest) == len(form.tensors) and 0 < form.few < form.many
    if not fits or not counts or min(sizes, default=0) < 0:
        raise ValueError("this is not a form of a head's output: its numbers are inconsistent")
    return form


MOST_TRIED = 1 << 30
"""Maximum bytes of the made-up values for the trial of a part."""


def check_extent(form: OutputForm) -> None:
    """Raise ValueError for a form whose made-up values would exceed `MOST_TRIED` bytes."""
    sizes = [
        math.prod(one.many) * dtype_of(one.dtype).itemsize + math.prod(one.few)
        for one in form.tensors
    ]
    if sum(sizes) > MOST_TRIED:
        raise ValueError(
            f"the head's output would have {sum(sizes):,} bytes for {form.many} examples, but may "
            f"have at most {MOST_TRIED:,}"
        )


def flatten(value: Any, who: str) -> tuple[Node, list[Tensor]]:
    """Return the nesting of a value, and its tensors in order.

    Raises ValueError for a value that cannot be sent.
    """
    tensors: list[Tensor] = []
    return _flatten(value, who, tensors), tensors


def _flatten(value: Any, who: str, tensors: list[Tensor]) -> Node:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise ValueError(
                f"{who} returns a tensor that is not dense: convert it with to_dense()"
            )
        tensors.append(value)
        return TensorPlaceholder()
    finite = not isinstance(value, float) or math.isfinite(value)
    if type(value) in (bool, int, float, str, type(None)) and finite:
        return Constant(value)
    if type(value) in (tuple, list):
        kind: Literal["tuple", "list"] = "tuple" if type(value) is tuple else "list"
        return Nest(kind, tuple(_flatten(one, who, tensors) for one in value))
    if type(value) in (dict, OrderedDict) and all(type(key) in (int, str) for key in value):
        items = tuple(_flatten(one, who, tensors) for one in value.values())
        return Nest("dict", items, tuple(value))
    raise ValueError(
        f"{who} returns a {type(value).__name__}, which cannot be sent: return tensors, numbers "
        "and texts, in tuples, lists or dicts with texts as keys"
    )


def _build(node: Node, tensors: Iterator[Tensor]) -> Any:
    if isinstance(node, TensorPlaceholder):
        return next(tensors)
    if isinstance(node, Constant):
        return node.value
    items = [_build(one, tensors) for one in node.items]
    if node.kind == "dict":
        return dict(zip(node.keys, items, strict=True))
    return tuple(items) if node.kind == "tuple" else items


def _count(node: Node) -> int:
    if isinstance(node, Nest):
        return sum(map(_count, node.items))
    return isinstance(node, TensorPlaceholder)


def _told(node: Node, shapes: Iterator[str] | None) -> str:
    """Return the nesting in words; shapes: of the tensors, or None to omit them."""
    if isinstance(node, TensorPlaceholder):
        return "a tensor" if shapes is None else next(shapes)
    if isinstance(node, Constant):
        return repr(node.value)
    items = [_told(one, shapes) for one in node.items]
    if node.kind == "dict":
        pairs = zip(node.keys, items, strict=True)
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
    told = ", ".join(items)
    return f"({told})" if node.kind == "tuple" else f"[{told}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name. Raises ValueError for an unknown name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this is not a form of a head's output: there is no dtype {name!r}")
    return found

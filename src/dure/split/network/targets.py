"""Form of the targets that clients send, for each leaf, from the server's own examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dure.data.examples import Examples
from dure.split.blame import InvalidMessageError
from dure.split.separate_models.form import OutputForm, OutputTensorForm, dtype_of
from dure.tasks.known_losses import cross_entropy_of


class ClassIndices(NamedTuple):
    """Class indices: 0 to `number` - 1, and the index that the loss ignores."""

    number: int
    ignored: int


class TargetForm(NamedTuple):
    """Form of a leaf of a batch's targets.

    dtype: of a tensor; None for a leaf that is not a tensor. dimensions: number of dimensions. dim:
    the dimension that counts examples; None if there is none. classes: for class indices; else
    None.
    """

    dtype: torch.dtype | None
    dimensions: int = 0
    dim: int | None = None
    classes: ClassIndices | None = None

    def check(self, given: Any, examples: int) -> None:
        """Raise WrongError for a leaf of another form, or for another number of examples."""
        if not isinstance(given, Tensor):
            if self.dtype is not None:
                raise InvalidMessageError(
                    f"the target is a {type(given).__name__}, but has to be {self}"
                )
            return
        fits = given.dtype == self.dtype and given.ndim == self.dimensions
        if not fits or (self.dim is not None and given.shape[self.dim] != examples):
            shape = f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
            raise InvalidMessageError(
                f"targets of {examples} examples are {shape}, but have to be {self}"
            )
        self._check_numbers(given)

    def _check_numbers(self, given: Tensor) -> None:
        if given.is_floating_point() and not bool(given.isfinite().all()):
            raise InvalidMessageError("targets are not all finite numbers")
        if self.classes is None or given.is_floating_point() or not given.numel():
            return
        number, ignored = self.classes
        wrong = ((given < 0) | (given >= number)) & (given != ignored)
        if bool(wrong.any()):
            raise InvalidMessageError(
                f"a target is {int(given[wrong][0])}, but the model has the classes 0 to "
                f"{number - 1}"
            )

    def __str__(self) -> str:
        if self.dtype is None:
            return "a number or text"
        named = str(self.dtype).removeprefix("torch.")
        sizes = ["B" if place == self.dim else "·" for place in range(self.dimensions)]
        return f"{named} [{', '.join(sizes)}]"


def leaves_of_examples(examples: Examples, classes: ClassIndices | None) -> list[TargetForm]:
    """Return the forms of the leaves of the examples' targets."""
    few, many = (examples.batch(torch.arange(count) % len(examples))[1] for count in (1, 2))
    return [
        _leaf(one, other, classes)
        for one, other in zip(tree_leaves(few), tree_leaves(many), strict=False)
    ]


def _leaf(few: Any, many: Any, classes: ClassIndices | None) -> TargetForm:
    if not isinstance(few, Tensor):
        return TargetForm(None)
    dim = None
    if isinstance(many, Tensor) and few.ndim == many.ndim:
        grown = [n for n, (a, b) in enumerate(zip(few.shape, many.shape, strict=True)) if a != b]
        dim = grown[0] if len(grown) == 1 and many.shape[grown[0]] == 2 else None
    return TargetForm(few.dtype, few.ndim, dim, classes)


def leaves_of_form(form: OutputForm, classes: ClassIndices | None) -> list[TargetForm]:
    """Return the leaves of targets of this form."""
    tensors: Sequence[Any] = form.tensors
    places = {id(one): place for place, one in enumerate(form.tensors)}
    found: list[TargetForm] = []
    for leaf in tree_leaves(form.whole(tensors)):
        if not isinstance(leaf, OutputTensorForm):
            found.append(TargetForm(None))
            continue
        dim = form.dim(places[id(leaf)])
        # The size counts examples only if each example has a single index there.
        exact = dim is not None and leaf.few[dim] == form.few
        found.append(
            TargetForm(dtype_of(leaf.dtype), len(leaf.few), dim if exact else None, classes)
        )
    return found


def classes_of(loss: Any, outputs: Sequence[tuple[int, ...] | None]) -> ClassIndices | None:
    """Return the classes of torch's cross-entropy; None for any other loss.

    outputs: the shapes of all leaves of the model's output.
    """
    known = cross_entropy_of(loss)
    if known is None or len(outputs) != 1 or not outputs[0]:
        return None
    shape = outputs[0]
    return ClassIndices(shape[1] if len(shape) > 1 else shape[0], known.ignore_index)

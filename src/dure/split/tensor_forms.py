"""Dtypes and shapes of received tensors, compared with the expected ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dure.split.blame import InvalidMessageError

TensorForm = tuple[torch.dtype, tuple[int, ...]]
"""(dtype, shape)."""


class _HasForm(Protocol):
    """A tensor, or the description of a tensor that does not exist yet."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


def form_of(value: _HasForm) -> TensorForm:
    """Return the dtype and the shape."""
    return value.dtype, tuple(value.shape)


def check_forms(what: str, given: Sequence[Tensor], wanted: Sequence[TensorForm]) -> None:
    """Raise WrongError for tensors of other dtypes or shapes, or another number of tensors."""
    forms = [form_of(one) for one in given]
    if forms != list(wanted):
        raise InvalidMessageError(f"{what} are {_named(forms)}, but have to be {_named(wanted)}")


def check_gradient_forms(
    what: str, given: Sequence[Tensor | None], wanted: Sequence[TensorForm]
) -> None:
    """Raise WrongError for gradients of other dtypes or shapes; a gradient may be None."""
    if len(given) != len(wanted):
        raise InvalidMessageError(f"there are {len(given)} {what}, but {len(wanted)} are needed")
    for one, form in zip(given, wanted, strict=True):
        if one is not None:
            check_forms(what, [one], [form])


def _named(forms: Sequence[TensorForm]) -> str:
    named = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in forms[:5]]
    return ", ".join(named) or "none"

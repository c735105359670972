"""Messages between the parties and the holder of the labels in vertical split learning.

A step, to and from every party:

    holder -> party    Step: its number, from which all know the batch
    party -> holder    Activations of its columns of the batch
    holder -> party    ActivationGradients

The holder is the server, or the party that has the labels. The rows of a batch follow from the
step's number, as all shuffle by the agreed seed. So a step sends no row numbers: its payload is the
activations and their gradients.

A message consists of numbers and tensors and has a tag for its type, so that another process can
decode it. The holder knows the name of each party and the `ActivationForm` of its head; a party
knows the holder's name.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor


def party(number: int) -> str:
    """Return the name of a party."""
    return f"party {number}"


class ActivationForm(NamedTuple):
    """Shape and dtype of a head's output for one example, agreed before the first step."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class BeginStep(msgspec.Struct, frozen=True, tag="Step"):
    """Announces the next step; `number` counts from 0."""

    number: int


class Activations(msgspec.Struct, frozen=True, tag=True):
    """Activations of a party for a batch.

    values: shape (B, q, ...). trains: whether the head needs their gradients.
    """

    step: int
    values: Tensor
    trains: bool


class ActivationGradients(msgspec.Struct, frozen=True, tag=True):
    """Gradients of the activations of a step.

    values: shape of the activations; None if the loss does not depend on them.
    """

    step: int
    values: Tensor | None


Message = BeginStep | Activations | ActivationGradients
Envelope = tuple[str, Message]
"""(receiver, message)."""

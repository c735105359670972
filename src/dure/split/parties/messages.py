"""What parties with different features and the one with the labels say to each other.

A step, to and from every party:

    holder -> party    Step: its number, from which all know the batch
    party -> holder    Activations of its columns of the batch
    holder -> party    ActivationGradients

The holder is the server, or the party that has the labels. Which examples a batch has follows from
the step's number: all shuffle by the seed that they agreed upon. So a step tells no rows, and its
payload is the activations and their gradients.

A message is numbers and tensors, and tells its kind by a tag: it can be written down and read in
another process. What the holder knows of a party is its name and the `Leaving` of its head, and a
party knows the holder's name.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor


def party(number: int) -> str:
    """The name of a party."""
    return f"party {number}"


class Leaving(NamedTuple):
    """What leaves a head for one example, as the holder is told before the first step."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Step(msgspec.Struct, frozen=True, tag=True):
    """The batch of this step, counted from 0, is next."""

    number: int


class Activations(msgspec.Struct, frozen=True, tag=True):
    """values: (B, q, ...). trains: whether the head wants their gradients."""

    step: int
    values: Tensor
    trains: bool


class ActivationGradients(msgspec.Struct, frozen=True, tag=True):
    """values: as the activations; None where the loss does not depend on them."""

    step: int
    values: Tensor | None


Message = Step | Activations | ActivationGradients
Envelope = tuple[str, Message]
"""(to whom, what)."""

"""Attribution of a failed computation at the server to the client that caused it.

A message may have the right form, and still make the tail or the loss fail, or produce NaN or
infinity: a label that is no class, values that overflow. The error is attributed to

    one client's batch     that client
    a joint batch          the clients whose batch fails alone as well, if others' batches do not
    if all or none fail    the client whose values are a thousand times those of all others; without
                           such a client no client is named, as the model has diverged

Huge values are limited too, since they damage the shared tail while they are still finite:
gradients of the tail beyond `GRADIENT`, and weights that grow by more than `GROWTH` in a turn.
Values within these bounds are not checked further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dure.errors import DureError, LossNotFiniteError, described
from dure.split.messages import SideState

GRADIENT = 1e15
"""Maximum absolute value of a gradient's element, so that its square is finite in float32."""

GROWTH = 1e6
"""Maximum factor by which the largest weight, or 1, may grow in a turn."""

FARTHEST = 1e30
"""Maximum absolute value of a buffer's element, such as a variance of batch norm."""

ADVICE = "lower the learning rate, or look for invalid values in the data"


class InvalidMessageError(ValueError):
    """A client has sent an invalid message."""


class NotANumberError(InvalidMessageError):
    """A client has sent NaN or infinite values."""


class CannotComputeError(DureError):
    """The server cannot compute with the values of some clients.

    reasons: by client. diverged: whether the result is not finite.
    """

    def __init__(self, reasons: Mapping[str, str], diverged: bool) -> None:
        super().__init__(reasons, diverged)
        self.reasons = dict(reasons)
        self.diverged = diverged

    def __str__(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())


class ExcessiveValueError(DureError):
    """Values that training cannot produce."""


def largest(tensors: Iterable[Tensor | None]) -> float:
    """Return the largest absolute value over all floating-point elements; NaN if there is a NaN.

    Returns 0 without elements.
    """
    found = 0.0
    for one in tensors:
        if one is None or not one.numel() or not (one.is_floating_point() or one.is_complex()):
            continue
        size = float(torch.linalg.vector_norm(one.detach(), math.inf))
        if math.isnan(size):
            return size
        found = max(found, size)
    return found


def check_size(what: str, tensors: Iterable[Tensor | None], most: float) -> None:
    """Raise AbsurdError for tensors with NaN, or with elements larger than `most`."""
    size = largest(tensors)
    if not size <= most:
        raise ExcessiveValueError(
            f"{what} become as large as {size:g}, but have to stay below {most:g}"
        )


def check_bounded(what: str, gradients: Iterable[Tensor | None]) -> None:
    """Raise NotANumberError for gradients that are not finite, or beyond `GRADIENT`."""
    if not largest(gradients) <= GRADIENT:
        raise NotANumberError(
            f"{what} are not all finite numbers below {GRADIENT:g} in size: {ADVICE}"
        )


def check_grown(what: str, own: SideState, before: float) -> None:
    """Raise AbsurdError for a side whose weights have grown too much, or are not finite.

    before: the absolute value of its largest weight before the turn.
    """
    check_size(f"weights of {what}", own.weights, GROWTH * max(1.0, before))
    check_size(f"buffers of {what}", own.buffers, FARTHEST)


def failure(error: Exception) -> tuple[str, bool]:
    """Return (message for clients, whether the error reports a value that is not finite)."""
    if isinstance(error, LossNotFiniteError):
        return f"with its batch the loss is {error.loss}: {ADVICE}", True
    if isinstance(error, ExcessiveValueError):
        return f"with its batch {error}: {ADVICE}", True
    return f"the server cannot compute with its batch: {described(error)}", False


def blamed(
    clients: Sequence[str],
    error: Exception,
    alone: Callable[[str], Exception | None],
    sizes: Mapping[str, float],
) -> DureError | None:
    """Return the error that names the clients at fault; None if no client can be named.

    clients: of the batch. error: of the joint computation. alone: returns the error of a client's
    batch alone. sizes: largest absolute value that each client has sent.
    """
    if len(clients) == 1:
        reason, diverged = failure(error)
        return CannotComputeError({clients[0]: reason}, diverged)
    failed = {name: failure(found) for name in clients if (found := alone(name)) is not None}
    if 0 < len(failed) < len(clients):
        diverged = all(of for _, of in failed.values())
        return CannotComputeError({name: reason for name, (reason, _) in failed.items()}, diverged)
    name = _sticks_out(sizes)
    if name is None:
        return None
    reason, diverged = failure(error)
    return CannotComputeError({name: reason}, diverged)


def _sticks_out(sizes: Mapping[str, float]) -> str | None:
    """Return the client whose values are a thousand times those of all others; None otherwise."""
    ordered = sorted(sizes, key=lambda name: sizes[name])
    first, second = ordered[-1], ordered[-2]
    return first if sizes[first] > 1e3 * max(sizes[second], 1.0) else None

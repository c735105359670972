"""Whose message it is that the server cannot compute with.

A message may have the right form, and still make the tail or the loss fail, or give what is no
number: a label that is no class, values that overflow. Such an error is the sender's:

    one client's batch     that client's
    a joint batch          of those whose batch fails alone as well; where all do, the model has
                           diverged, and nobody is named alone
    it is too large, and   of the client whose numbers are the largest by far, compared with those
    nobody fails alone     of the others

What is absurd is bounded too, since it damages the tail that all share while it still is a number:
gradients of the tail beyond `GRADIENT`, and weights that grow by more than `GROWTH` in one turn.
Within these bounds the numbers of a client are believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dure.errors import DureError, LossNotFiniteError, described
from dure.split.messages import Own

GRADIENT = 1e15
"""Size of an element of a gradient: its square is still a number in single precision."""

GROWTH = 1e6
"""Times that the largest weight, or 1, may grow in one turn."""

FARTHEST = 1e30
"""Size of a buffer's element, such as a variance of batch norm."""

ADVICE = "lower the learning rate, or look for bad values in the data"


class WrongError(ValueError):
    """A client has sent what cannot be."""


class NotANumberError(WrongError):
    """A client has sent NaN, or what is infinite."""


class CannotComputeError(DureError):
    """The server cannot compute with what clients have sent.

    reasons: by client. diverged: whether what came of it is no finite number.
    """

    def __init__(self, reasons: Mapping[str, str], diverged: bool) -> None:
        super().__init__(reasons, diverged)
        self.reasons = dict(reasons)
        self.diverged = diverged

    def __str__(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())


class AbsurdError(DureError):
    """Numbers that no training gives."""


def largest(tensors: Iterable[Tensor | None]) -> float:
    """Return the size of the largest element of all that are no whole numbers; NaN if there is one.

    0 of nothing.
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
    """Raise AbsurdError for tensors with NaN, or with larger elements than that."""
    size = largest(tensors)
    if not size <= most:
        raise AbsurdError(f"{what} become as large as {size:g}, and training keeps below {most:g}")


def check_bounded(what: str, gradients: Iterable[Tensor | None]) -> None:
    """Raise NotANumberError for gradients that are not finite, or beyond `GRADIENT`."""
    if not largest(gradients) <= GRADIENT:
        raise NotANumberError(
            f"{what} are not all finite numbers below {GRADIENT:g} in size: {ADVICE}"
        )


def check_grown(what: str, own: Own, before: float) -> None:
    """Raise AbsurdError for a side that has grown too much, or has numbers that are not finite.

    before: the size of its largest weight.
    """
    check_size(f"weights of {what}", own.weights, GROWTH * max(1.0, before))
    check_size(f"buffers of {what}", own.buffers, FARTHEST)


def failure(error: Exception) -> tuple[str, bool]:
    """(what clients are told of an error, whether it says that something is no finite number)."""
    if isinstance(error, LossNotFiniteError):
        return f"with its batch the loss is {error.loss}: {ADVICE}", True
    if isinstance(error, AbsurdError):
        return f"with its batch {error}: {ADVICE}", True
    return f"the server cannot compute with its batch: {described(error)}", False


def blamed(
    clients: Sequence[str],
    error: Exception,
    alone: Callable[[str], Exception | None],
    sizes: Mapping[str, float],
) -> DureError | None:
    """Return the error that names who has made a batch fail; None where nobody can be named.

    alone: what happens with one client's batch alone. sizes: of the largest number that each client
    has sent.
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
    """The client whose numbers are a thousand times as large as all others', if there is one."""
    ordered = sorted(sizes, key=lambda name: sizes[name])
    first, second = ordered[-1], ordered[-2]
    return first if sizes[first] > 1e3 * max(sizes[second], 1.0) else None

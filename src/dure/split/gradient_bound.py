"""Checks of gradients from another machine, before the receiver uses them.

    number, dtype, shape    of the values that were sent
    elements                finite
    norm                    at most `largest`, if the site sets it; else at most `FACTOR` times
                            the largest norm of the gradients before, after the first `FEWEST`

The norm is the Euclidean norm of all elements of a message. The bound detects damage and huge
values. It does not stop a malicious sender from steering the head within the bound: a malicious
server chooses the function that the head learns (feature-space hijacking), and increases its
gradients step by step.

Cost: a pass over the gradients.

Source of the attack: Pasquini, Ateniese, Bernaschi 2021, "Unleashing the Tiger: Inference Attacks
on Split Learning", CCS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dure.errors import DureError
from dure.split.blame import InvalidMessageError, largest
from dure.split.tensor_forms import TensorForm, check_gradient_forms

FACTOR = 1000.0
"""Maximum ratio of a norm to the largest norm before."""

FEWEST = 16
"""Number of first gradients that are not compared, since early norms vary."""


class ReceivedError(DureError):
    """A message of another machine is invalid or not due. The text names the machine."""

    exit_code = 1


class GradientBound:
    """Checks of the gradients of a sender, message after message.

    Args:
        largest: maximum norm that the receiver allows; None: by the gradients before.
        fewest: number of first gradients that are not compared, such as an epoch's.
    """

    def __init__(self, largest: float | None = None, fewest: int = FEWEST) -> None:
        self.largest = largest
        self.fewest = max(fewest, FEWEST)
        self._came = 0
        self._before = 0.0

    def check(
        self, sender: str, what: str, values: Sequence[Tensor | None], wanted: Sequence[TensorForm]
    ) -> None:
        """Raise ReceivedError for invalid gradients; valid gradients update the bound.

        values: None for a missing gradient. wanted: dtypes and shapes.
        """
        try:
            check_gradient_forms(what, values, wanted)
        except InvalidMessageError as error:
            raise ReceivedError(f"{sender} sends invalid gradients: {error}") from error
        self._check_norm(sender, what, norm_of(values))

    def _check_norm(self, sender: str, what: str, norm: float) -> None:
        if not math.isfinite(norm):
            raise ReceivedError(f"{sender} sends {what} that are not all finite numbers")
        bound = self.largest
        if bound is None and self._came >= self.fewest and self._before > 0:
            bound = FACTOR * self._before
        if bound is not None and norm > bound:
            raise ReceivedError(
                f"{sender} sends {what} of norm {norm:.3g}, but at most {bound:.3g} is accepted: "
                "lower the learning rate, or set largest_gradient in policy.toml"
            )
        self._came += 1
        self._before = max(self._before, norm)


def norm_of(values: Sequence[Tensor | None]) -> float:
    """Return the Euclidean norm of all elements; NaN or infinite if an element is."""
    norms = [
        float(torch.linalg.vector_norm(one.detach()))
        for one in values
        if one is not None and one.numel()
    ]
    found = math.hypot(*norms)
    if math.isinf(found):
        # The squares may overflow although the elements are finite, and hypot hides NaN behind inf.
        return largest(values)
    return found

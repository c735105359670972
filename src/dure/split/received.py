"""Gradients that come from another machine: what their receiver checks before it uses them.

    number, dtype, shape    those of the values that were sent
    elements                finite
    norm                    at most `largest`, where the site names one; else at most `FACTOR` times
                            the largest norm of the gradients before, once `FEWEST` have come

The norm is the Euclidean one of all elements of a message. The bound catches damage and absurd
numbers. It does not stop whoever sends gradients from steering the head within it: such a server
chooses what the head learns (feature-space hijacking), and grows its gradients step by step.

Cost: one pass over the gradients.

Source of the attack: Pasquini, Ateniese, Bernaschi 2021, "Unleashing the Tiger: Inference Attacks
on Split Learning", CCS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dure.errors import DureError
from dure.split.blame import WrongError, largest
from dure.split.tensor_forms import TensorForm, check_gradient_forms

FACTOR = 1000.0
"""Times the largest norm before, that a norm may be."""

FEWEST = 16
"""Gradients of which nothing is compared: the first ones differ."""


class ReceivedError(DureError):
    """What another machine sends cannot be, or is not due. The message names it."""

    exit_code = 1


class GradientBound:
    """Checks the gradients of one sender, one message after another.

    Args:
        largest: the norm that the receiver allows; None: by the gradients before.
        fewest: gradients of which nothing is compared, such as an epoch's.
    """

    def __init__(self, largest: float | None = None, fewest: int = FEWEST) -> None:
        self.largest = largest
        self.fewest = max(fewest, FEWEST)
        self._came = 0
        self._before = 0.0

    def check(
        self, sender: str, what: str, values: Sequence[Tensor | None], wanted: Sequence[TensorForm]
    ) -> None:
        """Raise ReceivedError for gradients that cannot be; others count for the bound.

        values: None where there is none. wanted: dtypes and shapes.
        """
        try:
            check_gradient_forms(what, values, wanted)
        except WrongError as error:
            raise ReceivedError(f"{sender} sends gradients that cannot be: {error}") from error
        self._check_norm(sender, what, norm_of(values))

    def _check_norm(self, sender: str, what: str, norm: float) -> None:
        if not math.isfinite(norm):
            raise ReceivedError(f"{sender} sends {what} that are not all finite numbers")
        bound = self.largest
        if bound is None and self._came >= self.fewest and self._before > 0:
            bound = FACTOR * self._before
        if bound is not None and norm > bound:
            raise ReceivedError(
                f"{sender} sends {what} of norm {norm:.3g}, and at most {bound:.3g} is taken: "
                f"lower the learning rate, or set largest_gradient in policy.toml"
            )
        self._came += 1
        self._before = max(self._before, norm)


def norm_of(values: Sequence[Tensor | None]) -> float:
    """Return the Euclidean norm of all elements together; NaN or infinite where one is."""
    norms = [
        float(torch.linalg.vector_norm(one.detach()))
        for one in values
        if one is not None and one.numel()
    ]
    found = math.hypot(*norms)
    if math.isinf(found):
        # The squares overflow, which the numbers themselves may not; NaN is hidden by that.
        return largest(values)
    return found

"""Error feedback: what a rank has not sent it adds to what it sends next.

    p = g + e        g: the new vector, e: the error so far, 0 at first
    e = p - sent     sent: what the others have decoded

So nothing is lost, only late: after any number of calls Σ g - Σ sent = e. With it, compression that
is biased (top-k, signs, low rank) still converges at the rate of SGD.

Sources: F. Seide et al., Interspeech 2014 (for 1 bit); S. Karimireddy et al., "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes", ICML 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ErrorFeedback:
    """The error e of a vector of n elements, on one worker.

    `corrected` gives p; the caller takes from it, in place, what was sent, and then calls `keep`.
    If it does not, the error is the one before: so a call that failed changes nothing.
    """

    def __init__(
        self, n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.error = torch.zeros(n, dtype=dtype, device=device)
        # Two vectors in turn: p is formed in the one, while the other still has the old error.
        self._corrected = torch.empty_like(self.error)

    @torch.no_grad()
    def corrected(self, vector: Tensor) -> Tensor:
        """p = g + e, shape (n,); it belongs to the caller until `keep`."""
        return torch.add(vector, self.error, out=self._corrected)

    def keep(self) -> None:
        """What is left of p is the error from now on."""
        self.error, self._corrected = self._corrected, self.error

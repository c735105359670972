"""Error feedback: a rank adds the unsent remainder of a vector to the next vector.

    p = g + e        g: the new vector, e: the error so far, 0 at first
    e = p - sent     sent: the vector that the others have decoded

So nothing is lost, only delayed: after any number of calls Σ g - Σ sent = e. With error feedback,
biased compression (top-k, signs, low rank) still converges at the rate of SGD.

Sources: F. Seide et al., Interspeech 2014 (for 1 bit); S. Karimireddy et al., "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes", ICML 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ErrorFeedback:
    """Error e of a vector of n elements, on a worker.

    `corrected` returns p; the caller subtracts the sent vector in place, and then calls `keep`.
    Without `keep` the error stays at its former value: so a failed call changes nothing.
    """

    def __init__(
        self, n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.error = torch.zeros(n, dtype=dtype, device=device)
        # Two alternating vectors: p is computed in the first while the second has the old error.
        self._corrected = torch.empty_like(self.error)

    @torch.no_grad()
    def corrected(self, vector: Tensor) -> Tensor:
        """Return p = g + e, shape (n,); it belongs to the caller until `keep`."""
        return torch.add(vector, self.error, out=self._corrected)

    def keep(self) -> None:
        """Store the remainder of p as the new error."""
        self.error, self._corrected = self._corrected, self.error

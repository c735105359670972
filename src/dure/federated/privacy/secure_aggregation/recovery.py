"""A secret from its shares, of which some are wrong.

Shares alone do not show whether they are right: any threshold of them make a secret. But its owner
has advertised something that only the right one fits: a public key, or a commitment. So a secret is
tried with the shares of holders that follow each other, in a circle. One wrong share, and wrong
shares side by side, leave such a run of right ones, if there are enough; wrong shares here and
there may not, and then there is no secret, as if they were missing.

Cost: m shares and a threshold t: m joins of t shares at most, t^2 multiplications each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dure.federated.privacy.secure_aggregation import shamir


class Recovered(NamedTuple):
    """secret: None where no shares make one that fits. wrong: the places of the wrong shares that
    are known to be wrong.
    """

    secret: bytes | None
    wrong: tuple[int, ...]

    # What a log prints would be the secret.
    def __repr__(self) -> str:
        return f"Recovered({len(self.wrong)} wrong)"


def recover(
    shares: Mapping[int, bytes],
    threshold: int,
    fits: Callable[[bytes], bool],
    order: Sequence[int],
) -> Recovered:
    """shares: by place. fits: whether a secret is the right one. order: of places, those that are
    believed first."""
    for start in range(len(order)):
        run = [*order[start:], *order[:start]][:threshold]
        secret = _joined(shares, run)
        if secret is not None and fits(secret):
            # A right share makes the same secret with all but one of the right ones.
            others = [at for at in order if at not in run]
            wrong = (at for at in others if _joined(shares, [*run[1:], at]) != secret)
            return Recovered(secret, tuple(wrong))
    return Recovered(None, ())


def _joined(shares: Mapping[int, bytes], places: Sequence[int]) -> bytes | None:
    """The secret that the shares at these places make; None where they make none."""
    try:
        return shamir.join({at: shares[at] for at in places}, len(places))
    except ValueError:
        return None

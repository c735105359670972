"""Recovery of a secret from shares of which some are wrong.

Shares alone do not show whether they are right: any threshold of them make a secret. The owner has
advertised a value that fits the right secret alone: a public key, or a commitment. The search tries
runs of consecutive holders on a circle. A single wrong share, or adjacent wrong shares, leave a run
of right shares if enough are there; scattered wrong shares may leave none, and the secret then
counts as missing.

Cost: m shares and a threshold t: at most m joins of t shares, t^2 multiplications each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dure.federated.privacy.secure_aggregation import shamir


class Recovered(NamedTuple):
    """Result of a recovery.

    Args:
        secret: the secret; None if no run of shares fits.
        wrong: positions of the shares that are proven wrong.
    """

    secret: bytes | None
    wrong: tuple[int, ...]

    # The default repr would print the secret in logs.
    def __repr__(self) -> str:
        return f"Recovered({len(self.wrong)} wrong)"


def recover(
    shares: Mapping[int, bytes],
    threshold: int,
    fits: Callable[[bytes], bool],
    order: Sequence[int],
) -> Recovered:
    """Return the secret of shares by position, and the proven wrong shares.

    Args:
        shares: shares by position.
        threshold: number of shares that make a secret.
        fits: whether a secret is the right secret.
        order: positions in the order of trust, the most trusted first.
    """
    for start in range(len(order)):
        run = [*order[start:], *order[:start]][:threshold]
        secret = _joined(shares, run)
        if secret is not None and fits(secret):
            # A right share gives the same secret in place of any share of the run.
            others = [at for at in order if at not in run]
            wrong = (at for at in others if _joined(shares, [*run[1:], at]) != secret)
            return Recovered(secret, tuple(wrong))
    return Recovered(None, ())


def _joined(shares: Mapping[int, bytes], places: Sequence[int]) -> bytes | None:
    """Return the secret of the shares at these positions; None if they make none."""
    try:
        return shamir.join({at: shares[at] for at in places}, len(places))
    except ValueError:
        return None

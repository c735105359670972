"""Coins of clients: each of K falls by itself, with probability q, once for every round.

What the coins say is kept (`Carrier.once`), so that a server that goes on from an earlier state
asks the same clients again. They are drawn from a key that nobody else has
(`dure.randomness.secret`): where coins can be guessed, differential privacy loses what sampling
gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dure.randomness.keystream import coins
from dure.randomness.secret import Secret

Once = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]
"""`Carrier.once`."""

Toss = Callable[[int], list[int]]
"""The number of a round -> its clients, in ascending order."""


def tossing(secret: Secret, once: Once, rate: float, clients: int) -> Toss:
    """The coins of a run. rate: q, clients: K."""

    def toss(number: int) -> list[int]:
        def make() -> dict[str, Any]:
            fell = coins(secret.key("coins", number), rate, clients)
            return {"clients": fell.nonzero().flatten().tolist()}

        chosen: list[int] = once(f"coins {number}", make)["clients"]
        return chosen

    return toss

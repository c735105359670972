"""Randomness that protects: keys, masks, noise, stochastic rounding, coins of who takes part.

What it protects is lost if somebody else can draw it again. So a deployment draws it from the
system's generator, tells it to nobody and writes it nowhere (`Secret.system`). A simulation
protects nobody, and derives it from the run's seed, so that it repeats itself (`Secret.simulated`).
"""

from __future__ import annotations

import hashlib
import secrets

KEY = 32
"""Bytes of a key."""


class Secret:
    """Where keys come from. seed: of a simulation; None draws from the system."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    @classmethod
    def system(cls) -> Secret:
        """The system's generator: what is drawn is never drawn again."""
        return cls(None)

    @classmethod
    def simulated(cls, seed: int) -> Secret:
        """A function of (seed, purpose, position)."""
        return cls(seed)

    @property
    def repeats(self) -> bool:
        """Whether the same question has the same answer again."""
        return self._seed is not None

    def key(self, purpose: str, *position: int) -> bytes:
        """32 bytes for one purpose and position, each of which is asked once."""
        if self._seed is None:
            return secrets.token_bytes(KEY)
        text = ":".join([str(self._seed), purpose, *map(str, position)])
        return hashlib.blake2b(text.encode(), digest_size=KEY, person=b"dure secret").digest()

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
    """Where keys come from.

    seed: of a simulation; None draws from the system. root: a key that all keys follow from.
    """

    def __init__(self, seed: int | None, root: bytes = b"") -> None:
        self._seed = seed
        self._root = root

    @classmethod
    def system(cls) -> Secret:
        """The system's generator: what is drawn is never drawn again."""
        return cls(None)

    @classmethod
    def simulated(cls, seed: int) -> Secret:
        """A function of (seed, purpose, position)."""
        return cls(seed)

    @classmethod
    def shared(cls, root: bytes) -> Secret:
        """A function of (root, purpose, position), for several processes of one owner.

        root: a key of the system's that they told each other, for as long as they run, and that
        none of them writes down.
        """
        return cls(None, root)

    @property
    def repeats(self) -> bool:
        """Whether the same question has the same answer again."""
        return self._seed is not None or bool(self._root)

    def key(self, purpose: str, *position: int) -> bytes:
        """32 bytes for one purpose and position, each of which is asked once."""
        if not self.repeats:
            return secrets.token_bytes(KEY)
        text = ":".join(
            ["" if self._seed is None else str(self._seed), purpose, *map(str, position)]
        )
        return hashlib.blake2b(
            text.encode(), digest_size=KEY, key=self._root, person=b"dure secret"
        ).digest()

"""Randomness that protects: keys, masks, noise, stochastic rounding, Poisson sampling.

The protection is lost if another party can draw the same numbers. So a deployment draws them from
the system's generator, and neither sends nor stores them (`Secret.system`). A simulation protects
no party and derives them from the run's seed, so that the run is reproducible (`Secret.simulated`).
"""

from __future__ import annotations

import hashlib
import secrets

KEY = 32
"""Bytes of a key."""


class Secret:
    """Source of keys.

    seed: seed of a simulation; None draws from the system unless `root` is given. root: key from
    which all keys are derived.
    """

    def __init__(self, seed: int | None, root: bytes = b"") -> None:
        self._seed = seed
        self._root = root

    @classmethod
    def system(cls) -> Secret:
        """Return a source that draws from the system's generator; no key is ever repeated."""
        return cls(None)

    @classmethod
    def simulated(cls, seed: int) -> Secret:
        """Return a source whose keys are a function of (seed, purpose, position)."""
        return cls(seed)

    @classmethod
    def shared(cls, root: bytes) -> Secret:
        """Return a source whose keys are a function of (root, purpose, position).

        Several processes of the same owner draw equal keys from it. root: key from the system's
        generator that the processes share while they run, and never store.
        """
        return cls(None, root)

    @property
    def repeats(self) -> bool:
        """Whether equal arguments of `key` give equal keys."""
        return self._seed is not None or bool(self._root)

    def key(self, purpose: str, *position: int) -> bytes:
        """Return 32 bytes for a purpose and position, each of which is used once."""
        if not self.repeats:
            return secrets.token_bytes(KEY)
        text = ":".join(
            ["" if self._seed is None else str(self._seed), purpose, *map(str, position)]
        )
        return hashlib.blake2b(
            text.encode(), digest_size=KEY, key=self._root, person=b"dure secret"
        ).digest()

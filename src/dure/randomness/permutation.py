"""Random permutation of 0..n-1 without storage: any element, and any inverse, in O(1).

Sampling out of a million clients then costs as much as the clients that are looked up. Numbers are
written as a pair (l, r) in Z_a x Z_b with a = ceil(sqrt(n)) and b = ceil(n/a), and mixed by a
Feistel network,

    l <- l + F_1(r) mod a,    r <- r + F_2(l) mod b,    l <- l + F_3(r) mod a,    ...

in which every step, and so the network, is invertible for any F; the F are 64-bit mixing functions
with keys from the seed. A result of n or more passes through the network again until it is below n
(cycle walking): the network permutes a·b numbers, and the walk along a cycle of that permutation to
the next number below n is a permutation of 0..n-1. As a·b < n + a, repetitions are rare.

Sources: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (networks
over Z_a x Z_b, cycle walking); M. Luby and C. Rackoff, SIAM J. Computing 17, 1988; the mixing
function: G. L. Steele, D. Lea and C. H. Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dure.randomness.seeds import derive

# Steps of the network; even, so that both parts of the pair end in their place. Four steps suffice
# for a large n; with eight, small subsets are drawn uniformly too.
_STEPS = 8
_BITS = (1 << 64) - 1
# The constants of splitmix64: the odd number next to 2^64 / golden ratio, and two multipliers.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

FEW = 20
"""Maximum count of numbers computed separately; more are computed faster as an array."""


class Permutation:
    """Permutation of 0..n-1 that `seed` selects.

    Equal arguments give equal permutations, on every machine. Raises ValueError unless 1 <= n <=
    2^62.
    """

    def __init__(self, n: int, seed: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation has {n} numbers, but it has to have 1 to 2^62")
        self.n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        root = derive(seed, "permutation")
        # Each step changes l or r by the other part, and then swaps the two.
        self._steps = [
            (_mixed(root + step * _GOLDEN & _BITS), self._b if step % 2 else self._a)
            for step in range(_STEPS)
        ]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        """Return the image of i. Raises IndexError unless 0 <= i < n."""
        return self._walked(self._checked(i))

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self.n))

    def inverse(self, i: int) -> int:
        """Return the preimage of i: inverse(permutation[i]) = i.

        Raises IndexError unless 0 <= i < n.
        """
        value = self._back(self._checked(i))
        while value >= self.n:
            value = self._back(value)
        return value

    def first(self, m: int) -> list[int]:
        """Return [permutation[0], permutation[1], ...]: m different numbers, or all n if fewer."""
        m = min(m, self.n)
        if m <= FEW:
            return [self._walked(i) for i in range(m)]
        values = self._forth(np.arange(m, dtype=np.uint64))
        # Only results of n or more continue to walk; as a·b < n + a they are few.
        while len(outside := (values >= self.n).nonzero()[0]):
            values[outside] = self._forth(values[outside])
        found: list[int] = values.tolist()
        return found

    def _walked(self, value: int) -> int:
        """Return the image of a number below n, by cycle walking."""
        while True:
            value = self._forth(value)
            if value < self.n:
                return value

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"{i} is not in a permutation of 0..{self.n - 1}")
        return i

    def _forth(self, value: Any) -> Any:
        """Pass a number through the network: an int or an array of uint64."""
        # A uint64 array wraps around by itself; `& _BITS` does the same to a Python integer.
        side = value // self._b
        other = value % self._b
        for key, size in self._steps:
            # `_mixed`, written out: the few places of a round would else be a hundred calls.
            mixed = other ^ key
            mixed = (mixed ^ mixed >> 30) * _FIRST & _BITS
            mixed = (mixed ^ mixed >> 27) * _SECOND & _BITS
            mixed = mixed ^ mixed >> 31
            side, other = other, (side + mixed % size) % size
        return side * self._b + other

    def _back(self, value: int) -> int:
        side, other = divmod(value, self._b)
        for key, size in reversed(self._steps):
            # For Python integers only: the difference may be negative, which no unsigned array can
            # be.
            side, other = (other - _mixed(side ^ key)) % size, side
        return side * self._b + other


def _mixed(value: Any) -> Any:
    """Apply splitmix64, a bijection of 64-bit numbers, to an int or an array.

    Every bit of the result depends on every bit of the number.
    """
    value = (value ^ value >> 30) * _FIRST & _BITS
    value = (value ^ value >> 27) * _SECOND & _BITS
    return value ^ value >> 31

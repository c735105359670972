"""A random permutation of 0..n-1 of which nothing is stored: any element, and any inverse, in O(1).

Who is drawn out of a million clients, or lies among them, is then a matter of those who are asked
about. Numbers are written as a pair (l, r) in Z_a x Z_b with a = ceil(sqrt(n)) and b = ceil(n/a),
and stirred by a Feistel network,

    l <- l + F_1(r) mod a,    r <- r + F_2(l) mod b,    l <- l + F_3(r) mod a,    ...

in which every step, and so the whole, is invertible whatever the F are; here they are 64-bit mixing
functions with keys from the seed. A number that comes out as n or more is sent through again until
it is not: so the whole walks along a cycle of a permutation of a·b numbers and stops at the next
below n, which is a permutation of 0..n-1. As a·b < n + a that seldom happens.

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

# Steps of the network, even. Four make a large one look random; with eight, subsets of few numbers
# are drawn alike too.
_STEPS = 8
_BITS = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Permutation:
    """The permutation of 0..n-1 that `seed` names; equal arguments give equal permutations, on
    every machine.

    Raises ValueError unless 1 <= n <= 2^62.
    """

    def __init__(self, n: int, seed: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation of {n} numbers: there have to be 1 to 2^62")
        self.n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        root = derive(seed, "permutation")
        self._keys = [_mixed(root + step * _GOLDEN & _BITS) for step in range(_STEPS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        """Where i goes. Raises IndexError unless 0 <= i < n."""
        value: int = self._forth(self._checked(i))
        while value >= self.n:
            value = self._forth(value)
        return value

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self.n))

    def inverse(self, i: int) -> int:
        """What goes to i: inverse(permutation[i]) = i. Raises IndexError unless 0 <= i < n."""
        value = self._back(self._checked(i))
        while value >= self.n:
            value = self._back(value)
        return value

    def first(self, m: int) -> list[int]:
        """[permutation[0], permutation[1], ...]: m different numbers, or all n if they are fewer,
        computed at once."""
        values = self._forth(np.arange(min(m, self.n), dtype=np.uint64))
        while len(outside := (values >= self.n).nonzero()[0]):
            values[outside] = self._forth(values[outside])
        found: list[int] = values.tolist()
        return found

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"{i} is not in a permutation of 0..{self.n - 1}")
        return i

    def _forth(self, value: Any) -> Any:
        """One walk through the network, for an int or an array of uint64."""
        left, right = value // self._b, value % self._b
        for step in range(0, _STEPS, 2):
            left = (left + _mixed(right ^ self._keys[step]) % self._a) % self._a
            right = (right + _mixed(left ^ self._keys[step + 1]) % self._b) % self._b
        return left * self._b + right

    def _back(self, value: int) -> int:
        left, right = divmod(value, self._b)
        for step in range(_STEPS - 2, -1, -2):
            right = (right - _mixed(left ^ self._keys[step + 1])) % self._b
            left = (left - _mixed(right ^ self._keys[step])) % self._a
        return left * self._b + right


def _mixed(value: Any) -> Any:
    """A bijection of 64-bit numbers of which every bit hangs on every bit (splitmix64), for an int
    or an array."""
    value = (value ^ value >> 30) * _FIRST & _BITS
    value = (value ^ value >> 27) * _SECOND & _BITS
    return value ^ value >> 31

"""Real numbers as integers whose sum over clients is that of the numbers, as nearly as 32 bits can.

    L        = ⌊(2^(bits - 1) - 1) / n⌋                 so that n of [-L, L] do not overflow
    encode   : q = ⌊w x L / range + u⌋,                 u uniform in [0, 1);  -range <= x <= range
    decode   : Σ w x ≈ (range / L) Σ q

A step is range / L. E[q] = w x L / range: rounding is unbiased, and its error is below one step a
client, so that a sum of n has a deviation of at most √n / 2 steps. For 100 clients L is 21 million:
as fine as float32 has it for the largest x. u comes from a key, 32 bits each,
so the mean is right to 2^-32 of a step.

What lies beyond the range is cut off, which is a bias: it is counted. NaN and infinity are refused,
since one of them in a masked sum would spoil it without a trace.

Whole numbers, such as counts of examples, are added exactly. They travel as digits of base 2^b,
with b the bits that n sums leave free: 2^b - 1 at most from each client, n (2^b - 1) < 2^bits.

Cost: 4 bytes a number, as float32; 4 ⌈log2(most + 1) / b⌉ bytes a whole number.

Sources: Bonawitz et al. 2017, section 5 (a modulus with room for n); Bonawitz et al. 2019,
"Federated Learning with Autotuned Communication-Efficient Secure Aggregation", 2 (quantisation
before masks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dure.randomness.keystream import SLACK, Keystream

_ELEMENTS = 1 << 14
"""Numbers that are encoded at once: with all that is made of them they fit the cache."""


@dataclass(frozen=True)
class Quantisation:
    """How numbers become integers. range: the largest that is sent, as it is.

    clients: the most that are added. modulus_bits: the sum fits so many bits, its sign among them.

    Raises ValueError where a client's numbers would have no bit left.
    """

    range: float
    clients: int
    modulus_bits: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.range < math.inf:
            raise ValueError(f"the range is {self.range}, but it is above 0 and finite")
        if not 2 <= self.modulus_bits <= 32:
            raise ValueError(f"a modulus of {self.modulus_bits} bits: it has 2 to 32")
        if self.clients < 1 or self.levels < 1:
            raise ValueError(
                f"a sum of {self.clients} clients in {self.modulus_bits} bits: there have to be "
                f"1 to {(1 << self.modulus_bits - 1) - 1}"
            )

    @property
    def levels(self) -> int:
        """L: a client's integers are -L to L."""
        return ((1 << self.modulus_bits - 1) - 1) // self.clients

    @property
    def step(self) -> float:
        """The number that the integer 1 stands for."""
        return self.range / self.levels

    def encode(self, values: Tensor, key: bytes, weight: float = 1.0) -> tuple[Tensor, int]:
        """weight · values as integers, and how many of the values lay beyond the range.

        values: floating, of any shape, on the CPU. key: 32 bytes, for this rounding alone. weight:
        0 to 1. Returns int32 of the same shape. Raises ValueError for NaN, infinity and other
        weights.
        """
        if not 0 <= weight <= 1:
            raise ValueError(f"a weight of {weight}: it has to be 0 to 1, so that the sum fits")
        given = values.detach().reshape(-1)
        encoded = torch.empty(values.shape, dtype=torch.int32)
        out = encoded.view(-1).numpy()
        # Rounded down, so that the range itself becomes no more than L.
        scale = weight * math.nextafter(self.levels / self.range, 0)
        stream = Keystream(key)
        room = memoryview(bytearray(4 * _ELEMENTS + SLACK))
        drawn = np.frombuffer(room, dtype="<u4", count=_ELEMENTS)
        scaled = torch.empty(_ELEMENTS, dtype=torch.float64)
        rounding = np.empty(_ELEMENTS)
        cut = 0
        for at in range(0, len(out), _ELEMENTS):
            piece = out[at : at + _ELEMENTS]
            size = len(piece)
            scaled[:size].copy_(given[at : at + size])
            number = scaled.numpy()[:size]
            cut += self._cut(number)
            stream.into(room, 4 * size)
            np.multiply(drawn[:size], 2.0**-32, out=rounding[:size])
            number *= scale
            number += rounding[:size]
            np.floor(number, out=number)
            # Just below L + 1 there is no float64, so a sum there may have become L + 1.
            np.minimum(number, self.levels, out=number)
            piece[:] = number
        return encoded, cut

    def _cut(self, numbers: np.ndarray) -> int:
        """Cuts off what lies beyond the range, in place, and counts it.

        Raises ValueError for what is not finite.
        """
        largest = max(float(numbers.max()), -float(numbers.min()))
        if largest <= self.range:
            return 0
        if not math.isfinite(largest):
            raise ValueError(
                "an update has NaN or infinity in it, and a sum of masked numbers would not show it"
            )
        beyond = int(np.count_nonzero(np.abs(numbers) > self.range))
        np.clip(numbers, -self.range, self.range, out=numbers)
        return beyond

    def decode(self, total: Tensor, clients: int) -> Tensor:
        """The sum of what so many clients have encoded: float64 of the same shape.

        total: int32, the sum of their integers. Raises ValueError for a total that so many clients
        cannot have.
        """
        self.check(total, clients)
        return total.to(torch.float64).mul_(self.step)

    def check(self, total: Tensor, clients: int) -> None:
        """Raises ValueError for a total that so many clients cannot have."""
        self._check(clients)
        if total.numel() and max(int(total.max()), -int(total.min())) > clients * self.levels:
            raise ValueError(f"this is no sum of {clients} clients: it is larger than theirs is")

    def encode_whole(self, numbers: Sequence[int], most: int) -> Tensor:
        """Whole numbers from 0 to `most`, as int32 of `digits(most)` each, which add up exactly.

        Raises ValueError for numbers that are negative or larger.
        """
        base = 1 << self._bits
        digits = []
        for number in numbers:
            if not 0 <= number <= most:
                raise ValueError(f"a whole number is {number}, but it can be 0 to {most}")
            for _ in range(self.digits(most)):
                number, digit = divmod(number, base)
                digits.append(digit)
        return torch.tensor(digits, dtype=torch.int64).to(torch.int32)

    def decode_whole(self, total: Tensor, most: int, clients: int) -> list[int]:
        """The sums of the whole numbers that so many clients have encoded.

        total: int32, the sum of what `encode_whole` made. Raises ValueError for a total that so
        many clients cannot have, or that is no whole number of numbers.
        """
        self._check(clients)
        per_number = self.digits(most)
        digits = (total.to(torch.int64) & 0xFFFFFFFF).tolist()
        if len(digits) % per_number:
            raise ValueError(f"a whole number has {per_number} digits, and there are {len(digits)}")
        found = [
            sum(digit << self._bits * at for at, digit in enumerate(digits[first:][:per_number]))
            for first in range(0, len(digits), per_number)
        ]
        if any(digit > clients * ((1 << self._bits) - 1) for digit in digits) or any(
            number > clients * most for number in found
        ):
            raise ValueError(f"this is no sum of {clients} clients: it is larger than theirs is")
        return found

    def digits(self, most: int) -> int:
        """How many integers a whole number from 0 to `most` is. Raises ValueError for most < 0."""
        if most < 0:
            raise ValueError(f"whole numbers from 0 to {most}: there are none")
        return max(1, -(-most.bit_length() // self._bits))

    @property
    def _bits(self) -> int:
        """The most bits b with clients · (2^b - 1) < 2^modulus_bits: 1 or more."""
        return ((((1 << self.modulus_bits) - 1) // self.clients) + 1).bit_length() - 1

    def _check(self, clients: int) -> None:
        if not 1 <= clients <= self.clients:
            raise ValueError(f"a sum of {clients} clients, but it can be of 1 to {self.clients}")

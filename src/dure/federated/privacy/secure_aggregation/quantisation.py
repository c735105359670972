"""Quantisation: real numbers as integers whose sum fits 32 bits and approximates the real sum.

    L        = ⌊(2^(bits - 1) - 1) / n⌋                 so that n of [-L, L] do not overflow
    encode   : q = ⌊w x L / range + u⌋,                 u uniform in [0, 1);  -range <= x <= range
    decode   : Σ w x ≈ (range / L) Σ q

A step is range / L. E[q] = w x L / range: rounding is unbiased, and its error is below one step for
each client, so a sum of n has a standard deviation of at most √n / 2 steps. For 100 clients L is 21
million: as fine as float32 for the largest x. u comes from a key, 32 bits each, so the mean is
right to 2^-32 of a step.

Values beyond the range are cut off, which causes a bias: they are counted. NaN and infinity raise
an error, since in a masked sum they would corrupt the result unnoticed.

Whole numbers, such as counts of examples, are added exactly. They travel as digits of base 2^b,
with b the bits that n sums leave free: at most 2^b - 1 from each client, n (2^b - 1) < 2^bits.

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
"""Block size of the encoder; a block and its temporaries fit the cache."""


@dataclass(frozen=True)
class Quantisation:
    """Quantisation of numbers for a sum.

    Args:
        range: largest absolute value without cut-off.
        clients: largest number of summands.
        modulus_bits: bits of the sum, including the sign.

    Raises ValueError if no bits remain for a client's numbers.
    """

    range: float
    clients: int
    modulus_bits: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.range < math.inf:
            raise ValueError(
                f"the range is {self.range}, but it has to be greater than 0 and finite"
            )
        if not 2 <= self.modulus_bits <= 32:
            raise ValueError(
                f"the modulus has {self.modulus_bits} bits, but it has to have 2 to 32"
            )
        if self.clients < 1 or self.levels < 1:
            raise ValueError(
                f"a sum in {self.modulus_bits} bits has {self.clients} clients, but it can have 1 "
                f"to {(1 << self.modulus_bits - 1) - 1}"
            )

    @property
    def levels(self) -> int:
        """L: a client's integers are -L to L."""
        return ((1 << self.modulus_bits - 1) - 1) // self.clients

    @property
    def step(self) -> float:
        """Real number that the integer 1 represents."""
        return self.range / self.levels

    def encode(self, values: Tensor, key: bytes, weight: float = 1.0) -> tuple[Tensor, int]:
        """Return weight · values as int32 of the same shape, and the number of values cut off.

        `values` are floating-point numbers of any shape on the CPU. `key` has 32 bytes and serves
        this rounding alone. `weight` is 0 to 1. Raises ValueError for NaN, infinity and other
        weights.
        """
        if not 0 <= weight <= 1:
            raise ValueError(
                f"a weight is {weight}, but it has to be 0 to 1, so that the sum does not overflow"
            )
        given = values.detach().reshape(-1)
        encoded = torch.empty(values.shape, dtype=torch.int32)
        out = encoded.view(-1).numpy()
        # The scale is rounded down, so that the range itself becomes no more than L.
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
            # The sum of number and rounding may round up to L + 1 in float64.
            np.minimum(number, self.levels, out=number)
            piece[:] = number
        return encoded, cut

    def _cut(self, numbers: np.ndarray) -> int:
        """Clip values beyond the range, in place, and return their number.

        Raises ValueError for NaN and infinity.
        """
        largest = max(float(numbers.max()), -float(numbers.min()))
        if largest <= self.range:
            return 0
        if not math.isfinite(largest):
            raise ValueError(
                "an update contains NaN or infinity, which a sum of masked numbers would hide"
            )
        beyond = int(np.count_nonzero(np.abs(numbers) > self.range))
        np.clip(numbers, -self.range, self.range, out=numbers)
        return beyond

    def decode(self, total: Tensor, clients: int) -> Tensor:
        """Return the real sum of `clients` encoded tensors: float64 of the same shape.

        `total` is the int32 sum of their integers. Raises ValueError for a total that the clients
        cannot have.
        """
        self.check(total, clients)
        return total.to(torch.float64).mul_(self.step)

    def check(self, total: Tensor, clients: int) -> None:
        """Check that `clients` vectors can have this total; raises ValueError if not."""
        self._check(clients)
        if total.numel() and max(int(total.max()), -int(total.min())) > clients * self.levels:
            raise ValueError(f"this is not a sum of {clients} clients: it is too large")

    def encode_whole(self, numbers: Sequence[int], most: int) -> Tensor:
        """Return whole numbers from 0 to `most` as int32 digits that add exactly.

        Each number has `digits(most)` digits. Raises ValueError for negative and for larger
        numbers.
        """
        base = 1 << self._bits
        digits = []
        for number in numbers:
            if not 0 <= number <= most:
                raise ValueError(f"an integer is {number}, but it has to be 0 to {most}")
            for _ in range(self.digits(most)):
                number, digit = divmod(number, base)
                digits.append(digit)
        return torch.tensor(digits, dtype=torch.int64).to(torch.int32)

    def decode_whole(self, total: Tensor, most: int, clients: int) -> list[int]:
        """Return the sums of the whole numbers that `clients` clients have encoded.

        `total` is the int32 sum of `encode_whole` tensors. Raises ValueError for a total that the
        clients cannot have, or with an incomplete number.
        """
        self._check(clients)
        per_number = self.digits(most)
        digits = (total.to(torch.int64) & 0xFFFFFFFF).tolist()
        if len(digits) % per_number:
            raise ValueError(f"an integer has {per_number} digits, but there are {len(digits)}")
        found = [
            sum(digit << self._bits * at for at, digit in enumerate(digits[first:][:per_number]))
            for first in range(0, len(digits), per_number)
        ]
        if any(digit > clients * ((1 << self._bits) - 1) for digit in digits) or any(
            number > clients * most for number in found
        ):
            raise ValueError(f"this is not a sum of {clients} clients: it is too large")
        return found

    def digits(self, most: int) -> int:
        """Return the number of digits of a whole number from 0 to `most`.

        ValueError for most < 0.
        """
        if most < 0:
            raise ValueError(f"there are no integers from 0 to {most}")
        return max(1, -(-most.bit_length() // self._bits))

    @property
    def _bits(self) -> int:
        """Largest number of bits b with clients · (2^b - 1) < 2^modulus_bits: 1 or more."""
        return ((((1 << self.modulus_bits) - 1) // self.clients) + 1).bit_length() - 1

    def _check(self, clients: int) -> None:
        if not 1 <= clients <= self.clients:
            raise ValueError(f"the sum has {clients} clients, but it can have 1 to {self.clients}")

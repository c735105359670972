"""The updates of a round as the rows of a virtual (m, d) matrix, which rules process in blocks.

The matrix is never materialised. A block is a range of coordinates of all rows, in float64. So a
rule needs, besides the updates themselves, the memory of a block and of its result, for any m and
d.

Rows may also be mixtures of updates, such as means of groups: row i is then (sum over j of mix[i,
j]·update j), formed block by block.

Distances are sums of squares of differences. The usual |x|² + |y|² - 2x·y cancels: for float32
models of 10^6 parameters that differ by 10^-4, its result is wrong in all digits, and often
negative.

Combinations of updates, and means of disjoint groups, have the same bits on every x86 processor
(`dure.tensors.unfused_multiply_add`). Distances do not: distances are sums over coordinates in an
order that depends on the processor. Other mixtures, which are matrix products, do not either.
`order` ignores the last digits of distances, so selections by distance are almost always the same
on all processors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cmp_to_key
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pdist

from dure.tensors.unfused_multiply_add import sum_of_multiples

BLOCK = 2**20
"""Numbers in a block, over all rows."""

LARGEST = 2.0**500
"""Largest norm of a finite row: the squared distance of two such rows still fits a float64."""


class RowBlock(NamedTuple):
    """A range of coordinates of all rows.

    slot: index of the tensor within each update. values: shape (m, stop - start).
    """

    slot: int
    start: int
    stop: int
    values: Tensor


class UpdateRows:
    """m updates and their weights n_k, as rows.

    A row is a single vector: all tensors of an update, one after another.

    Args:
        updates: m lists of tensors, with the same shapes and floating-point dtypes.
        weights: the weight n_k of each row.
        numbers: size of a block, in numbers.
        mix: rows as mixtures of updates, float64 of shape (rows, m); `mixed` and `grouped` make
            such rows.
        measured: number of leading tensors that distances and norms cover, the trained weights;
            None is all. The tensors after them, buffers such as the statistics of batch norm, have
            other units, and are combined with the coefficients that the rule has found for the
            weights.
        rest: the mixture for the tensors that are not measured; None is `mix`.

    Raises:
        ValueError: there are no updates, or their shapes or dtypes differ, or a dtype is not
            floating point, or the number of weights differs from the number of rows.
    """

    def __init__(
        self,
        updates: Sequence[Sequence[Tensor]],
        weights: Sequence[float],
        numbers: int = BLOCK,
        mix: Tensor | None = None,
        measured: int | None = None,
        rest: Tensor | None = None,
    ) -> None:
        _check(updates)
        self.updates = updates
        self.weights = list(map(float, weights))
        self.measured = len(updates[0]) if measured is None else measured
        self.mix = mix
        self.rest = mix if rest is None else rest
        if len(self.weights) != len(self):
            raise ValueError(f"{len(self)} updates need as many weights, not {len(self.weights)}")
        self._numbers = numbers
        # Contiguous tensors give views: nothing is copied before a block is made.
        self._flat = [_flattened(update) for update in updates]

    def __len__(self) -> int:
        return len(self.updates) if self.mix is None else len(self.mix)

    def blocks(
        self, columns: int = 0, own_dtype: bool = False, measured: bool = False
    ) -> Iterator[RowBlock]:
        """Yield all coordinates, a block at a time; the caller may change the values.

        columns: least number of coordinates in a block, if there are as many. own_dtype: whether
        rows that are plain updates keep their dtype, for rules to which only order matters;
        otherwise blocks are float64. measured: whether to yield only the tensors that distances
        cover.
        """
        # Mixtures are formed from all updates, which may be more than the rows.
        columns = max(1, columns, self._numbers // max(len(self), len(self.updates)))
        for slot, first in enumerate(self._flat[0][: self.measured if measured else None]):
            mix = self.mix if slot < self.measured else self.rest
            for start in range(0, first.numel(), columns):
                stop = min(start + columns, first.numel())
                # A copy in any case, so that the caller may write to the block.
                values = torch.stack([flat[slot][start:stop] for flat in self._flat])
                if mix is not None:
                    values = _mixture(mix, values.double())
                elif not own_dtype:
                    values = values.double()
                yield RowBlock(slot, start, stop, values)

    def map(
        self,
        function: Callable[[Tensor], Tensor],
        own_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """Apply `function` to each block of coordinates and return the result, shaped as an update.

        function: maps values of shape (m, b) to shape (b,). own_dtype: as in `blocks`. dtype: of
        the result; None for the dtype of the updates.
        """
        result = self._empty(dtype)
        for slot, start, stop, values in self.blocks(own_dtype=own_dtype):
            result[slot][start:stop] = function(values)
        return self._shaped(result)

    def combination(
        self,
        coefficients: Tensor,
        dtype: torch.dtype | None = None,
        rest: Tensor | None = None,
    ) -> list[Tensor]:
        """Return (sum over rows i of coefficients[i]·row i), summed in float64.

        coefficients: float64, shape (m,). dtype: of the result; None for the dtype of the updates.
        rest: coefficients of the tensors that are not measured; None is `coefficients`. A single
        coefficient of 1 among zeros returns the row bit for bit.
        """
        rest = coefficients if rest is None else rest
        if self.mix is not None:
            assert self.rest is not None
            # A combination of mixtures is a combination of the updates: one pass, and no mixture is
            # made.
            whole = UpdateRows(
                self.updates, [1.0] * len(self.updates), self._numbers, measured=self.measured
            )
            return whole.combination(coefficients @ self.mix, dtype, rest @ self.rest)
        # Rows with coefficient 0 are not even read.
        used = ((coefficients != 0) | (rest != 0)).nonzero().flatten().tolist() or [0]
        chosen = self.only(used)
        result = chosen._empty(dtype)
        for slot, start, stop, values in chosen.blocks():
            shares = (coefficients if slot < self.measured else rest)[used]
            result[slot][start:stop] = sum_of_multiples(values, shares)
        return self._shaped(result)

    def row(self, index: int) -> list[Tensor]:
        """Return a row, shaped as an update."""
        return self.combination(torch.eye(len(self), dtype=torch.float64)[index])

    def finite(self) -> list[int]:
        """Return the indices of rows with finite numbers and a finite, positive weight.

        A norm above 2^500, possible in float64 only, does not count as finite: its square is
        infinite.
        """
        assert self.mix is None, "a mixture needs finite rows"
        pairs = zip(self._flat, self.weights, strict=True)
        return [
            row
            for row, (flat, weight) in enumerate(pairs)
            if is_finite(flat) and 0 < weight < math.inf
        ]

    def squared_distances(self) -> Tensor:
        """Return the squared distances between rows: float64 of shape (m, m), on the CPU.

        Distances cover the measured tensors. Cost: m²·d/2 differences.
        """
        sums = torch.zeros(len(self) * (len(self) - 1) // 2, dtype=torch.float64)
        for block in self.blocks(measured=True):
            # Sums of squares add up over blocks, roots do not.
            sums += pdist(block.values).square().cpu()
        result = torch.zeros(len(self), len(self), dtype=torch.float64)
        # The order in which `pdist` returns its pairs.
        above = torch.triu_indices(len(self), len(self), 1)
        result[above[0], above[1]] = sums
        return result + result.T

    def distances(self, origin: Sequence[Tensor] | None = None) -> Tensor:
        """Return the distance of each row from the vector `origin`: float64 of shape (m,).

        origin: shaped as an update; None for zero. Distances cover the measured tensors.
        """
        sums = torch.zeros(len(self), dtype=torch.float64)
        for slot, start, stop, values in self.blocks(measured=True):
            if origin is not None:
                values -= origin[slot].reshape(-1)[start:stop]
            sums += values.square_().sum(1).cpu()
        return sums.sqrt()

    def only(self, rows: Sequence[int]) -> UpdateRows:
        """Return the selected rows, in the given order."""
        weights = [self.weights[row] for row in rows]
        if self.mix is None or self.rest is None:
            chosen = [self.updates[row] for row in rows]
            return UpdateRows(chosen, weights, self._numbers, measured=self.measured)
        return self._mixtures(self.mix[list(rows)], self.rest[list(rows)], weights)

    def mixed(self, mix: Tensor, weights: Sequence[float]) -> UpdateRows:
        """Return rows that are mixtures of the present rows.

        mix: float64 of shape (new rows, m). weights: the weights of the new rows.
        """
        if self.mix is None or self.rest is None:
            return self._mixtures(mix, mix, weights)
        return self._mixtures(mix @ self.mix, mix @ self.rest, weights)

    def scaled(self, factors: Tensor) -> UpdateRows:
        """Return the rows with the measured tensors of each multiplied by a factor.

        factors: float64 of shape (m,). Tensors that are not measured stay unchanged.
        """
        if self.mix is None or self.rest is None:
            same = torch.eye(len(self), dtype=torch.float64)
            return self._mixtures(factors.diag(), same, self.weights)
        return self._mixtures(factors.unsqueeze(1) * self.mix, self.rest, self.weights)

    def _mixtures(self, mix: Tensor, rest: Tensor, weights: Sequence[float]) -> UpdateRows:
        return UpdateRows(self.updates, weights, self._numbers, mix, self.measured, rest)

    def grouped(self, groups: Sequence[Sequence[int]]) -> UpdateRows:
        """Return the mean of each group, weighted by the weights of its rows.

        A group weighs the sum of its rows' weights.
        """
        weights = torch.tensor(self.weights, dtype=torch.float64)
        mix = torch.zeros(len(groups), len(self), dtype=torch.float64)
        for row, group in zip(mix, groups, strict=True):
            row[list(group)] = weights[list(group)] / self._together(group)
        return self.mixed(mix, [self._together(group) for group in groups])

    def _together(self, rows: Sequence[int]) -> float:
        """Return the sum of the weights of the rows."""
        return sum(self.weights[row] for row in rows)

    def order(self, keys: Tensor) -> list[int]:
        """Return the row indices sorted by `keys`, of shape (m,).

        Ties are broken by the values of rows, never by their places: the row that is smaller at the
        first coordinate where two rows differ comes first. Keys that agree in nine digits are tied,
        because equal sums that were computed in different ways differ in their roundings.
        """
        # Round first and compare then: "nearly equal" by itself is not transitive, and so is no
        # order.
        numbers = _nine_digits(keys).tolist()

        def compare(one: int, other: int) -> int:
            if numbers[one] != numbers[other]:
                return -1 if numbers[one] < numbers[other] else 1
            return self._compare(one, other)

        return sorted(range(len(self)), key=cmp_to_key(compare))

    def _compare(self, one: int, other: int) -> int:
        """Return -1, 0 or 1: whether row `one` comes before row `other` in lexicographic order."""
        pair = self.only([one, other])
        # Rows that differ mostly differ within the first coordinates.
        pair._numbers = min(self._numbers, 2**13)
        for block in pair.blocks():
            places = (block.values[0] != block.values[1]).nonzero()
            if len(places):
                first = block.values[:, places[0, 0]].tolist()
                return -1 if first[0] < first[1] else 1
        return 0

    def _empty(self, dtype: torch.dtype | None) -> list[Tensor]:
        """Return uninitialised flat tensors for a result."""
        return [torch.empty_like(tensor, dtype=dtype) for tensor in self._flat[0]]

    def _shaped(self, flat: Sequence[Tensor]) -> list[Tensor]:
        return [values.view(like.shape) for values, like in zip(flat, self.updates[0], strict=True)]


def _mixture(mix: Tensor, values: Tensor) -> Tensor:
    """Return mix·values; overwrites `values`."""
    # In groups and scaled rows an update contributes to one row at most, and one pass over all
    # updates gives the same bits on every processor. Other mixtures take a matrix product, which is
    # many times faster.
    if int((mix != 0).sum(0).max()) > 1:
        return mix.to(values.device) @ values
    result = torch.zeros(len(mix), values.shape[1], dtype=values.dtype, device=values.device)
    for row, shares in zip(result, mix, strict=True):
        members = shares.nonzero().flatten()
        if len(members):
            row.copy_(sum_of_multiples(values[members], shares[members]))
    return result


def _nine_digits(keys: Tensor) -> Tensor:
    """Return keys rounded to 30 bits; infinities stay."""
    # Rounded relative to each key's own size, in binary, without decimal text in between.
    mantissa, exponent = torch.frexp(keys.double())
    return torch.ldexp((mantissa * 2**30).round(), exponent - 30)


def is_finite(update: Sequence[Tensor]) -> bool:
    """Return whether all numbers of an update are finite and its norm is at most 2^500."""
    for tensor in update:
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if tensor.numel():
            least, most = tensor.aminmax()
            # Both are NaN if any number is, and no comparison holds for NaN.
            if not max(-float(least), float(most)) * tensor.numel() ** 0.5 <= LARGEST:
                return False
    return True


def _flattened(update: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().reshape(-1) for tensor in update]


def _check(updates: Sequence[Sequence[Tensor]]) -> None:
    if not updates:
        raise ValueError("there are no updates to aggregate")
    like = [(tensor.shape, tensor.dtype) for tensor in updates[0]]
    for number, update in enumerate(updates):
        if [(tensor.shape, tensor.dtype) for tensor in update] != like:
            raise ValueError(f"update {number} differs from the first in its shapes or dtypes")
    for _, dtype in like:
        if not dtype.is_floating_point:
            raise ValueError(f"updates are aggregated in floating point, not as {dtype}")

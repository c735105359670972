"""Per-example gradients of a layer's weights, as products that need not be formed.

A layer with input a_i and gradient of its output e_i, both of example i, gives

    linear       Σ_t e_it ⊗ a_it           its norm² is Σ_ts (a_it·a_is)(e_it·e_is); with a single
                                           position t, ‖a_i‖² ‖e_i‖²
    convolution  the same, with a_it the patch of the input below position t, for each group
    embedding    e_it, added up in the row of its index
    norms        Σ_t e_it ∘ â_it           â is the normalised input; stored, since it is small
    biases       Σ_t e_it                  stored

With T positions, m inputs and n outputs the norm² takes T²(m + n) operations from the products
between positions (Gram), and T·m·n if the example's gradient is formed. The cheaper method is used;
gradients are formed for a few examples at a time, and stored for the sum only if those of the batch
have at most `HELD` elements.

Norms are upper bounds (`clipping.norm_bounds`). The sum over examples forms its products again,
with other rounding; each norm is increased by the bound of this difference, Σ_t ‖a_it‖ ‖e_it‖ times
some units in the last place. The increase exceeds the last digits only if the products of an
example cancel.

The sum over examples, each times its factor f_i, is then that of an ordinary backward pass with
f_i·e_i in place of e_i: no second pass through the model is needed (book-keeping).

Sources: I. Goodfellow, "Efficient Per-Example Gradient Computations", 2015; X. Li et al., "Large
Language Models Can Be Strong Differentially Private Learners", ICLR 2022; Z. Bu, J. Mao, S. Xu,
"Scalable and Efficient Training of Large Convolutional Neural Networks with Differential Privacy",
NeurIPS 2022; Z. Bu et al., "Differentially Private Optimization on Large Model at Small Cost", ICML
2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dure.privacy.per_example.clipping import CannotClipError, norm_bounds

HELD = 1 << 24
"""Maximum elements of a batch's gradients that a layer stores: 64 MiB in float32."""

AT_ONCE = 1 << 20
"""Maximum elements that are formed at once, so that they fit the cache."""

SURE = 2e-3
"""Fraction of a squared norm: float32 products are used if their rounding error is below it."""


class ParameterContribution(Protocol):
    """Contribution of a batch's examples to the gradient of a parameter."""

    def norms(self) -> Tensor:
        """Return an upper bound of the norm of each example's contribution, float64 of shape (b,).

        The bound covers the example's contribution to `total`, including rounding.
        """

    def total(self, factors: Tensor) -> Tensor:
        """Return the sum of contributions, each times its factor.

        factors: shape (b,), in the dtype of the weights.
        """

    def with_more(self, other: ParameterContribution) -> ParameterContribution:
        """Return the sum with the contribution of another call of the same layer."""


class StoredContribution:
    """Stored gradients, shape (b, ...)."""

    def __init__(self, each: Tensor) -> None:
        self.each = each

    def norms(self) -> Tensor:
        return norm_bounds(self.each.flatten(1))

    def total(self, factors: Tensor) -> Tensor:
        return (factors @ self.each.flatten(1)).view(self.each.shape[1:])

    def with_more(self, other: ParameterContribution) -> ParameterContribution:
        if not isinstance(other, StoredContribution):
            raise _shared()
        return StoredContribution(self.each + other.each)


class LinearContribution:
    """Contribution to a linear layer's weight: sums over positions of outgoing ⊗ given.

    given: shape (b, T, m). outgoing: gradients of the outputs, shape (b, T, n).
    """

    def __init__(self, given: Tensor, outgoing: Tensor) -> None:
        self.given = given
        self.outgoing = outgoing

    def norms(self) -> Tensor:
        _, positions, m = self.given.shape
        n = self.outgoing.shape[2]
        if positions == 1:
            norms = norm_bounds(self.given[:, 0]).mul_(norm_bounds(self.outgoing[:, 0]))
            return norms.mul_(1 + rounding(1, self.given))
        gram = positions * (m + n) <= m * n
        return _in_pieces(gram_norms if gram else self._formed, self.given, self.outgoing)

    @staticmethod
    def _formed(given: Tensor, outgoing: Tensor) -> Tensor:
        formed = norm_bounds(torch.bmm(outgoing.mT, given).flatten(1))
        return formed.add_(slack(norm_bounds(given), norm_bounds(outgoing), given))

    def total(self, factors: Tensor) -> Tensor:
        scaled = self.outgoing * factors[:, None, None]
        return scaled.flatten(0, 1).mT @ self.given.flatten(0, 1)

    def with_more(self, other: ParameterContribution) -> ParameterContribution:
        if not isinstance(other, LinearContribution):
            raise _shared()
        given = torch.cat([self.given, other.given], 1)
        return LinearContribution(given, torch.cat([self.outgoing, other.outgoing], 1))


def rounding(positions: int, like: Tensor) -> float:
    """Return the relative bound on the rounding error of a sum of `positions` products.

    The bound is twice that of a sum in any order, since norms and sums are computed separately.
    """
    return (positions + 4) * torch.finfo(like.dtype).eps


def slack(given: Tensor, outgoing: Tensor, like: Tensor) -> Tensor:
    """Return the bound on the norm of the rounding error of each example's Σ_t e_t ⊗ a_t.

    given, outgoing: the norms of all a_t and e_t, float64 of shape (b, T). The bound is far below
    the example's norm, unless its products cancel.
    """
    return (given * outgoing).sum(1).mul_(rounding(given.shape[1], like))


def gram_norms(given: Tensor, outgoing: Tensor) -> Tensor:
    """Return upper bounds of the norms of Σ_t e_t ⊗ a_t, by the products between positions.

    given: (b, T, m). outgoing: (b, T, n). If positions cancel, the rounding of these products is
    larger than their sum: such examples are computed in float64.
    """
    a, e = norm_bounds(given), norm_bounds(outgoing)
    positions, m = given.shape[1:]
    terms = m + outgoing.shape[2] + positions**2
    sizes = (a * e).sum(1).square_()
    if given.dtype == torch.float64 or terms * positions * torch.finfo(given.dtype).eps > SURE:
        squares = _gram(given.double(), outgoing.double()).clamp_(min=0)
        squares += sizes * (terms * torch.finfo(torch.float64).eps)
    else:
        limits = torch.finfo(given.dtype)
        squares = _gram(given, outgoing).double()
        # Products of small numbers may underflow to 0.
        lost = e.sum(1).square_().mul_(m) + a.sum(1).square_().mul_(outgoing.shape[2])
        doubt = sizes * (terms * limits.eps) + lost * limits.tiny
        unsure = ~(doubt <= SURE * squares)
        squares += doubt
        if bool(unsure.any()):
            squares[unsure] = gram_norms(
                given[unsure].double(), outgoing[unsure].double()
            ).square_()
    return squares.sqrt_().add_(slack(a, e, given))


def _gram(given: Tensor, outgoing: Tensor) -> Tensor:
    between = torch.bmm(given, given.mT)
    return between.mul_(torch.bmm(outgoing, outgoing.mT)).sum((1, 2))


def _in_pieces(norms: Callable[[Tensor, Tensor], Tensor], *whole: Tensor) -> Tensor:
    """Return the norms, computed for a few examples at a time to limit the memory."""
    given, outgoing = whole
    _, positions, m = given.shape
    formed = max(positions**2, m * outgoing.shape[2])
    size = max(1, AT_ONCE // max(1, formed))
    pieces = [slice(at, at + size) for at in range(0, len(given), size)]
    return torch.cat([norms(given[piece], outgoing[piece]) for piece in pieces])


class EmbeddingContribution:
    """Contribution to an embedding: outgoing gradients, each added to the row of its index.

    indices: int64 of shape (b, T). outgoing: shape (b, T, n). rows: of the table. padding: the row
    that is not trained.
    """

    def __init__(self, indices: Tensor, outgoing: Tensor, rows: int, padding: int | None) -> None:
        counted = indices != padding if padding is not None else torch.ones_like(indices).bool()
        self.examples, self.positions = indices.shape
        example = torch.arange(len(indices), device=indices.device)[:, None].expand_as(indices)
        self.example = example[counted]
        self.indices = indices[counted]
        self.outgoing = outgoing[counted]
        self.rows = rows

    def norms(self) -> Tensor:
        # Positions of an example with the same index share a row, so add them before the norm.
        rows, where = torch.unique(self.example * self.rows + self.indices, return_inverse=True)
        sums = self.outgoing.new_zeros(len(rows), self.outgoing.shape[1])
        sums.index_add_(0, where, self.outgoing)
        squares = self._of_each(rows // self.rows, norm_bounds(sums).square_())
        slack = self._of_each(self.example, norm_bounds(self.outgoing))
        return squares.sqrt_().add_(slack.mul_(rounding(self.positions, self.outgoing)))

    def _of_each(self, example: Tensor, values: Tensor) -> Tensor:
        """Return the sum of each example's values, float64 of shape (b,)."""
        found = torch.zeros(self.examples, dtype=torch.float64, device=values.device)
        return found.index_add_(0, example, values)

    def total(self, factors: Tensor) -> Tensor:
        total = self.outgoing.new_zeros(self.rows, self.outgoing.shape[1])
        return total.index_add_(0, self.indices, self.outgoing * factors[self.example, None])

    def with_more(self, other: ParameterContribution) -> ParameterContribution:
        raise _shared()


class ConvolutionContribution:
    """Contribution to a convolution: for each group, sums over positions of outgoing ⊗ input patch.

    given: the padded input, shape (b, channels, ...). outgoing: shape (b, channels, ...).
    """

    def __init__(self, layer: _Convolution, given: Tensor, outgoing: Tensor) -> None:
        self.layer = layer
        self.given = given
        self.outgoing = outgoing.reshape(len(outgoing), layer.groups, -1, _positions(outgoing))
        self.held: Tensor | None = None
        m = layer.weight[0].numel()
        n = layer.weight.shape[0] // layer.groups
        self._by_gram = self.outgoing.shape[3] * (m + n) <= m * n

    def norms(self) -> Tensor:
        weight = self.layer.weight
        if self._by_gram:
            return torch.cat([self._of_gram(piece) for piece in self._pieces()])
        if len(self.given) * weight.numel() > HELD:
            return torch.cat([self._of_formed(piece) for piece in self._pieces()])
        self.held = self.given.new_empty(len(self.given), weight.numel())
        for piece in self._pieces():
            self.held[piece] = self._formed(piece)
        return norm_bounds(self.held)

    def _pieces(self) -> Iterator[slice]:
        """Return slices of a few examples that are computed together."""
        largest = max(
            self.layer.weight[0].numel() * self.layer.groups * self.outgoing.shape[3],
            self.layer.weight.numel(),
            self.outgoing.shape[3] ** 2 * self.layer.groups if self._by_gram else 0,
        )
        size = max(1, AT_ONCE // largest)
        return (slice(at, at + size) for at in range(0, len(self.given), size))

    def _of_gram(self, piece: slice) -> Tensor:
        outgoing = self.outgoing[piece].flatten(0, 1)
        norms = gram_norms(self._patches(piece).mT.contiguous(), outgoing.mT.contiguous())
        return norms.square_().reshape(-1, self.layer.groups).sum(1).sqrt_()

    def _of_formed(self, piece: slice) -> Tensor:
        """Return the norms of gradients that `total` will form again."""
        a = norm_bounds(self._patches(piece).mT)
        e = norm_bounds(self.outgoing[piece].flatten(0, 1).mT)
        return norm_bounds(self._formed(piece)) + slack(a, e, self.given).reshape(
            -1, self.layer.groups
        ).sum(1)

    def _formed(self, piece: slice) -> Tensor:
        """Return the gradients of some examples, shape (examples, elements of the weight)."""
        outgoing = self.outgoing[piece]
        each = torch.bmm(outgoing.flatten(0, 1), self._patches(piece).mT)
        return each.reshape(len(outgoing), -1)

    def _patches(self, piece: slice) -> Tensor:
        """Return the input below each position, shape (examples · groups, m, positions)."""
        given = self.given[piece]
        stride = given.stride()
        dims = len(self.layer.kernel_size)
        view = given.as_strided(
            (*given.shape[:2], *self.layer.kernel_size, *self.layer.positions(given)),
            (
                *stride[:2],
                *(stride[2 + dim] * self.layer.dilation[dim] for dim in range(dims)),
                *(stride[2 + dim] * self.layer.stride[dim] for dim in range(dims)),
            ),
            given.storage_offset(),
        )
        return view.reshape(len(given) * self.layer.groups, -1, self.outgoing.shape[3])

    def total(self, factors: Tensor) -> Tensor:
        weight = self.layer.weight
        if self.held is not None:
            return (factors @ self.held).view(weight.shape)
        total = torch.zeros_like(weight)
        for piece in self._pieces():
            total.view(-1).add_(factors[piece] @ self._formed(piece))
        return total

    def with_more(self, other: ParameterContribution) -> ParameterContribution:
        raise _shared()


class _Convolution:
    """Settings of a convolution, as numbers for every dimension."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.groups: int = module.groups
        self.kernel_size: tuple[int, ...] = module.kernel_size
        self.dilation: tuple[int, ...] = module.dilation
        self.stride: tuple[int, ...] = module.stride

    def positions(self, padded: Tensor) -> list[int]:
        """Return the sizes of the output."""
        each = zip(padded.shape[2:], self.kernel_size, self.dilation, self.stride, strict=True)
        return [
            (size - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, dilation, stride in each
        ]


def _positions(outgoing: Tensor) -> int:
    return math.prod(outgoing.shape[2:])


def _shared() -> CannotClipError:
    return CannotClipError("a parameter is used in more than one place")


Found = list[tuple[Tensor, ParameterContribution]]
LayerRule = Callable[[Any, Tensor, Tensor], Found]
"""rule(layer, input, gradient of the output): returns the contribution to each parameter."""


def _linear(module: nn.Linear, given: Tensor, outgoing: Tensor) -> Found:
    given = given.reshape(len(given), -1, given.shape[-1])
    outgoing = outgoing.reshape(len(outgoing), -1, outgoing.shape[-1])
    found: Found = [(module.weight, LinearContribution(given, outgoing))]
    if module.bias is not None:
        # With a single position no sum is needed.
        added = outgoing[:, 0] if outgoing.shape[1] == 1 else outgoing.sum(1)
        found.append((module.bias, StoredContribution(added)))
    return found


def _convolution(module: Any, given: Tensor, outgoing: Tensor) -> Found:
    if given.ndim != 2 + len(module.kernel_size):
        raise CannotClipError("a convolution is called with one example without a batch")
    found: Found = []
    if module.weight.requires_grad:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(given, module._reversed_padding_repeated_twice, mode=mode)
        found.append(
            (
                module.weight,
                ConvolutionContribution(_Convolution(module), padded.contiguous(), outgoing),
            )
        )
    if module.bias is not None:
        found.append((module.bias, StoredContribution(outgoing.flatten(2).sum(2))))
    return found


def _embedding(module: nn.Embedding, given: Tensor, outgoing: Tensor) -> Found:
    indices = given.reshape(len(given), -1).long()
    outgoing = outgoing.reshape(*indices.shape, -1)
    part = EmbeddingContribution(indices, outgoing, module.num_embeddings, module.padding_idx)
    return [(module.weight, part)]


def _layer_norm(module: nn.LayerNorm, given: Tensor, outgoing: Tensor) -> Found:
    shape = module.normalized_shape
    if given.ndim <= len(shape):
        raise CannotClipError("a layer norm is called with one example without a batch")
    normalised = F.layer_norm(given, shape, eps=module.eps)
    return _affine(module, normalised, outgoing, lambda each: _last(each, len(shape)))


def _rms_norm(module: nn.RMSNorm, given: Tensor, outgoing: Tensor) -> Found:
    shape = module.normalized_shape
    if given.ndim <= len(shape):
        raise CannotClipError("a norm is called with one example without a batch")
    normalised = F.rms_norm(given, shape, eps=module.eps)
    return _affine(module, normalised, outgoing, lambda each: _last(each, len(shape)))


def _group_norm(module: nn.GroupNorm, given: Tensor, outgoing: Tensor) -> Found:
    normalised = F.group_norm(given, module.num_groups, eps=module.eps)
    return _affine(module, normalised, outgoing, _channels)


def _instance_norm(module: Any, given: Tensor, outgoing: Tensor) -> Found:
    normalised = F.instance_norm(given, eps=module.eps)
    return _affine(module, normalised, outgoing, _channels)


def _affine(
    module: Any, normalised: Tensor, outgoing: Tensor, added: Callable[[Tensor], Tensor]
) -> Found:
    """Return the contributions to weight and bias.

    added: sums over positions; returns shape (b, *weight.shape).
    """
    found: Found = [(module.weight, StoredContribution(added(outgoing * normalised)))]
    if getattr(module, "bias", None) is not None:
        found.append((module.bias, StoredContribution(added(outgoing))))
    return found


def _last(each: Tensor, dims: int) -> Tensor:
    """Return the sums over all dimensions except the first and the last `dims`."""
    between = each.ndim - 1 - dims
    return each.flatten(1, between).sum(1) if between else each


def _channels(each: Tensor) -> Tensor:
    """Return the sums over all dimensions except the first two."""
    return each.reshape(*each.shape[:2], -1).sum(2)


RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.InstanceNorm3d: _instance_norm,
}
"""Rules of the supported layers, by exact class: a subclass may compute anything."""

NAMES: Sequence[str] = ("weight", "bias")
"""Names of the parameters of all supported layers."""

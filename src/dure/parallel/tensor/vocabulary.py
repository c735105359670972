"""Layers as long as the vocabulary, divided over ranks: embedding, output layer, cross-entropy.

Rank r holds the rows of a slice of the vocabulary; the first V mod N slices have an additional row.
A rank's embedding of a symbol in another rank's slice is 0, and the sum over the ranks is the
embedding: an all-reduce of b·s·h elements forward, nothing backward. The output layer is a
column-parallel layer, whose weight may be the embedding's weight: both are divided equally, and
stay shared.

The loss needs no scores of other ranks. With z the scores of a position and t its target,

    L = log Σ_v exp(z_v - m) - (z_t - m),   m = max_v z_v

needs three numbers of each position from every rank: its maximum, its sum of exponentials, and its
score of the target, which is 0 if another rank holds the target. An all-reduce of n elements and an
all-reduce of 2n, for n positions, replace n·V; backward sends nothing: ∂L/∂z_v = softmax(z)_v -
[v = t].

Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dure.collectives.arguments import lengths_of
from dure.collectives.group import Group
from dure.parallel.tensor.buffers import shared_buffer
from dure.parallel.tensor.divided import DividedLayer, embedding_of
from dure.parallel.tensor.division import Division
from dure.parallel.tensor.functions import (
    check_is_sequence,
    leave,
    leave_sequence,
    of_shard,
    reduced_in_place,
)
from dure.parallel.tensor.layers import ColumnParallel

if TYPE_CHECKING:
    from typing_extensions import Self


class VocabularyEmbedding(DividedLayer):
    """nn.Embedding with divided rows; its output is the whole embedding, on every rank.

    Args:
        weight: (symbols, width), undivided, equal on all ranks.
        process_group: as in `ColumnParallel`.
        padding_idx: as in nn.Embedding.
        sequence: the dimension of the output along which each rank gets a shard; None returns the
            whole output.
        name: name of the layer in error messages.
    """

    def __init__(
        self,
        weight: Tensor,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        padding_idx: int | None = None,
        sequence: int | None = None,
        name: str = "the embedding",
    ) -> None:
        super().__init__(process_group)
        self.called = name
        self.num_embeddings, self.embedding_dim = weight.shape
        division = Division(0, (self.num_embeddings,))
        self.divide("weight", weight, division)
        lengths = division.lengths(self.group.size)
        self.start = sum(lengths[: self.group.rank])
        self.rows = lengths[self.group.rank]
        self.padding_idx = padding_idx
        self.sequence = sequence

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Module,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        sequence: int | None = None,
        name: str = "the embedding",
    ) -> Self:
        """Return the divided form of an nn.Embedding that is equal on all ranks.

        Raises ValueError if the embedding cannot be divided.
        """
        plain = embedding_of(name, embedding)
        return cls(
            plain.weight,
            process_group,
            padding_idx=plain.padding_idx,
            sequence=sequence,
            name=name,
        )

    def output_shape(self, given: Sequence[int]) -> list[int]:
        shape = [*given, self.embedding_dim]
        check_is_sequence(self.called, len(shape), self.sequence)
        return shape if self.sequence is None else of_shard(shape, self.sequence, self.group)

    def forward(self, indices: Tensor) -> Tensor:
        """Return (…, width), or a shard, for indices of any shape into the whole vocabulary.

        Raises IndexError for an index outside of the vocabulary.
        """
        check_is_sequence(self.called, indices.dim() + 1, self.sequence)
        if self.group.size == 1:
            return F.embedding(indices, self.weight, self.padding_idx)  # type: ignore[arg-type]
        here = (indices >= self.start) & (indices < self.start + self.rows)
        known = (indices >= 0) & (indices < self.num_embeddings)
        # Otherwise every rank would treat the index as another rank's, and the sum would be 0.
        if not bool(known.all()):
            raise IndexError(f"an index is outside the vocabulary of {self.num_embeddings}")
        # The padding's row is used, but has no gradient.
        learns = here if self.padding_idx is None else here & (indices != self.padding_idx)
        # Symbols of other ranks look up any row here, which is then set to 0: a single gather.
        own = self._rows((indices - self.start).clamp(0, max(0, self.rows - 1)), here, learns)
        if self.sequence is not None:
            return leave_sequence(own, self.group, self.sequence)
        return leave(own, self.group)

    def _rows(self, local: Tensor, here: Tensor, learns: Tensor) -> Tensor:
        weight: Tensor = self.weight  # type: ignore[assignment]
        if not self.rows:
            # Without rows (fewer symbols than ranks) return zeros that are part of the graph.
            return weight.sum() + weight.new_zeros(*local.shape, self.embedding_dim)
        found = F.embedding(local, weight)
        # The same value without a gradient, like the padding of nn.Embedding.
        if learns is not here:
            found = torch.where(learns[..., None], found, found.detach())
        return found.masked_fill(~here[..., None], 0)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, degree={self.group.size}"


class VocabularyOutput(ColumnParallel):
    """Layer from hidden states to scores: `ColumnParallel`, divided like the embedding."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, even=False, **options)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, targets: Tensor, group: Group, start: int, ignore_index: int
    ) -> Tensor:
        """Return the loss of each position, 0 if ignored, for scores (n, this rank's symbols)."""
        positions, symbols = scores.shape
        maximum = shared_buffer((positions,), scores, group)
        # amax refuses an empty dimension; -inf loses against every rank that has symbols
        if symbols:
            torch.amax(scores, 1, out=maximum)
        else:
            maximum.fill_(-torch.inf)
        if group.size > 1:
            reduced_in_place(maximum, group, "max")
        # Both sums travel in a single message.
        numbers = shared_buffer((2, positions), scores, group)
        # After subtracting the maximum no exponential overflows, and their sum is at least 1.
        shares = (scores - maximum[:, None]).exp_()
        torch.sum(shares, 1, out=numbers[0])
        # The target's score comes from the rank that holds the target; other ranks add 0.
        here = (targets >= start) & (targets < start + symbols)
        local = (targets - start).clamp(0, max(0, symbols - 1))[:, None]
        if symbols:
            numbers[1].copy_(scores.gather(1, local)[:, 0] - maximum).masked_fill_(~here, 0)
        else:
            numbers[1].zero_()
        if group.size > 1:
            reduced_in_place(numbers, group)
        ignored = targets == ignore_index
        # this rank's symbols of the softmax over the whole vocabulary, which backward needs
        shares.div_(numbers[0][:, None])
        ctx.save_for_backward(shares, local, here, ignored)
        return (numbers[0].log() - numbers[1]).masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        shares, local, here, ignored = ctx.saved_tensors
        gradient = gradient.masked_fill(ignored, 0)[:, None]
        of_scores = shares * gradient
        if shares.shape[1]:
            # -[v = t], on the rank that holds the target
            of_scores.scatter_add_(1, local, -(gradient * here[:, None]))
        return of_scores, None, None, None, None


def vocabulary_parallel_cross_entropy(
    scores_part: Tensor,
    targets: Tensor,
    process_group: Group | dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    *,
    vocabulary: int | None = None,
) -> Tensor:
    """Return `F.cross_entropy` of scores divided by symbols, with its gradient, on all ranks.

    Args:
        scores_part: this rank's scores, with the symbols in dimension 1, or in 0 if it is the only
            dimension.
        targets: indices into the whole vocabulary, equal on all ranks.
        process_group: the ranks that divide the vocabulary; None is all ranks.
        ignore_index: target of positions without a loss.
        reduction: as in `F.cross_entropy`.
        vocabulary: the number of symbols; None asks all ranks, in a short message.

    Raises:
        ValueError: the reduction is unknown, or shapes or the number of symbols do not fit.
        IndexError: a target is outside of the vocabulary.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"there is no reduction {reduction!r}; choose mean, sum or none")
    # a single position without a batch dimension, which F.cross_entropy accepts
    single = scores_part.dim() == 1
    if single:
        scores_part = scores_part[None]
    symbols = scores_part.shape[1]
    shape = scores_part.shape[:1] + scores_part.shape[2:]
    flat_targets = targets.reshape(-1)
    if targets.numel() != shape.numel() or (not single and targets.shape != shape):
        raise ValueError(
            f"targets of shape {list(targets.shape)} do not fit scores for {list(shape)} positions"
        )
    group = Group.of(process_group)
    start, total = _slice_of_vocabulary(group, symbols, vocabulary)
    outside = (flat_targets != ignore_index) & ((flat_targets < 0) | (flat_targets >= total))
    if bool(outside.any()):
        raise IndexError(
            f"target {int(flat_targets[outside][0])} is outside the vocabulary of {total}"
        )
    flat = scores_part.movedim(1, -1).reshape(shape.numel(), symbols)
    losses: Tensor = _CrossEntropy.apply(flat, flat_targets, group, start, ignore_index)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses[0] if single else losses.view(shape)
    total_loss = losses.sum()
    # F.cross_entropy too takes the mean over the targets that are not ignored
    return total_loss if reduction == "sum" else total_loss / (flat_targets != ignore_index).sum()


def _slice_of_vocabulary(group: Group, symbols: int, vocabulary: int | None) -> tuple[int, int]:
    """Return the index of this rank's first symbol, and the number of all symbols."""
    if vocabulary is None:
        rows = group.all_gather_values([float(symbols)], "the vocabulary's parts")
        lengths = [int(row[0]) for row in rows]
        return sum(lengths[: group.rank]), sum(lengths)
    lengths = lengths_of(vocabulary, group.size)
    if lengths[group.rank] != symbols:
        raise ValueError(
            f"rank {group.rank} of {group.size} holds {lengths[group.rank]} of {vocabulary} "
            f"symbols, not {symbols}"
        )
    return sum(lengths[: group.rank]), vocabulary

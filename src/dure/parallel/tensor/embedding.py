"""Embedding divided by columns: every rank stores its columns of each row.

    Y_r = E_r[i]      E = [E_1, …, E_N], i the same on all ranks

Its outputs are divided like the outputs of a column-parallel layer: a table of relative positions
with a column per head, as in T5, gives every rank the biases of its own heads. Nothing travels,
forward or backward, unless the outputs are gathered: (N-1)/N·n numbers forward.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (T5; a bias for each head and each distance).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dure.collectives.group import Group
from dure.parallel.tensor.divided import DividedLayer, embedding_of
from dure.parallel.tensor.division import Division, check_even
from dure.parallel.tensor.functions import gather_features

if TYPE_CHECKING:
    from typing_extensions import Self


class ColumnEmbedding(DividedLayer):
    """nn.Embedding with divided columns.

    Args:
        weight: (symbols, width), undivided, equal on all ranks.
        process_group: as in `ColumnParallel`.
        blocks: as in `ColumnParallel`, of columns.
        unit: as in `ColumnParallel`.
        gather_output: whether an all-gather gives all columns to every rank.
        padding_idx: as in nn.Embedding.
        name: name of the layer in error messages.
    """

    def __init__(
        self,
        weight: Tensor,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        blocks: Sequence[int] | None = None,
        unit: int = 1,
        gather_output: bool = False,
        padding_idx: int | None = None,
        name: str = "the embedding",
    ) -> None:
        super().__init__(process_group)
        self.num_embeddings, self.embedding_dim = weight.shape
        division = Division(1, tuple(blocks or (self.embedding_dim,)))
        what = f"{name} with {self.embedding_dim} columns"
        check_even(what, division.blocks, self.group.size, unit)
        self.divide("weight", weight, division)
        self.padding_idx = padding_idx
        self.gather_output = gather_output
        self._outputs = Division(-1, division.blocks)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Module,
        process_group: Group | dist.ProcessGroup | None = None,
        *,
        blocks: Sequence[int] | None = None,
        unit: int = 1,
        gather_output: bool = False,
        name: str = "the embedding",
    ) -> Self:
        """Return the divided form of an nn.Embedding that is equal on all ranks.

        The options are those of the class. Raises ValueError if the embedding cannot be divided.
        """
        plain = embedding_of(name, embedding)
        return cls(
            plain.weight,
            process_group,
            blocks=blocks,
            unit=unit,
            gather_output=gather_output,
            padding_idx=plain.padding_idx,
            name=name,
        )

    def output_shape(self, given: Sequence[int]) -> list[int]:
        weight: Tensor = self.weight  # type: ignore[assignment]
        return [*given, self.embedding_dim if self.gather_output else weight.shape[1]]

    def forward(self, indices: Tensor) -> Tensor:
        """Return (…, this rank's columns, or all columns) for indices of any shape."""
        own = F.embedding(indices, self.weight, self.padding_idx)  # type: ignore[arg-type]
        return gather_features(own, self.group, self._outputs) if self.gather_output else own

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, degree={self.group.size}"

"""Evaluation of a cut model with the values at the cut compressed as in training.

A model that was trained with compressed values is used with compressed values, and so it is
measured. With top-k this matters: the tail has never seen the uncompressed output of the head
(Rudakov et al. 2023, "Activations and Gradients Compression for Model-Parallel Training").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from dure.collectives.compression import Compression
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.trace import leaves_of
from dure.split.compressed import coder, cuts_of


class CompressedCutModel(nn.Module):
    """Module with the interface of the model, for evaluation.

    Raises ValueError for a model that cannot be cut there.
    """

    def __init__(self, cut: CutModel, compression: Compression) -> None:
        super().__init__()
        self.model = cut.model
        self.cut = cut
        # The stream is unused: in evaluation no operation draws random numbers.
        self._stream = RandomStream(0, carried=False)
        self._coders = [
            [coder(compression, value) for value in values]
            for values in cuts_of(cut, training=False)
        ]

    def forward(self, inputs: Any) -> Any:
        leaves = leaves_of(inputs)
        examples = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        values: list[Tensor] = []
        for stage in range(self.cut.stages):
            if stage > 0:
                values = self.crossing(stage - 1, values, examples)
            program = self.cut.program(stage, examples, False, self._stream, None)
            values = list(program.module(*values, *(leaves[index] for index in program.inputs)))
        return tree_unflatten(values, self.cut.structure(examples, False))

    def crossing(self, boundary: int, values: Sequence[Tensor], examples: int) -> list[Tensor]:
        """Return the values that arrive after a cut, compressed and decompressed."""
        return [
            value if one is None else one.read(one.write(value), examples)
            for one, value in zip(self._coders[boundary], values, strict=True)
        ]

"""Stages of a cut model in evaluation: values in, values out, nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from dure.collectives.compression import Compression
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.draws import Stream
from dure.parallel.pipeline.stage import Microbatch, Stage
from dure.split.across import AcrossTheCut
from dure.tasks.loss_shares import NOTHING, Computed


class Forward:
    """Those of a party. compression: of what crosses the cuts, as in training."""

    def __init__(self, cut: CutModel, compression: Compression) -> None:
        self._cut = cut
        across = AcrossTheCut(cut, compression) if compression.compresses else None
        self._across = across
        self._outputs: Any = None

    @torch.no_grad()
    def __call__(
        self, stage: int, examples: int, received: Sequence[Tensor], inputs: Any = None
    ) -> list[Tensor]:
        """What leaves a stage; of the last one the leaves of what the model gives.

        inputs: the model's, where the stage reads them.
        """
        batch = Microbatch(examples, NOTHING, lambda: (inputs, None))
        computing = self._stage(stage)
        computing.begin(0)
        found = computing.forward(0, batch, received)
        return tree_leaves(self._outputs) if stage == self._cut.stages - 1 else found

    def crossing(self, boundary: int, values: Sequence[Tensor], examples: int) -> Sequence[Tensor]:
        """What arrives of values that cross a cut."""
        if self._across is None:
            return values
        return self._across.crossing(boundary, values, examples)

    def outputs(self, leaves: Sequence[Tensor], examples: int) -> Any:
        """What the model gives, of its leaves."""
        return tree_unflatten(list(leaves), self._cut.structure(examples, False))

    def _stage(self, number: int) -> Stage:
        return Stage(
            number,
            last=number == self._cut.stages - 1,
            program_for=lambda examples: self._cut.program(
                number, examples, training=False, stream=Stream(0, carried=False), later=None
            ),
            structure_for=lambda examples: self._cut.structure(examples, False),
            loss=self._keep,
            stream=Stream(0, carried=False),
            remaining=None,
            trains=False,
        )

    def _keep(self, outputs: Any, targets: Any, examples: int, share: Any) -> Computed:
        self._outputs = outputs
        return Computed(torch.zeros(()), 0.0)

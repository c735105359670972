"""Examples that a rank of a mesh computes in a step, read as micro-batches.

    a batch is split over the data groups, and in each into at most `most` micro-batches

The first stage uses the inputs of a micro-batch and the last stage its targets; both read the
micro-batch, with the same random numbers if the examples draw (augmentation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dure.data.examples import Examples
from dure.machine.devices import to_device
from dure.parallel.mesh.mesh import Coordinates, Mesh
from dure.parallel.pipeline.stage import Microbatch
from dure.randomness.seeds import generators_state, restore_generators, seed_generators
from dure.tasks.loss_shares import NOTHING, CountedLoss


@dataclass
class MicrobatchReader:
    """Reader of a rank's micro-batches of a step.

    Args:
        examples: the training examples.
        losses: the loss, which determines a micro-batch's share of its batch.
        seed: seed of the run.
        mesh: the degrees.
        at: position of this rank on the mesh.
        device: device of the micro-batches.
        most: number of micro-batches of a batch that is large enough.
        begins: whether this rank has the first stage.
        alike: whether all ranks of a data group need as many micro-batches as the first rank.
    """

    examples: Examples
    losses: CountedLoss
    seed: int
    mesh: Mesh
    at: Coordinates
    device: torch.device
    most: int
    begins: bool
    alike: bool

    def microbatches(self, indices: Tensor, step: int) -> list[Microbatch]:
        """Return this rank's micro-batches of the joint batch `indices`; none if it is small."""
        parts = indices.tensor_split(self.mesh.data)
        part = parts[self.at.data]
        pieces = part.tensor_split(min(self.most, len(part))) if len(part) else []
        made = [self._one(piece, number, indices, step) for number, piece in enumerate(pieces)]
        if self.alike:
            # `tensor_split` gives the first ranks the most examples, so rank 0's number of
            # micro-batches is the largest. Missing micro-batches are filled with a zero share.
            for number in range(len(made), min(self.most, len(parts[0]))):
                # Any example will do.
                made.append(replace(self._one(indices[:1], number, indices, step), share=NOTHING))
        return made

    def _one(self, piece: Tensor, number: int, batch: Tensor, step: int) -> Microbatch:
        def read() -> tuple[Any, Any]:
            content: tuple[Any, Any] = to_device(self.examples.batch(piece), self.device)
            return content

        # A single micro-batch is read like the batch of a single worker, and the model continues to
        # draw after the reads. In all other cases the generators are restored after reading.
        if not self.examples.draws or (self.most == 1 and self.begins):
            return Microbatch(len(piece), self.losses.share(piece, batch), read)
        return Microbatch(
            len(piece), self.losses.share(piece, batch), lambda: self._seeded(read, number, step)
        )

    def _seeded(
        self, read: Callable[[], tuple[Any, Any]], number: int, step: int
    ) -> tuple[Any, Any]:
        """Return the result of `read` with a seed that is equal in the first and last stage."""
        before = generators_state()
        # the seed of a single worker's step
        if self.most == 1:
            seed_generators(self.seed, "step", step, self.at.data, everything=True)
        else:
            position = (step, self.at.data, number)
            seed_generators(self.seed, "read", *position, everything=True)
        content = read()
        restore_generators(before)
        return content

"""Parts of a traced and cut model, over a network: forms of the values, and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from dure.collectives.compression import Compression
from dure.parallel.pipeline.cut import CutModel
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.stage import Microbatch, Stage
from dure.split.batching import values_at
from dure.split.blame import InvalidMessageError
from dure.split.compressed import CompressedCutModel
from dure.split.network.checks import ServerPartInterface
from dure.split.network.control import Query, QueryAnswer
from dure.split.network.site import ClientPartInterface
from dure.split.tensor_forms import check_forms, form_of
from dure.tasks.loss_shares import NOTHING, ComputedLoss


class CutServerPart(ServerPartInterface):
    """The server's stage."""

    def __init__(self, cut: CutModel, compression: Compression) -> None:
        self._cut = cut
        self._forward = Forward(cut, compression)

    def arrived(self, values: Sequence[Tensor], examples: int, training: bool) -> list[Tensor]:
        wanted = values_at(self._cut, 0, examples, training)
        check_forms("values at the cut", values, [form_of(one) for one in wanted])
        return [one.laid_out(value) for one, value in zip(wanted, values, strict=True)]

    def check_returned(self, gradients: Sequence[Tensor], examples: int) -> None:
        wanted = [form_of(one) for one in values_at(self._cut, 1, examples) if one.differentiable]
        check_forms("gradients at the second cut", gradients, wanted)

    def answer(self, values: Sequence[Tensor], query: Query) -> QueryAnswer:
        examples = query.examples
        found = self._forward(1, examples, values)
        if self._cut.stages == 3:
            found = self._forward.crossing(1, found, examples)
        if not all(isinstance(one, Tensor) for one in found):
            raise InvalidMessageError("the model returns more than tensors, which cannot be sent")
        return QueryAnswer(tuple(found))


def check_arriving(cut: CutModel, values: Sequence[Tensor], examples: int) -> None:
    """Raise ValueError for values that do not match the second cut."""
    wanted = [form_of(one) for one in values_at(cut, 1, examples)]
    check_forms("values at the second cut", values, wanted)


class CutClientPart(ClientPartInterface):
    """The client's stages. end: number of the end's stage; None if the server has the end."""

    def __init__(self, cut: CutModel, compression: Compression, end: int | None) -> None:
        self._cut = cut
        self._forward = Forward(cut, compression)
        self._end = end

    def query(self, inputs: Any, targets: Any, examples: int, of: int) -> Query:
        values = self._forward.crossing(0, self._forward(0, examples, [], inputs), examples)
        return Query(examples, tuple(values), of=of)

    def outputs(self, answer: QueryAnswer, inputs: Any, examples: int) -> Any:
        leaves: Sequence[Tensor] = answer.values
        if self._end is not None:
            leaves = self._forward(self._end, examples, leaves, inputs)
        return tree_unflatten(list(leaves), self._cut.structure(examples, False))


class Forward:
    """Forward pass of single stages in evaluation; nothing is saved for backward.

    compression: of the values at the cuts, as in training.
    """

    def __init__(self, cut: CutModel, compression: Compression) -> None:
        self._cut = cut
        self._across = CompressedCutModel(cut, compression) if compression.compresses else None
        self._outputs: Any = None

    @torch.no_grad()
    def __call__(
        self, stage: int, examples: int, received: Sequence[Tensor], inputs: Any = None
    ) -> Sequence[Tensor]:
        """Return the output of a stage; of the last stage, the leaves of the model's output.

        inputs: the model's inputs, for a stage that reads them.
        """
        batch = Microbatch(examples, NOTHING, lambda: (inputs, None))
        computing = self._stage(stage)
        computing.begin(0)
        found = computing.forward(0, batch, received)
        return tree_leaves(self._outputs) if stage == self._cut.stages - 1 else found

    def crossing(self, boundary: int, values: Sequence[Tensor], examples: int) -> Sequence[Tensor]:
        """Return the values that arrive after a cut, compressed and decompressed as in training."""
        if self._across is None:
            return values
        return self._across.crossing(boundary, values, examples)

    def _stage(self, number: int) -> Stage:
        return Stage(
            number,
            last=number == self._cut.stages - 1,
            program_for=lambda examples: self._cut.program(
                number,
                examples,
                training=False,
                stream=RandomStream(0, carried=False),
                gradient_handler=None,
            ),
            structure_for=lambda examples: self._cut.structure(examples, False),
            loss=self._keep,
            stream=RandomStream(0, carried=False),
            remaining=None,
            trains=False,
        )

    def _keep(self, outputs: Any, targets: Any, examples: int, share: Any) -> ComputedLoss:
        self._outputs = outputs
        return ComputedLoss(torch.zeros(()), 0.0)

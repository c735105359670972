"""Model in a single stage, which needs no trace: for divided layers and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dure.parallel.pipeline.balance import Balance
from dure.parallel.pipeline.cut import StageSize
from dure.parallel.pipeline.program import StageProgram
from dure.parallel.pipeline.rng import RandomStream
from dure.parallel.pipeline.split_backward import GradientHandler


class SingleStageModel:
    """Model in a single stage, computed without a trace, with the interface of a `CutModel`."""

    draws = False

    def __init__(
        self,
        model: nn.Module,
        sample: Callable[[int], Any],
        stages: int,
        examples: int,
        test: Callable[[int], Any] | None = None,
    ) -> None:
        self.model = model
        self.stages = stages
        self.examples = examples
        names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        self.holders: dict[str, list[int]] = {name: [0] for name in names}
        self.learned = frozenset(name for name, _ in model.named_parameters())
        # flattened like in a trace, so that stages treat both kinds of models equally
        inputs = tree_flatten(((sample(1),), {}))[1]
        self._flat = _Flat(model, inputs)
        # all buffers, because without a trace changed buffers are unknown: see
        # `RankState.buffer_sync`
        written = tuple(name for name, _ in model.named_buffers())
        self._program = StageProgram(
            module=self._flat,
            inputs=tuple(range(inputs.num_leaves)),
            received=(),
            leaving=(),
            written=written,
        )

    def choose(self, names: Sequence[str] | None, balance: Balance) -> list[int]:
        """Return no starts. Raises ValueError if `names` has modules of further stages."""
        if names:
            raise ValueError(f"a model in one stage has no cut, but cut names {', '.join(names)}")
        return []

    def decide(self, starts: Sequence[int]) -> None:
        """Do nothing: a single stage needs no cut."""

    def program(
        self,
        stage: int,
        examples: int,
        training: bool,
        stream: RandomStream,
        gradient_handler: GradientHandler | None,
    ) -> StageProgram:
        """Return the model itself as a program."""
        return self._program

    def structure(self, examples: int, training: bool) -> TreeSpec:
        """Return the structure of the latest outputs."""
        return self._flat.outputs

    def message_bytes(self, boundary: int, examples: int, training: bool = True) -> tuple[int, int]:
        """Raise ValueError: a single stage has no boundary."""
        raise ValueError(f"a model in one stage has no boundary {boundary}")

    def sizes(self) -> list[StageSize]:
        """Return the size of the only stage."""
        elements = sum(parameter.numel() for parameter in self.model.parameters())
        return [StageSize("", operations=1, parameters=elements, share=1.0, message=0)]


class _Flat(nn.Module):
    """Model that takes and returns leaves."""

    outputs: TreeSpec

    def __init__(self, model: nn.Module, inputs: TreeSpec) -> None:
        super().__init__()
        self.model = model
        self._inputs = inputs

    def forward(self, *leaves: Any) -> tuple[Any, ...]:
        # restore the structure of the model's inputs
        (inputs,), _ = tree_unflatten(list(leaves), self._inputs)
        # recorded in each pass for `structure`
        outputs, self.outputs = tree_flatten(self.model(inputs))
        return tuple(outputs)

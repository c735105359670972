"""Random numbers of a model that is cut: the same for every cut, schedule and number of stages.

One micro-batch (the naive schedule): the bits of the undivided model. It draws from one generator,
operation after operation, so the generator's state travels with the values from stage to stage
(5,056 bytes on the CPU).

Several micro-batches: stages draw at the same time, so no one generator can serve them in the order
of one model. Here each operation that draws, number k in the model, draws from a seed of its own:

    derive(seed, "micro-batch", step, m, k)

so that the bits depend on m and k alone, and recomputation finds them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dure.randomness.seeds import derive

STATE_BYTES = torch.default_generator.get_state().numel()


class Stream:
    """From where the operations of this rank's stages draw.

    carried: whether one generator serves the whole model, its state going with the values.
    own: gives the rank's number among its tensor neighbours where each draws for itself, inside a
    divided layer or on a shard of a sequence, and None elsewhere; it is told whether an operation
    is on a shard.
    """

    def __init__(
        self, seed: int, carried: bool, own: Callable[[bool], int | None] = lambda on_shards: None
    ) -> None:
        self.seed = seed
        self.carried = carried
        self._own = own
        self._position = (0, 0)

    def at(self, step: int, microbatch: int) -> None:
        """The operations that follow belong to this micro-batch."""
        self._position = step, microbatch

    def drawing(
        self, operation: Callable[..., Any], number: int, on_shards: bool = False
    ) -> Callable[..., Any]:
        """The operation, drawing from where it has to. on_shards: each rank for itself."""
        # It draws from the one generator, whose state has come with the values.
        if self.carried:
            return operation

        def drawn(*args: Any, **kwargs: Any) -> Any:
            own = self._own(on_shards)
            # a number more in the seed where tensor neighbours must differ
            position = (*self._position, number) if own is None else (*self._position, number, own)
            seed = derive(self.seed, "micro-batch", *position)
            torch.default_generator.manual_seed(seed)
            # A process that computes on the CPU leaves CUDA alone.
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.manual_seed(seed)
            return operation(*args, **kwargs)

        return drawn

    @staticmethod
    def state() -> Tensor:
        """The generator's state, as it travels: uint8 of shape (STATE_BYTES,)."""
        return torch.default_generator.get_state()

    @staticmethod
    def go_on_from(state: Tensor) -> None:
        """Draws on from a state that `state` has given."""
        torch.default_generator.set_state(state)

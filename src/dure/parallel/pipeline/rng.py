"""Random numbers of a model that is cut: equal for every cut, schedule and number of stages.

A single micro-batch (the naive schedule) draws the bits of the undivided model. That model draws
from one generator, operation after operation, so the generator's state travels with the values from
stage to stage (5,056 bytes on the CPU).

With several micro-batches, stages draw at the same time, so a single generator cannot serve them in
the order of the undivided model. Each operation that draws, number k in the model, then uses its
own seed:

    derive(seed, "micro-batch", step, m, k)

The bits depend on m and k alone, so recomputation reproduces them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dure.machine.devices import seed_devices
from dure.randomness.seeds import derive

STATE_BYTES = torch.default_generator.get_state().numel()


class RandomStream:
    """Source of random numbers for the operations of this rank's stages.

    carried: whether one generator serves the whole model and its state travels with the values.
    own: takes whether an operation is on a shard of a sequence. Returns the rank's index among its
    tensor neighbours if each neighbour draws different numbers (inside a divided layer or on a
    shard), otherwise None.
    """

    def __init__(
        self, seed: int, carried: bool, own: Callable[[bool], int | None] = lambda on_shards: None
    ) -> None:
        self.seed = seed
        self.carried = carried
        self._own = own
        self._position = (0, 0)

    def at(self, step: int, microbatch: int) -> None:
        """Set the step and micro-batch of the operations that follow."""
        self._position = step, microbatch

    def drawing(
        self, operation: Callable[..., Any], number: int, on_shards: bool = False
    ) -> Callable[..., Any]:
        """Return the operation with the right source of random numbers.

        number: the operation's number among the operations that draw. on_shards: whether each rank
        draws different numbers.
        """
        # The operation draws from the global generator, whose state arrived with the values.
        if self.carried:
            return operation

        def drawn(*args: Any, **kwargs: Any) -> Any:
            own = self._own(on_shards)
            # an additional number in the seed if tensor neighbours must draw different numbers
            position = (*self._position, number) if own is None else (*self._position, number, own)
            seed = derive(self.seed, "micro-batch", *position)
            torch.default_generator.manual_seed(seed)
            # A process that computes on the CPU leaves accelerators alone.
            seed_devices(seed)
            return operation(*args, **kwargs)

        return drawn

    @staticmethod
    def state() -> Tensor:
        """Return the generator's state as it travels: uint8 of shape (STATE_BYTES,)."""
        return torch.default_generator.get_state()

    @staticmethod
    def resume_from(state: Tensor) -> None:
        """Continue drawing from a state that `state` returned."""
        torch.default_generator.set_state(state)

"""Exponential moving average of the trained weights (`Task.ema`).

With the trained weights w_t after t steps, or rounds (`Learner.unit`), and the decay d:

    e_1 = w_1        e_t = d·e_(t-1) + (1 - d)·w_t

as in torch.optim.swa_utils.AveragedModel with `get_ema_multi_avg_fn`. The average e is evaluated,
written as the model and returned; w is trained. Checkpoints contain both, so that a resumed run
continues both. Buffers, such as batch-norm statistics, are those of the model.

No message is sent: every rank averages the tensors that it trains. The average takes as much memory
as these tensors.

Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging", with
exponential weights in place of uniform weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.contracts.learner import Learner, StepResult
from dure.record.disk_tensors import DiskTensors
from dure.record.meter import Meter

STATE = "ema"
"""Key of the average in a learner's state."""


def with_average(learner: Learner, decay: float | None, group: Group) -> Learner:
    """Return the learner, with an average of its weights if a decay is given."""
    return learner if decay is None else AveragedLearner(learner, decay, group)


class AveragedLearner(Learner):
    """Wrapper of a learner that evaluates and returns the average of the learner's weights.

    All other members are those of the wrapped learner (`Learner`).
    """

    def __init__(self, learner: Learner, decay: float, group: Group) -> None:
        self.learner = learner
        self.decay = decay
        self.group = group
        self.averaged_units = 0
        """Number of units (steps or rounds) in the average."""
        # Constants of the wrapped learner. `units_per_epoch` and `examples` may change in a run:
        # they are properties.
        self.where = learner.where
        self.rank_state_differs = learner.rank_state_differs
        self.proofs = learner.proofs
        self.elsewhere = learner.elsewhere
        self.resizes = learner.resizes
        self.by_parts = learner.by_parts
        self._trained = dict(learner.averaged_tensors())
        with torch.no_grad():
            self._average = {name: one.detach().clone() for name, one in self._trained.items()}

    @property
    def units_per_epoch(self) -> int:  # type: ignore[override]
        return self.learner.units_per_epoch

    @property
    def examples(self) -> int | None:  # type: ignore[override]
        return self.learner.examples

    def flops_per_step(self) -> float:
        return self.learner.flops_per_step()

    def advance(self, control_flags: int) -> StepResult:
        result = self.learner.advance(control_flags)
        if result.whole:
            started = time.perf_counter()
            self._update_average()
            ended = time.perf_counter()
            self.group.meter.compute("average", started, ended, self.averaged_units)
        return result

    @torch.no_grad()
    def _update_average(self) -> None:
        self.averaged_units += 1
        averages = list(self._average.values())
        trained = list(self._trained.values())
        if self.averaged_units == 1:
            torch._foreach_copy_(averages, trained)
        else:
            torch._foreach_lerp_(averages, trained, 1 - self.decay)

    @contextmanager
    def _average_swapped_in(self) -> Iterator[None]:
        """Context manager in which the learner's weights have the values of the average."""
        if self.averaged_units == 0:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the values of the trained weights and of the average, a tensor at a time."""
        with self.learner.changing_averaged_tensors():
            for name, trained in self._trained.items():
                kept = trained.detach().clone()
                trained.copy_(self._average[name])
                self._average[name].copy_(kept)

    def evaluate(self) -> dict[str, float]:
        with self._average_swapped_in():
            return self.learner.evaluate()

    def weights(self) -> Mapping[str, Tensor]:
        with self._average_swapped_in():
            # After the block the learner's memory has the trained weights again: copy.
            return _copy_of(self.learner.weights())

    def state(self) -> dict[str, Any]:
        """Return the learner's state, and the trained weights, which `weights` does not return."""
        own = {"taken": self.averaged_units, "trained": _copy_of(self.learner.weights())}
        return {**self.learner.state(), STATE: own}

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore the average from `weights`, and the trained weights from `state`."""
        own = state[STATE]
        with torch.no_grad():
            if self.learner.averaged_tensors_are_parts:
                # Only the learner knows which part of each tensor this rank stores. So the learner
                # restores the average first, as if it were trained, and the parts are copied.
                self.learner.restore(weights, state)
                for name, one in self._trained.items():
                    self._average[name].copy_(one)
            else:
                for name, average in self._average.items():
                    average.copy_(weights[name])
        self.learner.restore(own["trained"], state)
        self.averaged_units = own["taken"]

    def meters(self) -> Sequence[Meter]:
        return self.learner.meters()

    def part(self) -> Any:
        return self.learner.part()

    def exhausted(self) -> str | None:
        return self.learner.exhausted()

    def ended(self, reason: str) -> None:
        self.learner.ended(reason)

    def rest(self) -> None:
        self.learner.rest()

    def non_persistent_buffers(self) -> Mapping[str, Tensor]:
        return self.learner.non_persistent_buffers()

    def saved(self) -> None:
        self.learner.saved()

    def numbers(self) -> Mapping[str, float]:
        return self.learner.numbers()

    def facts(self) -> dict[str, Any] | None:
        return self.learner.facts()


def _copy_of(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return copies of weights that are in memory, where the learner will overwrite them.

    Weights in files (`DiskTensors`) are returned as they are: they are copies already.
    """
    if isinstance(weights, DiskTensors):
        return weights
    return {name: one.detach().clone() for name, one in weights.items()}

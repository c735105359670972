"""What a learner has elsewhere: optimizer state, parameters, gradients and activations.

A strategy's field `offload` says which (`dure.memory.offload`). Where nothing is offloaded, all of
this does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dure.contracts.strategy import Place
from dure.contracts.task import Task
from dure.memory.mapped import Disk, DiskError, mapped
from dure.memory.offload.activations import OffloadedActivations
from dure.memory.offload.gradients import OffloadedGradients
from dure.memory.offload.optimizer import OffloadedSteps
from dure.memory.offload.parameters import OffloadedParameters, settle
from dure.memory.offload.store import Files, store_for
from dure.memory.offload.wanted import Offload
from dure.parallel.divisible import check_steps_apart, is_element_wise

NOTHING = Offload()


def check_offload(
    wanted: Offload,
    folder: str | None,
    able: Collection[str],
    who: str,
    why: str = "",
    device: torch.device | None = None,
) -> None:
    """Raises ValueError for what a strategy does not offload, or where there is no disk for it.

    able: the parts that it offloads. who: the strategy, by name. why: the reason for the others.
    """
    if not wanted:
        if folder is not None:
            raise ValueError(
                f"nothing is offloaded, so that offload_folder {folder} stays empty: say what in "
                f"offload"
            )
        return
    wanted.check(able, who, why)
    if device is not None and device.type != "cpu":
        # A GPU computes with what lies on it; its state and activations go by way of copies.
        wanted.check([part for part in able if part in ("optimizer", "activations")], "a GPU")
        return
    try:
        Disk(folder)
    except DiskError as error:
        raise ValueError(f"offload: {error}") from error


def check_optimizer(wanted: Offload, task: Task, model: nn.Module) -> None:
    """Raises ValueError for an optimizer whose state cannot be offloaded, where it is to be."""
    if "optimizer" in wanted:
        check_steps_apart(task.optimizer(list(model.parameters())))


class Offloaded:
    """What one learner offloads; files and threads end with the run."""

    def __init__(
        self, wanted: Offload, folder: str | None, place: Place, device: torch.device
    ) -> None:
        self.wanted = wanted
        self.device = device
        self._steps: OffloadedSteps | None = None
        self._activations: OffloadedActivations | None = None
        self._store = store_for(device, folder) if wanted else None
        if self._store is not None:
            place.ending.callback(self._store.close)

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model, made where it is to lie; its passes are watched from now on."""
        with self.making():
            model = make()
        if isinstance(self._store, Files) and "parameters" in self.wanted:
            settle(model, self._store)
        self._watch(model)
        return model

    def making(self) -> AbstractContextManager[Any]:
        """Around what makes parameters: they are made where they are to lie."""
        if isinstance(self._store, Files) and "parameters" in self.wanted:
            return mapped(self._store.disk, self._store.least)
        return nullcontext()

    def _watch(self, model: nn.Module) -> None:
        """From now on passes of the model find what they need, and leave what they make, there."""
        if self._store is None:
            return
        if "activations" in self.wanted:
            self._activations = OffloadedActivations(model, self._store, self.device)
        if not isinstance(self._store, Files):
            return
        if "parameters" in self.wanted:
            OffloadedParameters(model, self._store)
        if "gradients" in self.wanted:
            OffloadedGradients(model.parameters(), self._store)

    def optimizer(self, optimizer: Any) -> Any:
        """The optimizer, stepping over state that lies elsewhere."""
        if self._store is not None and "optimizer" in self.wanted:
            assert isinstance(optimizer, Optimizer)
            self._steps = OffloadedSteps(optimizer, self._store, is_element_wise(optimizer))
        return optimizer

    def restored(self) -> None:
        """The optimizer has a state that was loaded."""
        if self._steps is not None:
            self._steps.keep_all()

    def saving(self, *given: Any) -> AbstractContextManager[Any]:
        """Around a forward pass of these inputs and targets."""
        return nullcontext() if self._activations is None else self._activations.saving(*given)

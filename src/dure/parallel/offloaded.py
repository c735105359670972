"""What a learner has elsewhere: optimizer state, parameters, gradients and activations.

A strategy's field `offload` says which (`dure.memory.offload`). Where nothing is offloaded, all of
this does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
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

NO_OFFLOAD = Offload()

ON_GPU = ("optimizer", "activations")
"""What a GPU can do without for a while; it computes only with what lies on it."""


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
        wanted.check([part for part in able if part in ON_GPU], "a GPU")
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
    """What one learner offloads; files and threads end with the run.

    divided: the learner divides the parameters, and puts its shares where they belong (`memory`).
    """

    def __init__(
        self,
        wanted: Offload,
        folder: str | None,
        place: Place,
        device: torch.device,
        divided: bool = False,
    ) -> None:
        if device.type != "cpu":
            wanted.check(ON_GPU, "a GPU")
        self.wanted = wanted
        self.device = device
        self.divided = divided
        self._steps: OffloadedSteps | None = None
        self.activations: OffloadedActivations | None = None
        self._store = store_for(device, folder) if wanted else None
        if self._store is not None:
            place.ending.callback(self._store.close)

    @property
    def _files(self) -> Files | None:
        """Where parameters lie; None where they stay in memory."""
        is_there = isinstance(self._store, Files) and "parameters" in self.wanted
        return cast(Files, self._store) if is_there else None

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model, made where it is to lie; its passes are watched from now on."""
        files = None if self.divided else self._files
        with nullcontext() if files is None else mapped(files.disk, files.least):
            model = make()
        if files is not None:
            settle(model, files)
            self.watch_parameters(model)
        if isinstance(self._store, Files) and "gradients" in self.wanted:
            OffloadedGradients(model.parameters(), self._store)
        self.keep_activations(lambda: (*model.parameters(), *model.buffers()))
        return model

    def watch_parameters(self, model: nn.Module) -> None:
        """From now on passes of the model read ahead the parameters that they need."""
        if self._files is not None:
            OffloadedParameters(model, self._files)

    def keep_activations(self, stay: Callable[[], Iterable[Tensor]]) -> None:
        """From now on `saving` keeps activations. stay: gives what is in memory in any case."""
        if self._store is not None and "activations" in self.wanted:
            self.activations = OffloadedActivations(self._store, self.device, stay)

    @property
    def memory(self) -> Callable[[int, torch.dtype], Tensor] | None:
        """What makes so many elements for parameters; None where those stay in memory."""
        files = self._files
        return None if files is None else lambda elements, dtype: files.empty([elements], dtype)

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
        return nullcontext() if self.activations is None else self.activations.saving(*given)

"""Offloading for a learner: optimizer state, parameters, gradients and activations.

A strategy's field `offload` selects the parts (`dure.memory.offload`). If nothing is offloaded, all
functions of this module have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.contracts.task import Task
from dure.contracts.world import RankContext
from dure.memory.mapped import Disk, DiskError, mapped
from dure.memory.offload.activations import OffloadedActivations
from dure.memory.offload.gradients import OffloadedGradients
from dure.memory.offload.offload_setting import Offload
from dure.memory.offload.optimizer import OffloadedSteps
from dure.memory.offload.parameters import OffloadedParameters, move_to_files
from dure.memory.offload.store import MappedFileStore, store_for
from dure.parallel.optimizer_sharding import check_steps_apart, is_element_wise

NO_OFFLOAD = Offload()

ON_GPU = ("optimizer", "activations")
"""Parts that can be offloaded from a GPU; parameters and gradients must stay on the GPU."""


def check_offload(
    wanted: Offload,
    folder: str | None,
    able: Collection[str],
    who: str,
    why: str = "",
    device: torch.device | None = None,
) -> None:
    """Check a strategy's fields `offload` and `offload_folder`.

    Args:
        wanted: The parts to offload.
        folder: The strategy's `offload_folder`.
        able: The parts that the strategy can offload.
        who: The strategy's name, for messages.
        why: Reason why the strategy does not offload the other parts, for messages.
        device: The learner's device; None stands for the CPU.

    Raises:
        ValueError: for a part that the strategy or the device cannot offload, for a folder that
            nothing uses, or if there is no disk for the parts.
    """
    if not wanted:
        if folder is not None:
            raise ValueError(f"offload_folder is {folder}, but nothing is offloaded: set offload")
        return
    wanted.check(able, who, why)
    if device is not None and device.type != "cpu":
        wanted.check([part for part in able if part in ON_GPU], "a GPU")
        if folder is None:
            return  # into the CPU's memory
    try:
        Disk(folder)
    except DiskError as error:
        raise ValueError(f"offload: {error}") from error


def check_device_offload(parts: Collection[str]) -> None:
    """Raise ValueError for a part that a learner on an accelerator cannot offload."""
    Offload(tuple(parts)).check(ON_GPU, "a GPU")


def check_optimizer(wanted: Offload, task: Task, model: nn.Module) -> None:
    """Check that the optimizer's state can be offloaded, if `wanted` has it.

    Raises ValueError if not.
    """
    if "optimizer" in wanted:
        check_steps_apart(task.optimizer(list(model.parameters())))


class LearnerOffloading:
    """Offloading of a learner; the files and threads end with the run.

    divided: the learner divides the parameters, and allocates its shares with `memory`.
    """

    def __init__(
        self,
        wanted: Offload,
        folder: str | None,
        context: RankContext,
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
            context.ending.callback(self._store.close)

    @property
    def _files(self) -> MappedFileStore | None:
        """The files that parameters are in; None if parameters stay in memory."""
        is_there = isinstance(self._store, MappedFileStore) and "parameters" in self.wanted
        return cast(MappedFileStore, self._store) if is_there else None

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the model, created in its final memory; its passes are watched from now on."""
        files = None if self.divided else self._files
        with nullcontext() if files is None else mapped(files.disk, files.least):
            model = make()
        if files is not None:
            move_to_files(model, files)
            self.watch_parameters(model)
        if isinstance(self._store, MappedFileStore) and "gradients" in self.wanted:
            OffloadedGradients(model.parameters(), self._store)
        self.keep_activations(lambda: (*model.parameters(), *model.buffers()))
        return model

    def watch_parameters(self, model: nn.Module) -> None:
        """Make passes of the model read ahead the parameters that they need, from now on."""
        if self._files is not None:
            OffloadedParameters(model, self._files)

    def keep_activations(self, stay: Callable[[], Iterable[Tensor]]) -> None:
        """Make `saving` store activations from now on.

        stay: returns the tensors that stay in memory in any case.
        """
        if self._store is not None and "activations" in self.wanted:
            self.activations = OffloadedActivations(self._store, self.device, stay)

    @property
    def memory(self) -> Callable[[int, torch.dtype], Tensor] | None:
        """Allocator of file-backed elements for parameters; None if parameters stay in memory."""
        files = self._files
        return None if files is None else lambda elements, dtype: files.empty([elements], dtype)

    def optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer, prepared to step over offloaded state if the state is offloaded."""
        if self._store is not None and "optimizer" in self.wanted:
            assert isinstance(optimizer, Optimizer)
            self._steps = OffloadedSteps(optimizer, self._store, is_element_wise(optimizer))
        return optimizer

    def restored(self) -> None:
        """Store the optimizer's state, which was loaded from a checkpoint."""
        if self._steps is not None:
            self._steps.keep_all()

    def saving(self, *given: Any) -> AbstractContextManager[Any]:
        """Context manager for a forward pass of these inputs, whose activations are offloaded."""
        return nullcontext() if self.activations is None else self.activations.saving(*given)

"""The task of a LightningModule and its data.

    model       a copy of the module, whose call with a batch is `training_step`
    loss        the step's
    optimizer   of `configure_optimizers`: its class and settings, with one group
    data        of the data module, the given loader, or the module's own loader

Names of the tensors are the module's. The loss of an evaluation is that of `training_step` in
evaluation mode. Refused by name: manual optimization, several optimizers, schedules by epoch or
that watch a metric, steps that return no loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dure.contracts.lr_schedule import StepSchedule
from dure.contracts.task import Task
from dure.data.datasets import DatasetExamples
from dure.trainers.optimizers import settings_of

BATCH = "lightning batch"
"""Key of a batch that is given to a module as a whole."""


def task_from_lightning(module: Any, data: Any = None, **changes: Any) -> Task:
    """Return the task of a LightningModule.

    Args:
        module: the module.
        data: a LightningDataModule, or a data loader; None if the module has a loader, or for a
            server without data (give train=None).
        changes: fields of the task that differ.

    Raises:
        ValueError: for a part of the module that a task cannot take over, by its name.
    """
    if not module.automatic_optimization:
        raise ValueError("the module has manual optimization, which no task can take over")
    fields: dict[str, Any] = {
        "model": StepModelFactory(module),
        "loss": StepLoss(),
        "name": type(module).__name__,
        "metrics": {},
    }
    if "train" not in changes:
        fields["train"] = StepExamples(training_loader(module, data))
    if "optimizer" not in changes:
        fields["optimizer"], schedule = _optimizer_of(module)
        if "lr_schedule" not in changes:
            fields["lr_schedule"] = schedule
    return Task(**{**fields, **changes})


def training_loader(module: Any, data: Any) -> DataLoader[Any]:
    """Return the training loader of a module.

    data: a data module, a loader, or None for the module's. Raises ValueError without a loader
    whose dataset has a length.
    """
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
    else:
        loader = module.train_dataloader() if data is None else data
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        raise ValueError(
            "the training data have to come from one torch DataLoader with a batch size"
        )
    if not hasattr(loader.dataset, "__len__"):
        raise ValueError(
            "the training data have no length, by which updates are weighed: give a dataset with "
            "len()"
        )
    return loader


class StepExamples(DatasetExamples):
    """Examples of a module's loader: the inputs are the loader's batch as a whole."""

    def __init__(self, loader: Any, dataset: Any = None, keys: Any = None) -> None:
        self.loader = loader
        own = loader.dataset if dataset is None else dataset
        super().__init__(own, keys, _AsBatch(loader.collate_fn))

    def over(self, dataset: Any, keys: Any) -> StepExamples:
        """Return the examples of another dataset, collated in the same way."""
        return StepExamples(self.loader, dataset, keys)

    def batch(self, indices: Tensor) -> tuple[Any, Any]:
        items = [self.dataset[index] for index in indices.tolist()]
        return {BATCH: self.loader.collate_fn(items)}, torch.zeros(len(items))


@dataclass(frozen=True)
class _AsBatch:
    """Collator whose result is the inputs, with targets that only count."""

    collate: Callable[[Any], Any]

    def __call__(self, items: Any) -> tuple[Any, Tensor]:
        return {BATCH: self.collate(items)}, torch.zeros(len(items))


@dataclass(frozen=True)
class StepModelFactory:
    """Factory of copies of a module, which are called with whole batches."""

    module: Any

    def __call__(self) -> nn.Module:
        trainer = getattr(self.module, "_trainer", None)
        if trainer is not None:
            self.module._trainer = None
        try:
            made: nn.Module = copy.deepcopy(self.module).cpu()
        finally:
            if trainer is not None:
                self.module._trainer = trainer
        made.__class__ = _stepping(type(made))
        return made


@dataclass(frozen=True)
class StepLoss:
    """Loss that the model has returned already: a mean over the examples of the batch."""

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("training_step returned no loss, which the task needs")
        return loss


def _stepping(kind: type) -> type:
    """Return a subclass of a module's class whose call with a whole batch is its step."""

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], Mapping) and list(given[0]) == [BATCH]:
            return self.training_step(given[0][BATCH], 0)
        return kind.forward(self, *given, **named)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@dataclass(frozen=True)
class ModuleOptimizer:
    """The module's optimizer for the parameters of a copy."""

    kind: type[Optimizer]
    settings: Mapping[str, Any]

    def __call__(self, parameters: Iterable[Any]) -> Optimizer:
        make: Any = self.kind
        made: Optimizer = make(list(parameters), **self.settings)
        return made


def _optimizer_of(module: Any) -> tuple[ModuleOptimizer, Any]:
    """Return (optimizer, schedule or None). Raises ValueError for what a task cannot take over."""
    given = module.configure_optimizers()
    schedules: Any = []
    if isinstance(given, Mapping):
        schedules = [given["lr_scheduler"]] if given.get("lr_scheduler") is not None else []
        given = given["optimizer"]
    elif isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], list):
        given, schedules = given
    if isinstance(given, (tuple, list)):
        if len(given) != 1:
            raise ValueError("the module has several optimizers, and a task has one")
        given = given[0]
    if not isinstance(given, Optimizer) or len(given.param_groups) > 1:
        raise ValueError(
            "the module's optimizer has several groups, whose parameters a copy does not have: "
            "give the task an optimizer of its own, from_lightning(module, optimizer=…)"
        )
    return ModuleOptimizer(type(given), settings_of(given)), _schedule_of(schedules)


def _schedule_of(schedules: Any) -> Any:
    if not schedules:
        return None
    asked = schedules[0]
    step = isinstance(asked, Mapping) and asked.get("interval") == "step"
    schedule = asked["scheduler"] if isinstance(asked, Mapping) else asked
    factors = getattr(schedule, "lr_lambdas", None)
    if len(schedules) > 1 or not step or not factors:
        raise ValueError(
            "the module's schedule is no function of the step (a LambdaLR with interval step): "
            "give the task one, from_lightning(module, lr_schedule=…)"
        )
    return StepSchedule(factors[0])

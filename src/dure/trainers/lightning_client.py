"""lightning.Trainer as the trainer of a client.

    dure.client.patch(trainer, "https://…")
    trainer.fit(module, datamodule)

A round is a call of the trainer's own `fit`, as in `dure.trainers.hugging_face`; with
between_rounds="keep" all rounds are one. Terms of an algorithm are added before the gradients are
clipped. Only modules with automatic optimization can train a client, because of these terms and of
the count of steps.

Cost: a copy of the weights that travel at the start and at the end of a round.

Source: lightning.ai/docs/pytorch, "Trainer" and "Callback" (order of hooks in a step).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dure.contracts.task import Task
from dure.contracts.trainer import TrainerResult, TrainerRound
from dure.trainers.continued import ContinuedTraining
from dure.trainers.integration import BetweenRounds, TrainedClient, TrainerIntegration
from dure.trainers.lightning_task import task_from_lightning, training_loader
from dure.trainers.round_batches import RoundBatches, cannot_divide, loader_like
from dure.trainers.weights import (
    RoundTerms,
    copy_tensors,
    divided_like,
    is_divided,
    load_tensors,
)


def integrate(trainer: Any) -> TrainerIntegration:
    """Return the integration of a trainer. Raises ValueError if it cannot train a client."""
    if trainer.world_size > 1:
        _check_ranks(trainer)
    fit = trainer.fit

    def client(
        state: BetweenRounds, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> TrainedClient:
        module, data, validation = _arguments_of_fit(*given, **named)
        if trainer.world_size > 1:
            if state == "keep":
                raise ValueError("between_rounds='keep' is not possible with several devices")
            # The ranks need their process group before `fit`, which would make it.
            trainer.strategy.setup_environment()
        made = LightningTrainer(trainer, fit, module, data, validation, state)
        task = task_from_lightning(
            module, data, optimizer=Task.optimizer, lr_schedule=None, metrics={}
        )
        return TrainedClient(made, task)

    return TrainerIntegration("fit", client)


def _check_ranks(trainer: Any) -> None:
    """Check that a trainer of several devices can train a client. Raises ValueError."""
    kind = type(trainer.strategy).__name__
    why = None
    if kind != "DDPStrategy":
        why = f"its strategy is {kind}: use strategy='ddp'"
    elif not trainer.strategy.cluster_environment.creates_processes_externally:
        why = "it starts its ranks in fit: start them with torchrun"
    elif trainer._accelerator_connector.use_distributed_sampler:
        why = "it divides the data over ranks, which dure does: set use_distributed_sampler=False"
    if why is not None:
        raise ValueError(f"a lightning.Trainer of several devices cannot train this client: {why}")


def _arguments_of_fit(
    model: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    **more: Any,
) -> tuple[Any, Any, Any]:
    """Return (module, data, validation loaders) of the arguments of `fit`. Raises ValueError."""
    if any(value is not None for value in more.values()):
        raise ValueError(f"fit of a patched trainer takes no {next(iter(more))}")
    if not model.automatic_optimization:
        raise ValueError(
            "a module with manual optimization cannot train a client: set automatic_optimization"
        )
    data = train_dataloaders if datamodule is None else datamodule
    return model, data, val_dataloaders


class LightningTrainer:
    """A lightning.Trainer with a module and its data, as a `ClientTrainer`.

    Args:
        trainer: the trainer, before training.
        fit: its `fit`.
        module: the LightningModule.
        data: a data module or a loader; None if the module has a loader.
        validation: loaders for validation; None takes those of the data module or the module.
        between_rounds: as in `dure.client.patch`.
    """

    name = "lightning.Trainer"

    def __init__(
        self,
        trainer: Any,
        fit: Callable[..., Any],
        module: Any,
        data: Any,
        validation: Any,
        between_rounds: BetweenRounds,
    ) -> None:
        self.trainer = trainer
        self.module = module
        self._fit = fit
        self._loader: Any = training_loader(module, data)
        self._validation = _validation_loader(data) if validation is None else validation
        self._hook = _round_callback(module)
        self._continued: ContinuedTraining | None = None
        if between_rounds == "keep":
            self._continued = ContinuedTraining(
                self.name, lambda: fit(module, self._loader, self._validation)
            )
            self._hook.continued = self._continued

    @property
    def batch_size(self) -> int:
        own = int(self._loader.batch_size * self.trainer.accumulate_grad_batches)
        return own * int(self.trainer.world_size)

    @property
    def examples(self) -> int:
        return len(self._loader.dataset)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        load_tensors(self.module, tensors)

    def tensors(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        return copy_tensors(self.module, names)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.trainer.strategy.root_device
        return device

    @property
    def is_divided(self) -> bool:
        return is_divided(self.module)

    def part(self, name: str, whole: Tensor) -> Tensor:
        return divided_like(self.module.get_parameter(name), whole)

    def cannot(self, round: TrainerRound) -> str | None:
        if self._continued is not None:
            return None
        return cannot_divide(
            round,
            self._loader.batch_size,
            self.trainer.accumulate_grad_batches,
            self.trainer.world_size,
        )

    def run(self, round: TrainerRound) -> TrainerResult:
        if self._hook not in self.trainer.callbacks:
            self.trainer.callbacks.append(self._hook)
        if self._continued is not None:
            self._continued.run(round, self._hook.begin)
        else:
            self._hook.begin(round)
            self._fit_round(round)
        found: TrainerResult = self._hook.result(self.trainer)
        return found

    def close(self) -> None:
        if self._continued is not None:
            self._continued.close()
        if self._hook in self.trainer.callbacks:
            self.trainer.callbacks.remove(self._hook)

    def _fit_round(self, round: TrainerRound) -> None:
        """Call `fit` from the beginning: its counters are those of the round."""
        trainer = self.trainer
        passes = round.passes
        restart_fit_loop(trainer, passes or 1, -1 if passes else len(round.batches))
        batches = RoundBatches(
            round, self._loader.batch_size, trainer.global_rank, trainer.world_size
        )
        loader = loader_like(self._loader, batches)
        self._fit(self.module, loader, self._validation)


def restart_fit_loop(trainer: Any, epochs: int, steps: int) -> None:
    """Make the next `fit` of a trainer begin at epoch 0, and end after epochs or steps."""
    old = trainer.fit_loop
    trainer.fit_loop = type(old)(trainer, min_epochs=None, max_epochs=epochs)
    trainer.fit_loop.epoch_loop = type(old.epoch_loop)(trainer, min_steps=None, max_steps=steps)
    trainer.should_stop = False


def _validation_loader(data: Any) -> Any:
    """Return the validation loaders of a data module; None without."""
    hook: Any = getattr(data, "val_dataloader", None)
    # A data module without one inherits a method that raises.
    own = hook is not None and not hook.__module__.startswith(("lightning.", "pytorch_lightning."))
    return hook() if own else None


def _round_callback(module: Any) -> Any:
    """Return a callback that adds terms, and counts; a subclass of the callback of its library."""
    # The same library has two names, with classes of their own.
    of_old_name = any(
        one.__module__.startswith("pytorch_lightning.") for one in type(module).__mro__
    )
    root = "pytorch_lightning" if of_old_name else "lightning.pytorch"
    base: Any = importlib.import_module(f"{root}.callbacks").Callback

    class RoundCallback(base):  # type: ignore[misc]
        """Callback of a round."""

        continued: ContinuedTraining | None = None

        def begin(self, round: TrainerRound) -> None:
            """Begin a round."""
            self._round = round
            self._terms = RoundTerms(round.terms)
            self._samples = 0
            self._steps = 0
            self._seen = 0
            self._losses: list[tuple[Tensor, int]] = []

        def result(self, trainer: Any) -> TrainerResult:
            """Return the round's steps, samples and loss, over all ranks."""
            total = sum(float(loss) * count for loss, count in self._losses)
            counted = sum(count for _, count in self._losses)
            sums = torch.tensor([self._samples, counted, total], dtype=torch.float64)
            if trainer.world_size > 1:
                sums = sums.to(trainer.strategy.root_device)
                dist.all_reduce(sums)
            samples, counted, total = sums.tolist()
            mean = total / counted if counted else 0.0
            return TrainerResult(self._steps, int(samples), mean, counted)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, at: int) -> None:
            if self._round.look is not None:
                self._round.look()

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self._steps += 1
            self._terms.add_to(module)

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, at: int
        ) -> None:
            count = examples_in(batch)
            self._samples += count
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, Tensor):
                self._losses.append((loss.detach(), count))
            has_stepped = self._steps > self._seen
            self._seen = self._steps
            if self.continued is not None and has_stepped and not self.continued.stepped():
                trainer.should_stop = True

    return RoundCallback()


def examples_in(batch: Any) -> int:
    """Return the number of examples of a batch: the length of its first tensor."""
    return next((len(one) for one in tree_leaves(batch) if isinstance(one, Tensor) and one.ndim), 0)

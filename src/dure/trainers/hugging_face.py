"""transformers.Trainer, and trl's trainers, as the trainer of a client.

A round is a call of the trainer's own `train`. What begins anew in a round, and what goes on, is
one setting, `between_rounds`:

    reset    optimizer, schedule, global step, epoch and logs begin anew: FedAvg as in the paper,
             and the bits of `dure train fed-avg`. `max_steps` and `num_train_epochs` are the
             round's, the schedule has its length, and checkpoints go to output_dir/round-N
    keep     one call of `train` for all rounds: optimizer, schedule and counters go on, and
             `max_steps` and `num_train_epochs` are the trainer's. Between two steps the weights are
             replaced (`dure.trainers.continued`)

An early stop of a callback ends the round with `reset`, and the client's part with `keep`.

The weights of an update come from this round alone: steps, samples and loss are counted here, and
never read from counters of the trainer.

Cost: a copy of the weights that travel at the start and at the end of a round.

Source: huggingface.co/docs/transformers, "Trainer" (train, callbacks, gradient accumulation).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback

from dure.contracts.own_loss import IGNORED, Counts
from dure.contracts.trainer import TrainerResult, TrainerRound
from dure.trainers.continued import ContinuedTraining
from dure.trainers.integration import BetweenRounds
from dure.trainers.round_batches import RoundBatches, cannot_divide, loader_like
from dure.trainers.weights import (
    RoundTerms,
    copy_tensors,
    divided_like,
    is_divided,
    load_tensors,
)


class HuggingFaceTrainer:
    """A transformers.Trainer as a `ClientTrainer`.

    Args:
        trainer: the trainer, which was not trained yet.
        train: its `train`.
        between_rounds: as in the module.
        counts: the terms of the loss, as in `dure.OwnLoss`.
    """

    def __init__(
        self,
        trainer: Trainer,
        train: Callable[[], Any],
        between_rounds: BetweenRounds = "reset",
        counts: Counts = "examples",
    ) -> None:
        self.trainer = trainer
        self.name = type(trainer).__name__
        self._train = train
        self._tally = RoundTally(trainer, counts)
        self._hook = _RoundCallback(trainer, self._tally)
        self._attached: ExitStack | None = None
        self._loader = trainer.get_train_dataloader
        self._output = Path(trainer.args.output_dir)
        given = trainer.optimizer, trainer.lr_scheduler
        self._given = [None if one is None else copy.deepcopy(one.state_dict()) for one in given]
        self._continued: ContinuedTraining | None = None
        if between_rounds == "reset" and getattr(trainer, "is_deepspeed_enabled", False):
            raise ValueError(
                "with DeepSpeed a transformers.Trainer trains once: use between_rounds='keep'"
            )
        if between_rounds == "keep":
            self._continued = ContinuedTraining(self.name, self._train)
            self._hook.continued = self._continued

    @property
    def ranks(self) -> int:
        """Number of ranks of the trainer."""
        return max(1, int(self.trainer.args.world_size))

    @property
    def batch_size(self) -> int:
        args = self.trainer.args
        return int(args.train_batch_size * args.gradient_accumulation_steps) * self.ranks

    @property
    def examples(self) -> int:
        data: Any = self.trainer.train_dataset
        return len(data)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        load_tensors(self.trainer.model, tensors)

    def tensors(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        return copy_tensors(self.trainer.model, names)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.trainer.args.device
        return device

    @property
    def is_divided(self) -> bool:
        return is_divided(self.trainer.model)

    def part(self, name: str, whole: Tensor) -> Tensor:
        return divided_like(self.trainer.model.get_parameter(name), whole)

    def cannot(self, round: TrainerRound) -> str | None:
        args = self.trainer.args
        if round.terms is not None:
            why = cannot_add_terms(self.trainer)
            if why is not None:
                return why
        if self._continued is not None:
            # The order of the data is the trainer's.
            return None
        return cannot_divide(
            round, args.train_batch_size, args.gradient_accumulation_steps, self.ranks
        )

    def run(self, round: TrainerRound) -> TrainerResult:
        self._attach()
        if self._continued is not None:
            self._continued.run(round, self._hook.begin)
        else:
            self._hook.begin(round)
            with self._round(round):
                self._train()
        return self._tally.result()

    def close(self) -> None:
        if self._continued is not None:
            self._continued.close()
        if self._attached is not None:
            self._attached.close()
            self._attached = None
            if self._continued is None:
                # A later training begins with no state of the last round.
                self._reset()

    def _attach(self) -> None:
        """Observe the trainer's steps, until `close`."""
        if self._attached is not None:
            return
        trainer = self.trainer
        self._attached = undo = ExitStack()
        set_until(undo, trainer, "training_step", self._tally.training_step)
        set_until(undo, trainer.accelerator, "clip_grad_norm_", self._hook.clip)
        # A model function would draw new weights in each call of `train`.
        set_until(undo, trainer, "model_init", None)
        trainer.add_callback(self._hook)
        undo.callback(trainer.remove_callback, self._hook)

    @contextmanager
    def _round(self, round: TrainerRound) -> Iterator[None]:
        """Context manager: `train` trains this round, from a new optimizer on."""
        trainer, args = self.trainer, self.trainer.args
        rank = args.process_index if self.ranks > 1 else 0
        batches = RoundBatches(round, args.train_batch_size, rank, self.ranks)

        def loader() -> Any:
            # The batches are this rank's already: accelerate would divide them once more, and
            # repeat examples where the last step is short.
            return prepare_data_loader(
                loader_like(self._loader(), batches),
                trainer.accelerator.device,
                num_processes=1,
                process_index=0,
                put_on_device=trainer.accelerator.device_placement,
            )

        with ExitStack() as undo:
            # Whole passes are epochs of the trainer, so that its callbacks see them.
            passes = round.passes
            set_until(undo, args, "max_steps", -1 if passes else len(round.batches))
            set_until(undo, args, "num_train_epochs", float(passes or 1))
            set_until(undo, args, "output_dir", str(self._output / f"round-{round.number + 1}"))
            set_until(undo, trainer, "get_train_dataloader", loader)
            self._reset()
            yield

    def _reset(self) -> None:
        """Begin with a new optimizer and schedule; those that the user gave begin again."""
        trainer = self.trainer
        optimizer, schedule = self._given
        if optimizer is None:
            trainer.optimizer = None
        else:
            own = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            own.state.clear()
            own.load_state_dict(copy.deepcopy(optimizer))
        if schedule is None:
            trainer.lr_scheduler = None
        else:
            trainer.lr_scheduler.load_state_dict(copy.deepcopy(schedule))


class RoundTally:
    """Examples, loss and steps of a round, counted at the trainer's own steps.

    A trainer's `training_step` returns the contribution of a batch to the loss of its step.
    """

    def __init__(self, trainer: Trainer, counts: Counts) -> None:
        self._counts = counts
        self._step = trainer.training_step
        self._trainer = trainer
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self.steps = 0
        self._samples = 0
        self._losses: list[Tensor] = []
        self._terms: list[float] = []
        self._within: Tensor | None = None
        self._within_terms = 0.0

    def training_step(self, model: nn.Module, inputs: Any, *rest: Any, **named: Any) -> Any:
        """Run the trainer's `training_step`, and count its batch."""
        samples, terms = batch_counts(inputs, self._counts)
        loss = self._step(model, inputs, *rest, **named)
        self._samples += samples
        self._within = loss if self._within is None else self._within + loss
        self._within_terms += terms
        return loss

    def stepped(self) -> None:
        """Note that the optimizer has stepped."""
        self.steps += 1
        if self._within is not None:
            # Read after the last step only: reading waits for a device.
            self._losses.append(self._within)
            self._terms.append(self._within_terms)
        self._within, self._within_terms = None, 0.0

    def result(self) -> TrainerResult:
        """Return the round, over all ranks of the trainer."""
        values = [] if not self._losses else torch.stack(self._losses).float().tolist()
        counted = sum(self._terms)
        total = sum(v * t for v, t in zip(values, self._terms, strict=True))
        sums = torch.tensor([self._samples, counted, total], dtype=torch.float64)
        if self._trainer.args.world_size > 1:
            # A backend of devices takes no tensors of the CPU.
            sums = self._trainer.accelerator.reduce(sums.to(self._trainer.args.device), "sum")
        samples, counted, total = sums.tolist()
        return TrainerResult(self.steps, int(samples), total / counted if counted else 0.0, counted)


class _RoundCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that adds an algorithm's terms to the gradients, and counts steps."""

    def __init__(self, trainer: Trainer, tally: RoundTally) -> None:
        self._trainer = trainer
        self._tally = tally
        self._round: TrainerRound | None = None
        self._clip = trainer.accelerator.clip_grad_norm_
        self._terms = RoundTerms(None)
        self._is_added = False
        self.continued: ContinuedTraining | None = None

    def begin(self, round: TrainerRound) -> None:
        """Begin a round."""
        self._round = round
        self._terms = RoundTerms(round.terms)
        self._tally.begin()

    def clip(self, *given: Any, **named: Any) -> Any:
        """Clip the gradients as the trainer does, with the terms, as in dure's own loop."""
        self._add()
        return self._clip(*given, **named)

    def _add(self) -> None:
        if not self._is_added:
            self._is_added = True
            self._terms.add_to(self._trainer.model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._is_added = False
        if self._round is not None and self._round.look is not None:
            self._round.look()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        # A trainer that does not clip has not added them yet.
        self._add()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._tally.stepped()
        if self.continued is not None and not self.continued.stepped():
            control.should_training_stop = True


def check_trainer(trainer: Trainer) -> None:
    """Check that a trainer has what a client needs.

    Raises ValueError for a trainer without data, for data without a length, and for a model that
    is divided.
    """
    if trainer.train_dataset is None:
        raise ValueError(f"the {type(trainer).__name__} has no train_dataset")
    if not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError(
            f"the train_dataset of the {type(trainer).__name__} has no length, by which updates "
            "are weighed: give a dataset with len()"
        )
    order = getattr(trainer.args, "train_sampling_strategy", None) or "random"
    if order != "random" or getattr(trainer.args, "group_by_length", False):
        raise ValueError(
            "the trainer orders its data by length or in turn, but a client's order is drawn from "
            "the run's seed: use train_sampling_strategy='random'"
        )
    _check_division(trainer)
    if trainer.args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size changes the batch size in a run: leave it out")


def _check_division(trainer: Trainer) -> None:
    """Check that ranks hold whole weights, or parts that can be loaded. Raises ValueError."""
    found = None
    by_deepspeed = getattr(trainer, "is_deepspeed_enabled", False)
    if by_deepspeed:
        stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
        # In lower stages the optimizer's copies are written by none of DeepSpeed's functions.
        found = None if stage == 3 else f"stage {stage} of DeepSpeed"
    if getattr(trainer, "is_fsdp_xla_enabled", False):
        found = "FSDP of XLA"
    if getattr(trainer, "is_fsdp_enabled", False):
        version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)
        found = None if version == 2 else "FSDP 1"
    model = trainer.model
    by_fsdp = any(isinstance(one, FSDPModule) for one in model.modules())
    if is_divided(model) and not (by_fsdp or by_deepspeed):
        found = "tensor parallelism"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        for size in ("tp_size", "pp_size", "ep_size"):
            if (getattr(model.config.distributed_config, size, None) or 1) > 1:
                found = f"{size} of its distributed_config"
    if found is not None:
        raise ValueError(
            f"the trainer divides its model over ranks by {found}, whose parts a client cannot "
            "load: use FSDP2, stage 3 of DeepSpeed, or data parallelism (DDP)"
        )


def cannot_add_terms(trainer: Trainer) -> str | None:
    """Return why the gradients of a trainer cannot get an algorithm's terms; None if they can."""
    args = trainer.args
    if getattr(trainer, "is_deepspeed_enabled", False):
        return "DeepSpeed steps by itself, and the algorithm adds terms to the gradients"
    if str(getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"):
        return (
            f"the optimizer {args.optim} steps in backward, before the algorithm's terms are added"
        )
    if args.fp16:
        return "gradients are scaled in fp16, and the algorithm's terms are not: use bf16"
    return None


def batch_counts(inputs: Any, counts: Counts) -> tuple[int, float]:
    """Return (examples of a batch, terms that its loss counts)."""
    tensors = [one for one in inputs.values() if isinstance(one, Tensor) and one.ndim]
    samples = len(tensors[0]) if tensors else 0
    labels = inputs.get("labels")
    if counts == "examples" or not isinstance(labels, Tensor):
        return samples, float(samples)
    counted = labels[..., 1:] if counts == "next-tokens" else labels
    return samples, float((counted != IGNORED).sum())


def set_until(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute, and restore it when `undo` ends."""
    own = vars(owner)
    if name in own:
        undo.callback(setattr, owner, name, own[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)

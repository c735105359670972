"""The task of a transformers.Trainer: what its user has, for every system of dure.

    taken over   model, training and evaluation data with their collator, the model's own loss,
                 optimizer with its groups, schedule, max_grad_norm, bf16 and fp16, compute_metrics
    refused      by name: a loss of the trainer's own, label smoothing, NEFTune, data without a
                 length, optimizers that dure cannot make again
    left out     callbacks, logging, checkpoints: dure has its own. Batch size and accumulation are
                 settings of a strategy

A schedule of the trainer counts steps, so federated systems, which count rounds, refuse it unless
it is constant.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import EvalPrediction, PreTrainedModel, Trainer, get_scheduler

from dure.contracts.lr_schedule import StepSchedule
from dure.contracts.own_loss import Counts, OwnLoss
from dure.contracts.task import Task
from dure.data.datasets import DatasetExamples
from dure.trainers.hugging_face import check_trainer
from dure.trainers.optimizers import settings_of
from dure.trainers.weights import copy_tensors, is_divided, load_tensors

_NEXT_TOKENS = ("ForCausalLM", "LMHeadModel")
_TOKENS = ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration", "ForPreTraining")


def task_from_trainer(
    trainer: Trainer, *, counts: Counts | None = None, checks_loss: bool = True, **changes: Any
) -> Task:
    """Return the task of a trainer.

    Args:
        trainer: a transformers.Trainer, or a trl trainer with the model's own loss.
        counts: the terms of the model's loss, as in `dure.OwnLoss`; None follows from the class of
            the model.
        checks_loss: whether to check that the trainer's loss is the model's own.
        changes: fields of the task that differ from the trainer's.

    Raises:
        ValueError: for a part of the trainer that a task cannot take over, by its name.
    """
    if not isinstance(trainer, Trainer):
        raise ValueError(f"{type(trainer).__name__} is no transformers.Trainer")
    check_trainer(trainer)
    args = trainer.args
    fields: dict[str, Any] = {
        "model": model_factory(trainer.model),
        "loss": OwnLoss(counts_of(trainer.model) if counts is None else counts),
        "train": examples_of_loader(trainer.get_train_dataloader()),
        "test": _evaluation_examples(trainer),
        "name": type(trainer).__name__,
        "clip_norm": args.max_grad_norm or None,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "full",
    }
    if "optimizer" not in changes:
        fields["optimizer"] = TrainerOptimizer.of(trainer)
    # A server without data trains nothing: its clients have the schedule.
    serves = "train" in changes and changes["train"] is None
    if "lr_schedule" not in changes and not serves:
        fields["lr_schedule"] = schedule_of(trainer)
    if "metrics" not in changes:
        fields["metrics"] = metrics_of(trainer)
    if checks_loss and "loss" not in changes:
        _check_loss(trainer)
    return Task(**{**fields, **changes})


@dataclass(frozen=True)
class TrainerModelFactory:
    """Factory of copies of a model, with its weights of now."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.model).cpu()


def model_factory(model: nn.Module) -> Callable[[], nn.Module]:
    """Return a factory of whole copies of a model, which the ranks may have divided.

    All ranks of a divided model have to call it, and the factory works in rank 0. Raises ValueError
    for a divided model that cannot be made from its configuration.
    """
    if not is_divided(model):
        return TrainerModelFactory(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"a divided {type(model).__name__} cannot be made anew from a configuration: patch "
            "the trainer before its model is divided"
        )
    whole: nn.Module | None = None
    if not dist.get_rank():
        # fully_shard gives the model a class of its own, derived from the model's.
        kind: Any = next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule))
        config = copy.deepcopy(model.config)
        config.distributed_config = None
        whole = kind(config).to(model.dtype).train(model.training)
        for name, own in model.named_parameters():
            whole.get_parameter(name).requires_grad_(own.requires_grad)
    for name in [*dict(model.named_parameters()), *dict(model.named_buffers())]:
        found = copy_tensors(model, [name])
        if whole is not None:
            load_tensors(whole, found)
    return _InRank0() if whole is None else TrainerModelFactory(whole)


class _InRank0:
    """Factory of the other ranks, which make no model."""

    def __call__(self) -> nn.Module:
        raise ValueError("whole models are made in rank 0 alone")


def counts_of(model: nn.Module) -> Counts:
    """Return the terms of the loss of a Hugging Face model, by the name of its class."""
    # An adapter is around the model.
    base = getattr(model, "get_base_model", None)
    name = type(model if base is None else base()).__name__
    if name.endswith(_NEXT_TOKENS):
        return "next-tokens"
    return "tokens" if name.endswith(_TOKENS) else "examples"


def examples_of_loader(loader: Any) -> DatasetExamples:
    """Return the examples of a trainer's data loader, with its collator and columns."""
    collate = loader.collate_fn
    return DatasetExamples(loader.dataset, collate=_Collate(collate), keeps_labels=True)


@dataclass(frozen=True)
class _Collate:
    """Collator whose batches are dicts, as dure's examples are."""

    collate: Callable[[Any], Any]

    def __call__(self, items: Any) -> dict[str, Any]:
        return dict(self.collate(items))


def _evaluation_examples(trainer: Trainer) -> DatasetExamples | None:
    if trainer.eval_dataset is None:
        return None
    if isinstance(trainer.eval_dataset, Mapping):
        raise ValueError(
            "the trainer has several evaluation sets, and a task has one: give test=…, or a single "
            "eval_dataset"
        )
    return examples_of_loader(trainer.get_eval_dataloader())


def _check_loss(trainer: Trainer) -> None:
    """Check that the model's own loss is the trainer's. Raises ValueError."""
    own = type(trainer).compute_loss is not Trainer.compute_loss
    # trl's supervised trainer adds metrics to the model's own loss.
    if type(trainer).__name__ == "SFTTrainer":
        own = str(getattr(trainer.args, "loss_type", "nll")) != "nll"
    why = {
        "compute_loss_func": trainer.compute_loss_func is not None,
        "compute_loss of its own class": own,
        "label_smoothing_factor": bool(trainer.args.label_smoothing_factor),
        "neftune_noise_alpha": trainer.neftune_noise_alpha is not None,
    }
    for name, given in why.items():
        if given:
            raise ValueError(
                f"the trainer has {name}, which changes the model's own loss: give the task a loss "
                "of its own, from_trainer(trainer, loss=…)"
            )


@dataclass(frozen=True)
class TrainerOptimizer:
    """The trainer's optimizer for a new model.

    Args:
        kind: class.
        settings: of the class.
        decay: weight decay, which is set by group; None leaves it to the settings.
        decayed: for each parameter of the model, in its order, (whether weight decay applies,
            whether it is trained); None for one group.
    """

    kind: type[Optimizer]
    settings: Mapping[str, Any]
    decay: float | None = None
    decayed: tuple[tuple[bool, bool], ...] | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> TrainerOptimizer:
        """Return the optimizer of a trainer. Raises ValueError if it cannot be made again."""
        if trainer.optimizer is not None:
            given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            if len(given.param_groups) > 1:
                raise ValueError(
                    "the trainer was given an optimizer with several groups, whose parameters a "
                    "new model does not have: give the task an optimizer of its own, "
                    "from_trainer(trainer, optimizer=…)"
                )
            return cls(type(given), settings_of(given))
        kind, settings = _class_and_settings(trainer)
        decay = float(trainer.args.weight_decay)
        if not decay:
            return cls(kind, settings, decay)
        names = set(trainer.get_decay_parameter_names(trainer.model))
        decayed = tuple(
            (name in names, one.requires_grad) for name, one in trainer.model.named_parameters()
        )
        return cls(kind, settings, decay, decayed)

    def __call__(self, parameters: Iterable[Any]) -> Optimizer:
        make: Any = self.kind
        given = list(parameters)
        found: Optimizer = make(
            given if self.decay is None else self._groups(given, self.decay), **self.settings
        )
        return found

    def _groups(self, given: list[Any], decay: float) -> list[dict[str, Any]]:
        if self.decayed is None or len(given) == 1:
            return [{"params": given, "weight_decay": decay}]
        # Of all parameters, or of those that are trained.
        flags = [decays for decays, trains in self.decayed if trains]
        if len(given) == len(self.decayed):
            flags = [decays for decays, _ in self.decayed]
        if len(given) != len(flags):
            raise ValueError(
                f"the trainer's weight decay distinguishes {len(self.decayed)} parameters, but the "
                f"optimizer gets {len(given)}: set weight_decay=0, or give the task an optimizer "
                "of its own"
            )
        of = {
            on: [one for one, decays in zip(given, flags, strict=True) if decays == on]
            for on in (True, False)
        }
        groups = [{"params": of[on], "weight_decay": decay if on else 0.0} for on in of]
        return [group for group in groups if group["params"]]


def _class_and_settings(trainer: Trainer) -> tuple[type[Optimizer], dict[str, Any]]:
    given = getattr(trainer, "optimizer_cls_and_kwargs", None)
    kind, settings = given or Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    able = isinstance(kind, type) and issubclass(kind, Optimizer)
    if not able or {"params", "model", "optimizer_dict"} & set(settings):
        raise ValueError(
            f"the trainer's optimizer {trainer.args.optim} is made from the model as a whole: give "
            "the task an optimizer of its own, from_trainer(trainer, optimizer=…)"
        )
    return kind, dict(settings)


def schedule_of(trainer: Trainer) -> StepSchedule | None:
    """Return the schedule of a trainer over its planned steps; None for a constant rate.

    Raises ValueError for a schedule that is no function of the step.
    """
    args = trainer.args
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if trainer.lr_scheduler is None and kind == "constant":
        return None
    steps = planned_steps(trainer)
    made = trainer.lr_scheduler
    if made is None:
        probe = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        made = get_scheduler(
            kind,
            optimizer=probe,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    factors = getattr(made, "lr_lambdas", None)
    if not factors:
        raise ValueError(
            f"the schedule {kind} is no function of the step: give the task one, "
            "from_trainer(trainer, lr_schedule=…)"
        )
    return StepSchedule(factors[0])


def planned_steps(trainer: Trainer) -> int:
    """Return the number of steps that a trainer plans."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    batch = args.train_batch_size * args.gradient_accumulation_steps * max(1, args.world_size)
    data: Any = trainer.train_dataset
    per_epoch = max(1, -(-len(data) // batch))
    return int(-(-args.num_train_epochs * per_epoch // 1))


def metrics_of(trainer: Trainer) -> dict[str, Any] | None:
    """Return the metrics of `compute_metrics`, by name; none without it.

    It is called once with the first evaluation examples, to learn the names.
    """
    if trainer.compute_metrics is None or trainer.eval_dataset is None:
        # The loss alone, as in the trainer's evaluation.
        return {}
    shared = _ComputedMetrics(trainer.compute_metrics, trainer.preprocess_logits_for_metrics)
    examples = _evaluation_examples(trainer)
    assert examples is not None
    inputs, targets = examples.batch(torch.arange(min(2, len(examples))))
    model = trainer.model
    mode, device = model.training, next(model.parameters()).device
    with torch.no_grad():
        moved = {name: one.to(device) for name, one in inputs.items() if isinstance(one, Tensor)}
        outputs = model.eval()(**moved)
    model.train(mode)
    found = shared(outputs, targets)
    return {name: _NamedMetric(name, shared) for name in sorted(found)}


class _ComputedMetrics:
    """`compute_metrics`, called once for all metrics of an evaluation."""

    def __init__(self, compute: Callable[[Any], Mapping[str, float]], before: Any) -> None:
        self._compute = compute
        self._before = before
        self._last: tuple[Any, Any] = (None, None)
        self._found: Mapping[str, float] = {}

    def __call__(self, outputs: Any, targets: Any) -> Mapping[str, float]:
        if self._last[0] is not outputs or self._last[1] is not targets:
            found = [one for name, one in outputs.items() if name != "loss"]
            predictions = found[0] if len(found) == 1 else tuple(found)
            if self._before is not None:
                predictions = self._before(predictions, targets)
            self._found = self._compute(
                EvalPrediction(predictions=_arrays(predictions), label_ids=_arrays(targets))
            )
            self._last = outputs, targets
        return self._found


@dataclass(frozen=True)
class _NamedMetric:
    """Metric of `compute_metrics`, by name."""

    name: str
    shared: _ComputedMetrics

    def __call__(self, outputs: Any, targets: Any) -> float:
        return float(self.shared(outputs, targets)[self.name])


def _arrays(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            value.detach().cpu().float().numpy()
            if value.is_floating_point()
            else value.cpu().numpy()
        )
    if isinstance(value, (tuple, list)):
        return tuple(map(_arrays, value))
    return value

"""Task: the definition of the learning problem, independent of machines.

A task is written once; the system that trains the task is another argument. The task has a factory
of models rather than a model, because every worker and every client starts from the same new
weights, drawn under the run's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dure import catalog
from dure.arguments import SuggestsArguments, check_path
from dure.contracts.adapter import LoRA, adapter_of
from dure.contracts.lr_schedule import LRSchedule
from dure.contracts.metric import Metric, check_metrics
from dure.contracts.own_loss import KeywordModelFactory, OwnLoss
from dure.contracts.trainer import ClientTrainers
from dure.contracts.training_options import Precision, check_learning
from dure.data.conversion import as_examples
from dure.data.datasets import DatasetExamples
from dure.data.examples import Examples, NoExamples
from dure.data.rank_examples import RankDataFactory
from dure.machine.devices import on_device

if TYPE_CHECKING:
    from typing_extensions import Self

Loss = Callable[[Any, Any], "Tensor | tuple[Tensor, Tensor | float]"]
"""loss(outputs, targets) returns the mean over the batch, a scalar, or a pair (sum, count).

The loss of a batch is then sum / count, also if ranks, micro-batches or clients compute parts of
the batch: their sums are added, and their counts.
"""
SGD = partial(torch.optim.SGD, lr=0.1)
"""Default optimizer of a task."""


def accuracy(outputs: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return (correct predictions, predictions made); pairs add over batches and workers.

    outputs: scores of shape (B, classes, ...); targets: class indices of shape (B, ...). Targets
    equal to `ignore_index` are not counted, as in `torch.nn.functional.cross_entropy`.
    """
    counted = targets != ignore_index
    return ((outputs.argmax(dim=1) == targets) & counted).sum(), counted.sum()


def class_accuracy(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return `accuracy` for scores of two classes or more, else (0, 0).

    The default metric: outputs of another shape have no accuracy, and are no error.
    """
    # Scores have one dimension more than the targets, the second one, of the classes.
    fits = (
        isinstance(outputs, Tensor)
        and outputs.ndim == targets.ndim + 1
        and outputs.shape[1] > 1
        and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    )
    return accuracy(outputs, targets) if fits else (torch.zeros(()), torch.zeros(()))


@dataclass(frozen=True)
class Task(SuggestsArguments, common=True):
    """Definition of a learning problem.

    model: a function without arguments that returns a new `nn.Module` in each call; called under
        the run's seed.
    loss: loss(outputs, targets), the mean over the batch's examples (a scalar tensor), or a pair
        (sum, count), for a loss that does not count every example alike: see `Loss`. None: the
        model
        computes its own loss, like Hugging Face's models (`dure.OwnLoss`).
    train, test: `Examples`, `dure.Shards`, a pair (inputs, targets) of tensors, arrays or frames, a
        dataset of pairs or dicts, or a DataLoader (`dure.data.conversion`). train: also a function
        of (rank, world) that returns any of these, the data of this rank; None only for a server
        whose clients have the data (`dure.Network`). test: None measures nothing here.
    optimizer: called with the parameters; `functools.partial(torch.optim.SGD, lr=0.1)`.
    metrics: name to `Metric`, measured on all test data and reported as test_<name>. None: the
        accuracy if the targets are class indices, otherwise only the loss.
    name: name in tables.
    reference: text by which `dure.load_task` found the task, so that a run folder can be resumed;
    None
        for a task made in Python.
    lr_schedule: factor of the optimizer's learning rates at step t = 0, 1, ... of all workers, or
    of a
        worker with separate steps; in a federation at round t. A function of t, like `lr_lambda` of
        torch's LambdaLR; None leaves the rates unchanged.
    eval_batch_size: examples that a worker measures at once: fewer take less memory.
    features: meanings of the columns of the inputs, by name; over a network a client with other
        columns is refused.
    metric_memory: maximum bytes of the outputs and targets of all test examples, for a metric that
        needs them at once; a metric that needs more is refused.
    weights: path of the model's initial weights, instead of weights that the factory draws: a
        safetensors file, the index of several, a folder of Hugging Face's `save_pretrained`, or of
        a run. The factory may then make its model on the meta device.
    clip_norm: maximum norm of the gradient of an optimizer's step; None for no limit.
    precision: full, or bf16 or fp16: forward and loss under torch's autocast; weights, gradients
        and measurements stay in their precision. fp16 scales the loss, and skips steps whose
        gradients are not finite (`dure.tasks.loss_scaling`).
    ema: decay of an exponential average of the weights in every step, or round, such as 0.999. The
        average is then evaluated and returned by the run; None takes none.
    compile: whether torch's compiler compiles the calls of the model; a text names its backend.
    unfreeze: optimizer step from which parameters are trained, by name, in which * matches any
    text:
        {"body.*": 100}. Before that step they stay frozen; the others are trained from the start.
        In a
        federation it is the round.
    validation: examples like those of `test`, or a share of the training data between 0 and 1, such
        as 0.1, which is drawn under the run's seed and excluded from training. They are measured as
        validation_<metric>; early stopping and the choice of the best model use them, and never
        test
        data. None: no validation.
    show_examples: whether run folders and reports may show a few of the test examples, if they are
        pictures. False shows none. Data with an owner are never shown: over a network, examples
            with
        keys, or examples that a strategy protects (`dure.run.model_predictions`).
    parse: parse(row) makes the inputs of an example, in the form of the data, from a new row, for
    `dure
        predict`: from a value of JSON, or from a row of a table, a dict of texts by column. None:
            rows
        are like the examples.
    dtype: dtype to which floating-point inputs are cast, such as torch.float32; targets never are.
        None: inputs are passed to the model unchanged.
    trainer: trainers of another library, which train the clients of a federation in place of dure's
        own loop (`dure.client.patch`, `dure.simulate`); None is dure's loop.
    adapter: low-rank adapters that are trained in place of the model's own weights, which are
        frozen: `dure.LoRA(rank=8, targets="q_proj|v_proj")`, or its text. None trains the model.
    """

    model: Callable[[], nn.Module]
    loss: Any
    train: Any = None
    test: Any = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = SGD
    metrics: Mapping[str, Metric] | None = None
    name: str = "task"
    reference: Mapping[str, Any] | None = field(default=None, compare=False)
    lr_schedule: LRSchedule | None = None
    eval_batch_size: int = 1_000
    metric_memory: int = 2**30
    features: Sequence[str] | None = None
    weights: Path | None = None
    clip_norm: float | None = None
    precision: Precision = "full"
    ema: float | None = None
    compile: bool | str = False
    unfreeze: Mapping[str, int] | None = None
    validation: Any = None
    show_examples: bool = False
    dtype: torch.dtype | None = None
    adapter: LoRA | None = None
    parse: Callable[[Any], Any] | None = None
    trainer: ClientTrainers | None = field(default=None, compare=False)

    @classmethod
    def from_trainer(cls, trainer: Any, **changes: Any) -> Task:
        """Return the task of a transformers.Trainer: its model, data, loss and optimizer.

        `changes` are fields of the task that differ from the trainer's
        (`dure.trainers.hugging_face_task`).

        Raises ValueError for a part of the trainer that a task cannot take over, by its name.
        """
        made: Task = catalog.task_maker("from_trainer")(trainer, **changes)
        return made

    @classmethod
    def from_lightning(cls, module: Any, datamodule: Any = None, **changes: Any) -> Task:
        """Return the task of a LightningModule and its data (`dure.trainers.lightning_task`).

        Raises ValueError for a part of the module that a task cannot take over, by its name.
        """
        made: Task = catalog.task_maker("from_lightning")(module, datamodule, **changes)
        return made

    def __post_init__(self) -> None:
        if self.loss is None:
            object.__setattr__(self, "loss", OwnLoss())
        for name in ("model", "loss", "optimizer"):
            # A module can be called: a model would pass for its factory, and all workers would
            # train the same model. A loss may be a module, since nothing in it is trained.
            if not callable(getattr(self, name)) or (
                isinstance(getattr(self, name), (nn.Module, torch.optim.Optimizer))
                and name != "loss"
            ):
                raise ValueError(
                    f"Task({name}=...) has to be a function that returns a new one, not an instance"
                )
        if isinstance(self.loss, type):
            raise ValueError(
                f"Task(loss={self.loss.__name__}) is a class: give an instance, "
                f"{self.loss.__name__}()"
            )
        if self.parse is not None and not callable(self.parse):
            raise ValueError(f"Task(parse={self.parse!r}) has to be a function: row -> inputs")
        if self.lr_schedule is not None and not callable(self.lr_schedule):
            raise ValueError(
                f"Task(lr_schedule={self.lr_schedule!r}) has to be a function of the step: step -> "
                f"factor"
            )
        for name in ("eval_batch_size", "metric_memory"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"Task({name}={size!r}) has to be an integer, 1 or more")
        if self.dtype is not None and not (
            isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        ):
            raise ValueError(
                f"Task(dtype={self.dtype!r}) has to be a floating-point dtype, such as "
                f"torch.float32"
            )
        object.__setattr__(self, "adapter", adapter_of(self.adapter))
        check_learning(self)
        if self.metrics is not None:
            check_metrics(self.metrics)
        check_path("weights", self.weights, optional=True)
        if self.weights is not None:
            # Absolute: ranks, and runs that go on, may start in another folder.
            object.__setattr__(self, "weights", Path(self.weights).expanduser().resolve())
        # The class is frozen for its users; here the data are converted to the common form.
        object.__setattr__(self, "train", _training_data(self.train))
        test = None if self.test is None else as_examples(self.test, measures=True)
        object.__setattr__(self, "test", test)
        object.__setattr__(self, "validation", _validation(self.validation))
        if isinstance(self.loss, OwnLoss):
            self._call_by_name()

    def _call_by_name(self) -> None:
        """Call the model with the columns of a dict, labels included, to compute the loss."""
        if not isinstance(self.model, KeywordModelFactory):
            object.__setattr__(self, "model", KeywordModelFactory(self.model))
        for name in ("train", "test", "validation"):
            examples = getattr(self, name)
            if isinstance(examples, (DatasetExamples, RankDataFactory)):
                object.__setattr__(self, name, examples.with_labels())

    def new_model(self) -> nn.Module:
        """Return a new model with the task's adapter: the factory for `dure.load_run`."""
        model = self.model()
        if self.adapter is not None:
            self.adapter.apply(model)
        return model

    def on(self, device: torch.device) -> Self:
        """Return the task for a model on `device`: the tensors of its loss are moved there."""
        loss = on_device(self.loss, device)
        return self if loss is self.loss else replace(self, loss=loss)

    @cached_property
    def measures(self) -> Mapping[str, Metric]:
        """Metrics in use: the given metrics, or the accuracy if targets are class indices."""
        if self.metrics is not None:
            return self.metrics
        # A single example shows the kind of the targets; from the test data if there are any.
        data: Examples = self.test if self.test is not None else self.train
        if not len(data):
            return {}
        _, targets = data.batch(torch.tensor([data.first]))
        is_class_index = (
            isinstance(targets, Tensor)
            and not targets.is_floating_point()
            and targets.dtype != torch.bool
        )
        return {"accuracy": class_accuracy} if is_class_index else {}


def _validation(asked: Any) -> Examples | float | None:
    """Return examples in the common form, or the share of the training data to take.

    Raises ValueError for any other value.
    """
    if asked is None:
        return None
    if not isinstance(asked, (int, float)):
        return as_examples(asked, measures=True)
    if isinstance(asked, bool) or not 0 < asked < 1:
        raise ValueError(
            f"Task(validation={asked!r}): give a fraction of the training data between 0 and 1, "
            "such as 0.1, or examples"
        )
    return float(asked)


def _training_data(train: Any) -> Examples:
    """Return the training data in the common form."""
    if train is None:
        return NoExamples()
    # A class can be called too, and some datasets can.
    if callable(train) and not isinstance(train, type) and not hasattr(train, "__getitem__"):
        return RankDataFactory(train)
    return as_examples(train)

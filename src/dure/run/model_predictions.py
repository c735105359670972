"""Predictions of the trained model: its confusion matrix, and a few of the test examples.

If a validation set chose a best model, the predictions are of the best model.

    confusion[true][said]    test examples of a class, by the predicted class
    recall of a class        correct predictions over examples of the class
    precision                correct predictions over predictions of the class

Written into the run folder as answers.json when the run has ended, if the task has test data, the
targets are class indices, and the outputs of an example are scores of at most 50 classes. The work
is bounded by operations, not by a clock: the same run writes the same numbers.

Pictures are test examples themselves. A folder may be given to others, so pictures are written only
if the task permits it (`Task.show_examples`), and never if data belong to somebody: over a network,
if examples have an owner, or if the strategy protects them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dure.contracts.fresh_model import examples_for
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.data.examples import Examples
from dure.errors import described
from dure.machine.devices import device_of_model, to_device
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.disk import write_atomically
from dure.record.png import strip
from dure.record.run import Run
from dure.tasks.flops import forward_flops
from dure.tasks.modes import in_mode

MOST_CLASSES = 50
"""Most classes of a confusion matrix; a table of a language model's words would be unreadable."""

MOST_EXAMPLES = 10_000
MOST_FLOPS = 1e12
"""Bound on the work of this second evaluation: seconds on any machine."""

FIRST = 12
"""Number of pictures of the first test examples, and of wrongly classified examples."""

SIDE = range(4, 257)
"""Valid height and width of a picture in pixels."""

FILE = "answers.json"
FOLDER = "answers"


@dataclass(frozen=True)
class ClassPredictions:
    """Predictions for the first n of `of` test examples.

    targets, said: true and predicted class indices, int64 of shape (n,). classes: names. of: number
    of test examples.
    """

    targets: Tensor
    said: Tensor
    classes: Sequence[str]
    of: int

    def confusion(self) -> list[list[int]]:
        """Return the confusion matrix: counts by true class and predicted class."""
        number = len(self.classes)
        cells = torch.bincount(self.targets * number + self.said, minlength=number * number)
        rows: list[list[int]] = cells.reshape(number, number).tolist()
        return rows


def write_answers(run: Run, task: Task, strategy: Strategy, world: World) -> None:
    """Write answers.json, and pictures next to it, into the folder of an ended run.

    Writes nothing if the model is incomplete or no classifier. An error here becomes a warning,
    because the run itself has ended successfully.
    """
    if (
        run.folder is None
        or strategy.run_traits.spares_memory
        or run.summary.get("weights_elsewhere")
    ):
        return
    before = generators_state()
    try:
        model = run.best_model
        _write(
            run.folder,
            run.model if model is None else model,
            task,
            may_show(task, strategy, world),
        )
    # The user's own model and data may raise anything, and the disk may be full.
    except Exception as error:
        warnings.warn(f"{run.folder / FILE} was not written: {described(error)}", stacklevel=2)
    finally:
        restore_generators(before)


def may_show(task: Task, strategy: Strategy, world: World) -> bool:
    """Return whether examples may be visible to every reader of the run folder."""
    owned = any(data is not None and data.keys is not None for data in (task.train, task.test))
    return (
        task.show_examples and not world.serves and not strategy.run_traits.protects and not owned
    )


def _write(folder: Path, model: nn.Module, task: Task, shows: bool) -> None:
    examples = None if task.test is None else examples_for(task)[1]
    # The test set by name: a validation set may come with it.
    test = None if examples is None else examples.sets().get("test")
    answers = None if test is None else _answers(model, test, task.eval_batch_size)
    if test is None or answers is None:
        return
    pictures = _pictures(folder / FOLDER, test, answers) if shows else []
    told = {
        "examples": len(answers.targets),
        "of": answers.of,
        "classes": list(answers.classes),
        "confusion": answers.confusion(),
        "pictures": pictures,
    }
    # Written last, because it names the pictures.
    write_atomically(folder / FILE, json.dumps(told).encode())


@torch.no_grad()
def _answers(model: nn.Module, test: Examples, batch: int) -> ClassPredictions | None:
    """Return the model's predictions for the test data; None if the model predicts no classes."""
    device = device_of_model(model)
    with in_mode(model, training=False):
        first = to_device(test.batch(torch.tensor([test.first])), device)
        classes = _classes(model(first[0]), first[1], test)
        if classes is None:
            return None
        count = _count(model, first[0], len(test))
        targets = []
        said = []
        for indices in torch.split(torch.arange(count), batch):
            inputs, truth = to_device(test.batch(indices), device)
            targets.append(truth.long().cpu())
            said.append(model(inputs).argmax(dim=1).cpu())
    truths = torch.cat(targets)
    # Targets that the loss ignores belong to no class.
    known = (truths >= 0) & (truths < len(classes))
    return ClassPredictions(truths[known], torch.cat(said)[known], classes, len(test))


def _classes(outputs: Any, targets: Any, test: Examples) -> Sequence[str] | None:
    """Return the names of the classes that the outputs score; None for other outputs."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    whole = not targets.is_floating_point() and not targets.is_complex()
    indices = targets.ndim == 1 and whole and targets.dtype != torch.bool
    number = outputs.shape[1] if outputs.ndim == 2 else 0
    if not indices or not 2 <= number <= MOST_CLASSES:
        return None
    names = test.classes
    return names if names is not None and len(names) == number else list(map(str, range(number)))


def _count(model: nn.Module, inputs: Any, there: int) -> int:
    """Return how many examples are evaluated."""
    affordable = MOST_FLOPS / max(forward_flops(model, inputs), 1.0)
    return max(1, min(there, MOST_EXAMPLES, int(affordable)))


def _pictures(folder: Path, test: Examples, answers: ClassPredictions) -> list[dict[str, Any]]:
    """Write pictures of examples, and return their entries; [] if the inputs are no pictures."""
    wrong = (answers.said != answers.targets).nonzero().flatten()
    first = torch.arange(min(FIRST, len(answers.targets)))
    places = torch.cat([first, wrong[wrong >= FIRST][:FIRST]])
    # Positions equal example indices only if no target was ignored.
    if len(answers.targets) < min(answers.of, MOST_EXAMPLES) or not len(places):
        return []
    inputs, _ = test.batch(places)
    if not _are_pictures(inputs):
        return []
    values = inputs.double().cpu().numpy()
    low = float(values.min())
    high = float(values.max())
    folder.mkdir(exist_ok=True)
    told = []
    for number, (place, picture) in enumerate(zip(places.tolist(), values, strict=True)):
        name = f"{number:03d}.png"
        write_atomically(folder / name, strip([picture[None]], low, high))
        label = int(answers.targets[place])
        said = int(answers.said[place])
        told.append({"file": name, "example": place, "label": label, "said": said})
    return told


def _are_pictures(inputs: Any) -> bool:
    """Return whether the inputs have shape (n, 1 or 3 channels, height, width)."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or inputs.is_complex():
        return False
    _, channels, height, width = inputs.shape
    return channels in (1, 3) and height in SIDE and width in SIDE

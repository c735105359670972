"""Predict with a run's model: for the inputs in a file, or for examples of the task.

A run folder is data, and so is an input: arrays are read from npy, csv, JSON and safetensors, none
of which can contain code. Inputs of more than one tensor are rows (`dure.run.input_rows`). If the
run's loss is torch's cross-entropy, outputs are scores of classes, and their softmax is returned as
probabilities.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dure.contracts.fresh_model import examples_for
from dure.contracts.task import Task
from dure.data.examples import Examples
from dure.errors import RunFolderError
from dure.record.run import Run, load_run
from dure.run.existing_runs import task_of
from dure.run.input_rows import CellTable, FileTensors, cast, is_structured, parse_rows, row_inputs
from dure.tasks.known_losses import cross_entropy_of
from dure.tasks.modes import in_mode

_BATCH = 256
"""Inputs of a single call of the model."""

_EXAMPLE = re.compile(r"(test|train):(\d+)(?::(\d+))?")
"""Pattern of examples of the task: test:0, or the range test:0:10."""


@dataclass(frozen=True)
class PredictedOutputs:
    """Predictions of a model.

    outputs: of all inputs, along the first dimension. probabilities: of classes, float64; None if
    the outputs are no scores of classes. classes: their names, or their numbers as text. of: text
    that says which of the run's two models was used; empty if the run has a single model.
    """

    outputs: Tensor
    probabilities: Tensor | None = None
    classes: Sequence[str] = ()
    of: str = ""

    def best(self, place: int, most: int = 3) -> list[tuple[str, float]]:
        """Return the `most` likeliest classes of an input, each with its probability."""
        if self.probabilities is None:
            return []
        values, indices = self.probabilities[place].topk(min(most, len(self.classes)))
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        return [(self.classes[index], value) for index, value in pairs]


def predict(
    folder: Path, source: str, task: Task | str | None = None, last: bool = False
) -> PredictedOutputs:
    """Return the predictions of the model of the ended run in `folder`.

    Args:
        folder: run folder.
        source: a file (npy, csv, json, safetensors), - for JSON on standard input, or examples of
            the task, test:0 or test:0:10. Inputs of more than one tensor are JSON objects, or rows
            of a table by the names of its columns.
        task: as in `dure.resume`.
        last: use the last model, even if a validation set chose a best model.

    Raises:
        ValueError: for an input that does not fit the model.
        RunFolderError: for a folder without a complete model.
    """
    whole = task_of(folder, task)
    run = load_run(folder, whole.new_model)
    elsewhere = run.summary.get("weights_elsewhere")
    if elsewhere:
        raise RunFolderError(
            f"the model of {folder} is incomplete: {', '.join(map(str, elsewhere))} stay with the "
            "clients, each of which has its own"
        )
    # Examples come in the dtype of the training.
    train, test = examples_for(whole)
    model = _model_of(run, last)
    outputs = torch.cat(list(_outputs(model, _inputs(whole, train, test, source))))
    return replace(_told(whole, outputs), of=which_model(run.summary, last))


def _model_of(run: Run, last: bool) -> nn.Module:
    best = None if last else run.best_model
    return run.model if best is None else best


def which_model(summary: Mapping[str, Any], last: bool) -> str:
    """Return a text that says which of a run's two models is used; empty if both are the same."""
    chosen = summary.get("best_model")
    if not isinstance(chosen, Mapping) or chosen.get("step") == summary.get("steps"):
        return ""
    unit = summary.get("unit")
    if last:
        return (
            f"the last model, from {unit} {summary.get('steps')}; the best is from {chosen['step']}"
        )
    return f"the best model, from {unit} {chosen['step']}; --last uses that from {summary['steps']}"


def _outputs(model: nn.Module, inputs: Any) -> Iterator[Tensor]:
    leaves = tree_leaves(inputs)
    with torch.inference_mode(), in_mode(model, training=False):
        for start in range(0, len(leaves[0]), _BATCH):
            some = tree_map(lambda leaf, at=start: leaf[at : at + _BATCH], inputs)
            try:
                outputs = model(some)
            # Errors that the user's own model raises for an unsuitable input.
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                raise ValueError(f"the model rejects this input: {error}") from error
            scores = _scores(outputs)
            if not isinstance(scores, Tensor) or scores.ndim < 1:
                raise ValueError(
                    f"the model returns {type(outputs).__name__}, not a tensor of outputs"
                )
            yield scores


def _scores(outputs: Any) -> Any:
    """Return the outputs; for models of Hugging Face, the logits."""
    return outputs.get("logits") if isinstance(outputs, Mapping) else outputs


def _told(task: Task, outputs: Tensor) -> PredictedOutputs:
    loss = cross_entropy_of(task.loss)
    if loss is None or outputs.ndim != 2 or not outputs.is_floating_point():
        return PredictedOutputs(outputs)
    scores = outputs.double()
    probabilities = scores.softmax(dim=1) if loss.of_scores else scores.exp()
    names = task.train.classes
    fits = names is not None and len(names) == outputs.shape[1]
    return PredictedOutputs(
        outputs,
        probabilities,
        list(names) if fits and names is not None else list(map(str, range(outputs.shape[1]))),
    )


# Inputs


def _inputs(task: Task, train: Examples, test: Examples | None, source: str) -> Any:
    chosen = _EXAMPLE.fullmatch(source)
    if chosen is not None and not Path(source).exists():
        return _examples(train, test, chosen)
    content = _read(source)
    data = train if len(train) else test
    if data is None:
        raise ValueError("the task has no data, which define the form of an input")
    example = _example(data)
    if task.parse is not None:
        content = parse_rows(task.parse, content)
    if task.parse is not None or is_structured(data, example):
        return row_inputs(data, example, content, source)
    return _fitted(_array(content, task.features, source), example, source)


def _examples(train: Examples, test: Examples | None, chosen: re.Match[str]) -> Any:
    """Return the inputs of examples of the task."""
    name, first, end = chosen.groups()
    data = test if name == "test" else train
    if data is None:
        raise ValueError("the task has no test data: name training examples, such as train:0")
    start = int(first)
    stop = start + 1 if end is None else int(end)
    if not start < stop <= len(data):
        raise ValueError(
            f"{chosen.string} does not exist: the task has {len(data)} {name} examples, counted "
            "from 0"
        )
    return data.batch(torch.arange(start, stop))[0]


def _example(data: Examples) -> Any:
    """Return the inputs of an example of the task."""
    inputs = data.batch(torch.tensor([data.first]))[0]
    return tree_map(lambda leaf: leaf[0], inputs)


def _array(content: Any, features: Sequence[str] | None, source: str) -> Any:
    """Return the content of a file as an array. features: order of a table's columns."""
    if isinstance(content, FileTensors):
        if len(content) != 1:
            raise ValueError(
                f"{source} contains {len(content)} tensors, but has to contain only the inputs"
            )
        return next(iter(content.values()))
    if isinstance(content, CellTable):
        rows: Any = content.cells
        if content.names is not None and features is not None:
            rows = [_chosen(content.names, row, features, source) for row in rows]
        try:
            return numpy.asarray(rows, dtype=numpy.float64)
        except ValueError as error:
            raise ValueError(f"cannot read {source}: {error}") from error
    objects = content if isinstance(content, list) else [content]
    if features is None or not objects or not all(isinstance(row, Mapping) for row in objects):
        return content
    return [_chosen(list(row), list(row.values()), features, source) for row in objects]


def _chosen(
    names: Sequence[str], row: Sequence[Any], features: Sequence[str], source: str
) -> list[Any]:
    """Return the cells of a row that are features of the task, in the order of the features."""
    absent = [name for name in features if name not in names]
    if absent:
        raise ValueError(
            f"{source} has no {', '.join(absent)}: the task's features are {', '.join(features)}"
        )
    return [row[names.index(name)] for name in features]


def _fitted(array: Any, example: Tensor, source: str) -> Tensor:
    """Return the inputs in the model's shape, for several examples or for a single example."""
    try:
        # Through numpy, because torch would read lists of JSON as float32 and lose digits.
        given = torch.as_tensor(array if isinstance(array, Tensor) else numpy.asarray(array))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{source} does not contain an array of numbers: {error}") from error
    given = cast(given, example, source)
    shape = tuple(example.shape)
    if tuple(given.shape[1:]) == shape and given.ndim == len(shape) + 1 and len(given):
        return given
    if tuple(given.shape) == shape:
        return given[None]
    # A table has a flat row for each example, such as the pixels of a picture.
    if given.ndim == 2 and len(given) and given.shape[1] == example.numel():
        return given.reshape(len(given), *shape)
    if given.ndim == 1 and given.numel() == example.numel():
        return given.reshape(1, *shape)
    raise ValueError(
        f"{source} has the shape {tuple(given.shape)}, but an example of the task has {shape}: "
        "give one example, or several along a first axis"
    )


def _read(source: str) -> Any:
    """Return the content of a file. Raises ValueError if it has no array, or cannot be read."""
    if source == "-":
        return _parsed(sys.stdin.read(), "standard input")
    path = Path(source)
    readers: dict[str, Callable[[], Any]] = {
        ".npy": lambda: numpy.load(path, allow_pickle=False),
        ".csv": lambda: _table(path),
        ".json": lambda: _parsed(path.read_text(), source),
        ".safetensors": lambda: FileTensors(load_file(path)),
    }
    if path.suffix not in readers:
        raise ValueError(
            f"{source} is neither a file of {', '.join(readers)}, nor - for JSON on standard "
            f"input, nor examples of the task, such as test:0 or test:0:10"
        )
    try:
        return readers[path.suffix]()
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror or error}") from error
    except (ValueError, EOFError, SafetensorError) as error:
        raise ValueError(f"cannot read {source}: {error}") from error


def _parsed(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from error


def _table(path: Path) -> CellTable:
    """Return the cells of a table; a first line with text names the columns."""
    with path.open(newline="") as lines:
        rows = [row for row in csv.reader(lines) if row]
    if not rows:
        raise ValueError("the file is empty")
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(f"its lines have {min(widths)} to {max(widths)} cells")
    first = [cell.strip() for cell in rows[0]]
    if all(map(_is_number, first)):
        return CellTable(None, rows)
    return CellTable(first, rows[1:])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True

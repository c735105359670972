"""The built-in tasks, and the loading of a task by its name.

A reference to a task is the name of a built-in task (`digits`), or the location of the user's own:
`path/to/file.py:name` or `package.module:name`, where the name is a `Task` or a function that
returns a task. The parameters of the function are the task's options, on the command line its
flags. `dure.references` finds and executes a user's file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
import typing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from dure import references
from dure.arguments import check_value, shown
from dure.catalog import TASKS as BUILT_IN
from dure.contracts.task import Task
from dure.data import heart as heart_data
from dure.data.digits import read_digits
from dure.data.examples import Examples
from dure.data.idx import read_idx
from dure.data.shakespeare import read_shakespeare
from dure.errors import DataError, exit_is_a_failure, suggestion
from dure.tasks import models

TaskFactory = Callable[..., Task]


def digits(model: Literal["mlp", "cnn", "logistic"] = "mlp", lr: float = 0.1) -> Task:
    """1,797 handwritten digits of 8x8 pixels; they come with scikit-learn, no download.

    Args:
        model: mlp (64-200-200-10), cnn (the FedAvg paper's, for 8x8 pixels) or logistic.
        lr: learning rate of SGD.
    """
    train, test = read_digits()
    factory = _chosen(
        model,
        {
            "mlp": partial(models.TwoNN, features=64),
            "cnn": partial(models.CNN, size=8),
            "logistic": partial(models.LogisticRegression, features=64, classes=10),
        },
    )
    return Task(
        factory,
        F.cross_entropy,
        train,
        test,
        partial(torch.optim.SGD, lr=lr),
        name="digits",
        show_examples=True,
    )


def mnist(
    data: Path, model: Literal["2nn", "cnn", "logistic", "resnet"] = "cnn", lr: float = 0.1
) -> Task:
    """70,000 handwritten digits of 28x28 pixels.

    Scaled to [0, 1] and standardised (mean 0.1307, deviation 0.3081).

    Args:
        data: folder of the four IDX files, with gzip or without.
        model: 2nn and cnn are the FedAvg paper's (784-200-200-10; 5x5 convolutions), logistic, or
            resnet (8 layers).
        lr: learning rate of SGD.
    """
    train, test = _idx_images(
        data,
        0.1307,
        0.3081,
        [str(digit) for digit in range(10)],
        "http://yann.lecun.com/exdb/mnist/",
    )
    return _image_task("mnist", train, test, model, lr)


def fashion_mnist(
    data: Path, model: Literal["2nn", "cnn", "logistic", "resnet"] = "cnn", lr: float = 0.1
) -> Task:
    """70,000 garments of 28x28 pixels.

    Scaled to [0, 1] and standardised (mean 0.2860, deviation 0.3530).

    Args:
        data: folder of the four IDX files, with gzip or without.
        model: 2nn and cnn are the FedAvg paper's (784-200-200-10; 5x5 convolutions), logistic, or
            resnet (8 layers).
        lr: learning rate of SGD.
    """
    garments = [
        "T-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ]
    train, test = _idx_images(
        data, 0.2860, 0.3530, garments, "https://github.com/zalandoresearch/fashion-mnist"
    )
    return _image_task("fashion-mnist", train, test, model, lr)


def heart(data: Path, lr: float = 0.1) -> Task:
    """Heart disease in 920 patients of four hospitals; logistic regression on 29 columns.

    Args:
        data: folder of processed.cleveland.data, .hungarian, .switzerland and .va.
        lr: learning rate of SGD.
    """
    _require(
        data,
        [(file,) for file in heart_data.FILES],
        "https://archive.ics.uci.edu/dataset/45/heart+disease",
    )
    train, test = heart_data.read_heart(data)
    factory = partial(models.LogisticRegression, features=len(heart_data.FEATURES), classes=2)
    return Task(
        factory, F.cross_entropy, train, test, partial(torch.optim.SGD, lr=lr), name="heart"
    )


def shakespeare(
    data: Path,
    model: Literal["lstm", "transformer"] = "lstm",
    sequence_length: int = 80,
    lr: float | None = None,
    width: int | None = None,
) -> Task:
    """The next character, in the plays of Shakespeare or in any plain text.

    Args:
        data: folder of plays in the Moby format (NAME<TAB>line), where each speaking role is a
            client; or a text file.
        model: lstm is the FedAvg paper's, trained by SGD; transformer has 4 layers and 4 heads,
            trained by AdamW.
        sequence_length: characters of an example.
        lr: learning rate; by default 1.0 for the lstm and 0.001 for the transformer.
        width: units of a layer; by default 256 for the lstm and 128 for the transformer.
    """
    if width is not None and width < 1:
        raise ValueError(f"width is {width}, but it has to be 1 or more")
    text = read_shakespeare(data, sequence_length)
    wide: dict[str, Any] = {} if width is None else {"width": width}
    factory = _chosen(
        model,
        {
            "lstm": partial(models.CharLSTM, text.vocabulary, **wide),
            "transformer": partial(
                models.Transformer, text.vocabulary, context=sequence_length, **wide
            ),
        },
    )
    optimizer = (
        partial(torch.optim.SGD, lr=1.0 if lr is None else lr)
        if model == "lstm"
        else partial(torch.optim.AdamW, lr=1e-3 if lr is None else lr)
    )
    return Task(factory, F.cross_entropy, text.train, text.test, optimizer, name="shakespeare")


def _image_task(name: str, train: Examples, test: Examples, model: str, lr: float) -> Task:
    factory = _chosen(
        model,
        {
            "2nn": models.TwoNN,
            "cnn": models.CNN,
            "logistic": partial(models.LogisticRegression, features=784, classes=10),
            "resnet": partial(models.ResNet, in_channels=1),
        },
    )
    optimizer = partial(torch.optim.SGD, lr=lr)
    return Task(factory, F.cross_entropy, train, test, optimizer, name=name, show_examples=True)


def _chosen(model: str, choices: dict[str, Callable[[], nn.Module]]) -> Callable[[], nn.Module]:
    if model not in choices:
        raise ValueError(f"there is no model {model!r}{suggestion(model, choices)}")
    return choices[model]


def _idx_images(
    folder: Path, mean: float, deviation: float, classes: Sequence[str], published: str
) -> tuple[Examples, Examples]:
    """Return (training, test) images float32 (n, 1, 28, 28), standardised by these statistics."""
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    names = [*(f"train-{kind}" for kind in kinds), *(f"t10k-{kind}" for kind in kinds)]
    files = _require(folder, [(name, f"{name}.gz") for name in names], published)
    train, test = (
        _labelled_images(images, labels, mean, deviation, classes)
        for images, labels in (files[:2], files[2:])
    )
    return train, test


def _labelled_images(
    image_file: Path, label_file: Path, mean: float, deviation: float, classes: Sequence[str]
) -> Examples:
    images = read_idx(image_file, dimensions=3)
    labels = read_idx(label_file, dimensions=1).long()
    if len(images) != len(labels) or not len(images):
        raise DataError(
            f"{image_file} has {len(images)} images, but {label_file} has {len(labels)} labels"
        )
    if images.shape[1:] != (28, 28):
        raise DataError(
            f"{image_file} has images of {images.shape[1]}x{images.shape[2]} pixels, expected 28x28"
        )
    # Checked here, with the name of the file: on a GPU a label too large would abort the process.
    if not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DataError(
            f"{label_file} has labels {int(labels.min())} to {int(labels.max())}, expected 0 to 9"
        )
    # In place: one float copy of the images, not four.
    pixels = images.float().div_(255).sub_(mean).div_(deviation)
    return Examples(pixels.unsqueeze(1), labels, classes=classes)


def _require(folder: Path, files: Sequence[tuple[str, ...]], published: str) -> list[Path]:
    """Return the files, each by the first of its names that is in the folder.

    published: where the files can be downloaded. Raises DataError with a list of the missing files.
    """
    found = [
        next((folder / name for name in names if (folder / name).is_file()), None)
        for names in files
    ]
    missing = [" or ".join(names) for names, file in zip(files, found, strict=True) if file is None]
    if missing:
        where = (
            f"{folder} lacks"
            if folder.is_dir()
            else f"there is no folder {folder}; it has to contain"
        )
        raise DataError(f"{where} {', '.join(missing)}; they are published at {published}")
    return [file for file in found if file is not None]


# The same names as in dure.catalog, which the command line reads before torch is loaded.
_FACTORIES: dict[str, TaskFactory] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "heart": heart,
    "shakespeare": shakespeare,
}


def load_task(reference: str, **options: Any) -> Task:
    """Load the task named by `reference`, with `options`; both are recorded in `task.reference`.

    reference: a built-in name, `path/to/file.py:name` or `package.module:name`. Raises ValueError
    if there is no such task, or for unknown or missing options; DataError if data are missing.
    """
    if not isinstance(reference, str):
        raise ValueError(f"load a task by its name, a str such as 'digits', not {shown(reference)}")
    found = task_factory(reference)
    if isinstance(found, Task):
        if options:
            raise ValueError(f"the task {reference} takes no options: leave out {_flags(options)}")
        task = found
    else:
        options = _bound(found, reference, options)
        with exit_is_a_failure(f"the task {reference}", "its function"):
            task = found(**options)
    if not isinstance(task, Task):
        raise ValueError(f"{reference} returned {_kind(task)}, not a dure.Task")
    # Also for a Task object, which may have been made without a reference.
    return dataclasses.replace(task, reference=_record(reference, options))


def task_factory(reference: str) -> TaskFactory | Task:
    """Return the object that `reference` names: a function that returns a Task, or a Task.

    Raises ValueError if there is no such name, file, module or attribute, or if it is neither.
    """
    # No colon: a built-in name, or a file without the name of a task.
    if ":" not in reference:
        return _built_in(reference)
    found = references.find(reference, _may_be_task)
    if not isinstance(found, Task) and not callable(found):
        raise ValueError(
            f"{reference} is {_kind(found)}, neither a dure.Task nor a function that returns one"
        )
    return typing.cast("TaskFactory | Task", found)


def _may_be_task(value: Any) -> bool:
    # For suggestions: a class is callable too, but is usually imported by the file.
    return isinstance(value, Task) or inspect.isfunction(value)


def _built_in(name: str) -> TaskFactory:
    # "fashion_mnist", the name in Python, is accepted too.
    known = name.replace("_", "-")
    if known in _FACTORIES:
        return _FACTORIES[known]
    if references.is_file(name):
        raise ValueError(
            f"{name} does not name a task: write {name}:NAME, where NAME is a dure.Task or a "
            "function that returns one"
        )
    raise ValueError(
        f"there is no task {name!r}{suggestion(name, BUILT_IN)}, or path/to/file.py:name"
    )


def _bound(factory: TaskFactory, reference: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for the factory, with absolute paths. Raises ValueError for misfits."""
    parameters = inspect.signature(factory).parameters.values()
    names = [
        parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
    ]
    # A function with **options checks names itself.
    takes_any = len(names) < len(parameters)
    for name in options:
        if name not in names and not takes_any:
            hint = suggestion(name, names) if names else ": it takes no options"
            raise ValueError(f"the task {reference} has no option {_flags([name])}{hint}")
    # Reported with the names of the flags, before the function itself fails.
    required = [parameter.name for parameter in parameters if _is_required(parameter)]
    missing = [name for name in required if name not in options]
    hints = hints_of(factory)
    if missing:
        flags = " ".join(
            f"{_flags([name])} {'DIR' if _is_path(hints.get(name)) else name.upper()}"
            for name in missing
        )
        raise ValueError(f"the task {reference} needs {flags}")
    for name, value in options.items():
        kind = hints.get(name)
        # A user's function may accept more than its hints, such as a text for a dtype; but for a
        # whole number never a fraction or NaN, which a file may contain.
        own = ":" in reference and not (isinstance(value, float) and _is_whole(kind))
        if kind is not None and not own and not _is_path(kind):
            check_value(name, value, kind)
    return {
        # Absolute, since a resumed run may start in another folder. A text for a path parameter
        # comes from config.json, or from Python.
        name: Path(value).expanduser().resolve()
        if isinstance(value, Path) or (isinstance(value, str) and _is_path(hints.get(name)))
        else value
        for name, value in options.items()
    }


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not variadic


def hints_of(factory: TaskFactory) -> dict[str, Any]:
    """Return the factory's type hints; {} if they cannot be evaluated, which is no error."""
    # A partial has no hints of its own.
    target = factory.func if isinstance(factory, functools.partial) else factory
    try:
        return typing.get_type_hints(target)
    # For example names that exist for type checkers only.
    except Exception:
        return {}


def _is_whole(hint: Any) -> bool:
    """Return whether a type is a whole number, or None."""
    kinds = {*typing.get_args(hint), *([] if typing.get_args(hint) else [hint])}
    return kinds - {type(None)} == {int}


def _is_path(hint: Any) -> bool:
    return hint is Path or Path in typing.get_args(hint)


def _record(reference: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the reference for another folder; None if JSON cannot represent the options."""
    place, colon, attribute = reference.rpartition(":")
    if colon:
        # A module that is not installed can be found from elsewhere only together with its folder.
        module = None if references.is_file(place) else sys.modules.get(place)
        place = references.resolved(place) if module is None else references.location_of(module)
        reference = f"{place}:{attribute}"
    written = {
        name: str(value) if isinstance(value, Path) else value for name, value in options.items()
    }
    try:
        # NaN is no JSON: other readers of config.json would reject it.
        json.dumps(written, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return {"name": reference, "options": written}


def _flags(names: typing.Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"an {kind}" if kind[0] in "AEIOUaeiou" else f"a {kind}"

"""The content of config.json (docs/run-folder.md): the request of a run, written and read again."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from dure import __version__
from dure.contracts.stop import Stop
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.errors import RunFolderError
from dure.memory.weight_files import digest_of
from dure.record.run import RunFolder
from dure.record.settings import without_sums
from dure.run.job import Job
from dure.run.registry import encode
from dure.run.task_checks import learning_of


class TaskRequest(msgspec.Struct):
    """A task by its name."""

    name: str | None
    options: dict[str, Any]
    weights: str | None = None
    """Digest of the model's initial weights, if the user gave them."""
    weights_from: str | None = None
    """Path of the initial weights."""
    validation: float | None = None
    """Share of the training data that is the validation set, if the set is a share."""
    learning: dict[str, Any] = {}
    """Learning options of the task (`dure.contracts.training_options`), if it sets any."""


class RunRequest(msgspec.Struct):
    """The request in config.json, as far as a resumed run needs it."""

    label: str
    task: TaskRequest
    strategy: dict[str, Any]
    world: dict[str, Any]
    stop: Stop
    seed: int
    evaluate_every: int | None
    checkpoint_every: int | None
    peak_flops: float | None = None
    """Operations per second of a rank's device, if the user gave them."""
    run: str = ""
    versions: dict[str, str] = {}


def _weights_of(task: Task) -> dict[str, Any]:
    """Return the entries of config.json about given initial weights; {} without such weights."""
    if task.weights is None:
        return {}
    return {"weights": digest_of(task.weights), "weights_from": str(task.weights)}


def _validation_of(task: Task) -> dict[str, Any]:
    """Return the entry of config.json about a validation share; {} without a share."""
    return {"validation": task.validation} if isinstance(task.validation, float) else {}


def _learning_of(task: Task) -> dict[str, Any]:
    """Return the entry of config.json about learning options; {} if the task sets none."""
    asked = learning_of(task)
    return {"learning": asked} if asked else {}


def run_request_of(folder: Path) -> RunRequest:
    """Return the request of the run in `folder`; errors as in `run_request_in`."""
    return run_request_in(folder, without_sums(RunFolder.open(folder).read_json("config.json")))


def run_request_in(folder: Path, config: Mapping[str, Any]) -> RunRequest:
    """Return the request of the run in `folder`, from the content of its config.json.

    Raises RunFolderError if config.json is damaged.
    """
    try:
        asked = msgspec.convert(config, RunRequest)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{folder / 'config.json'} is damaged: {error}") from error
    for what, written in (("strategy", asked.strategy), ("world", asked.world)):
        if not isinstance(written.get("name"), str):
            raise RunFolderError(f"{folder / 'config.json'} is damaged: its {what} has no name")
    return asked


def config_of(job: Job, world: World, task: Task) -> dict[str, Any]:
    """Return the content of config.json: the request of the run.

    task: the task that was checked; ranks with data of their own have not counted them yet.
    """
    # A task without a name has to be given again to resume the run.
    reference: Mapping[str, Any] = task.reference or {"name": None, "options": {}}
    # A server does not know the partition of its clients' data.
    division = None if world.serves else job.strategy.division(task, job.seed)
    # Most runs are deterministic, and have no entry.
    repeats = {} if job.strategy.run_traits.deterministic else {"deterministic": False}
    return {
        "label": job.label,
        # Identifies the run, since another run may have the same request.
        "run": secrets.token_hex(8),
        "task": {
            # title is for people, name for loading the task again.
            "name": reference["name"],
            "options": dict(reference["options"]),
            "title": task.name,
            **_weights_of(task),
            **_validation_of(job.task),
            **_learning_of(task),
        },
        "strategy": encode(job.strategy),
        "world": encode(world),
        **repeats,
        "stop": msgspec.to_builtins(job.stop),
        "seed": job.seed,
        "evaluate_every": job.evaluate_every,
        "checkpoint_every": job.checkpoint_every,
        "parameters": job.parameters,
        "train_examples": len(task.train) if task.train.counted else None,
        "test_examples": len(task.test) if task.test is not None else 0,
        **({} if task.validation is None else {"validation_examples": len(task.validation)}),
        "classes": task.train.classes,
        "partition": division.as_dict() if division is not None else None,
        "versions": {
            "dure": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }

"""One run: a Task under a Strategy in a World."""

from __future__ import annotations

import dataclasses
import functools
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from dure import __version__
from dure.contracts.lr_schedule import check_schedule
from dure.contracts.stop import Stop
from dure.contracts.strategy import (
    Kind,
    Strategy,
    World,
    check_in,
    check_model,
    check_under,
    dwellings,
    label_in,
    seeded_model,
)
from dure.contracts.task import Task
from dure.data.examples import DatasetExamples
from dure.errors import RunFolderError
from dure.fleet.conditions import Conditions
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.run import Run, RunFolder
from dure.run.drive import Job, drive
from dure.run.registry import decode_strategy, decode_world, default_world, encode
from dure.tasks.builtin import load_task
from dure.tensors.buffers import load_passing_buffers, load_weights
from dure.worlds.processes.fork_server import server
from dure.worlds.torchrun.world import Torchrun

server.begins_with("dure.run.drive")  # what a rank runs

Progress = Callable[[dict[str, Any]], None]

HOMES: Mapping[Kind, str] = {
    "ranks": "ranks: Processes(n) or Torchrun()",
    "threads": "threads: Threads(n)",
    "clients": "clients: Simulated()",
}
"""The worlds of each kind, for errors."""


def _ignore(event: dict[str, Any]) -> None:
    pass


def train(
    task: Task,
    strategy: Strategy,
    world: World | None = None,
    stop: Stop | None = None,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    label: str | None = None,
    on_progress: Progress = _ignore,
) -> Run:
    """Trains `task` by `strategy` in `world` until `stop`.

    world: by default processes of this machine (or the torchrun job this is part of), one in this
        very process for `SingleWorker`; simulated clients for federated strategies.
    stop: by default ten epochs.
    seed: of the initial weights, the order of examples, sampling and dropout. Same seed and world,
        same bits.
    out: the run folder (docs/run-folder.md), which must be new or empty; None keeps everything in
        memory. In a torchrun job that is elastic (docs/elastic.md), a folder in which this very run
        was begun is gone on with.
    evaluate_every: steps or rounds between evaluations on the test data; by default an epoch, or a
        round.
    checkpoint_every: steps or rounds between checkpoints; by default at an evaluation every ten
        seconds or more.
    on_progress: called ten times a second or less, with a dict of unit, step, epoch, samples,
        seconds, loss, metrics, and evaluated: the step of the metrics.

    Raises ValueError for arguments that do not fit, before any work; RunFolderError for a folder in
    use; LossNotFiniteError, WorkerFailedError or PeerLostError for a run that failed, which keeps
    what it has written. Ctrl-C ends the run after its step: it returns what was done, and
    summary["ended"] is "interrupt".
    """
    world = world if world is not None else default_world(strategy)
    stop = stop if stop is not None else Stop(epochs=10)
    job, config = prepare(
        task, strategy, world, stop, seed, evaluate_every, checkpoint_every, label
    )
    folder = Path(out) if out is not None else None
    elastic = isinstance(world, Torchrun) and bool(world.elastic) and folder is not None
    if folder is not None and world.leads:
        (RunFolder.enter if elastic else RunFolder.create)(folder, config)
    return run_job(
        dataclasses.replace(job, folder=folder, resume=elastic, elastic=elastic), world, on_progress
    )


def resume(
    folder: str | Path,
    *,
    task: Task | None = None,
    stop: Stop | None = None,
    on_progress: Progress = _ignore,
) -> Run:
    """Goes on with the run in `folder` from its newest checkpoint, or from the start if it has
    none.

    The result has the same bits as if the run had never been interrupted. task: needed only for a
    task that was made in Python and not loaded by its name. stop: new limits, to train an ended run
    further.

    Raises RunFolderError if the folder holds no run, somebody is training in it, or its task cannot
    be found again.
    """
    path = Path(folder)
    asked = asked_of(path)
    if task is None:
        if not asked.task.name:
            raise RunFolderError(
                f"the task of {path} was made in Python: give it as dure.resume({str(path)!r}, "
                f"task=...)"
            )
        task = load_task(asked.task.name, **asked.task.options)
    strategy, world = decode_strategy(asked.strategy), decode_world(asked.world)
    job, new_config = prepare(
        task,
        strategy,
        world,
        stop if stop is not None else asked.stop,
        asked.seed,
        asked.evaluate_every,
        asked.checkpoint_every,
        asked.label,
    )
    if world.leads:
        RunFolder(path).begin_again(new_config)
    elastic = isinstance(world, Torchrun) and bool(world.elastic)
    return run_job(
        dataclasses.replace(job, folder=path, resume=True, elastic=elastic), world, on_progress
    )


class AskedTask(msgspec.Struct):
    """A task by its name."""

    name: str | None
    options: dict[str, Any]


class Asked(msgspec.Struct):
    """What config.json says was asked, as far as a resumed run needs it."""

    label: str
    task: AskedTask
    strategy: dict[str, Any]
    world: dict[str, Any]
    stop: Stop
    seed: int
    evaluate_every: int | None
    checkpoint_every: int | None


def asked_of(folder: Path) -> Asked:
    """What was asked of the run in `folder`. Raises RunFolderError if there is none, or its
    config.json is damaged."""
    config = RunFolder.open(folder).read_json("config.json")
    try:
        return msgspec.convert(config, Asked)
    except msgspec.ValidationError as error:
        raise RunFolderError(f"{folder / 'config.json'} is damaged: {error}") from error


def run_job(job: Job, world: World, on_progress: Progress) -> Run:
    """Does a prepared job; its folder, if it has one, exists already."""
    outcome = world.run(functools.partial(drive, job), on_progress)
    model = seeded_model(job.task, job.seed)
    if outcome.weights:
        load_weights(model, outcome.weights)
        load_passing_buffers(model, outcome.buffers)
    else:  # a rank of torchrun that holds a part of the model: rank 0 has the whole, here are shapes alone
        model.to("meta")
    return Run(model, outcome.history, outcome.summary, job.folder)


def prepare(
    task: Task,
    strategy: Strategy,
    world: World,
    stop: Stop,
    seed: int,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    label: str | None = None,
) -> tuple[Job, dict[str, Any]]:
    """The job and the content of config.json. Raises ValueError if anything asked does not fit
    together."""
    if world.kind not in dwellings(strategy):
        lives = ", or of ".join(HOMES[kind] for kind in dwellings(strategy))
        raise ValueError(
            f"{type(strategy).__name__} does not live in {type(world).__name__}; it needs a world "
            f"of {lives}"
        )
    for name, every in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if every is not None and every < 1:
            raise ValueError(f"{name} is {every}, but it counts {strategy.unit}s: at least 1")
    if world.name == "processes" and (world.workers or 1) > 1:
        server.start()  # it loads torch while this process looks at what is asked
    strategy.check(task, world.workers)
    check_in(strategy, world)
    if isinstance(world, Conditions):
        check_under(strategy, task, world)
    stop.check(strategy.unit)
    if stop.target:
        measured = (
            {"test_loss", *(f"test_{name}" for name in task.measures)}
            if task.test is not None
            else set()
        )
        for name in stop.target:
            if name not in measured:
                raise ValueError(
                    f"the target {name!r} is not measured; there is "
                    f"{', '.join(sorted(measured)) or 'no test data'}"
                )
    name = label_in(strategy, world.kind)
    conditions = world.told() if isinstance(world, Conditions) else []
    own = ", ".join([f"{name} ×{world.workers}" if (world.workers or 1) > 1 else name, *conditions])
    label = label or re.sub(r"(?<=\d)\.0(?!\d)", "", own)
    _check_first_example(task)
    model = seeded_model(task, seed)
    check_model(strategy, model, world.workers)
    if task.lr_schedule is not None:
        check_schedule(task.lr_schedule, task.optimizer(list(model.parameters())))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameter")
    job = Job(
        task,
        strategy,
        stop,
        seed,
        label,
        world.describe(),
        parameters,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
    )
    return job, config_of(job, world)


def _check_first_example(task: Task) -> None:
    """Raises ValueError if a dataset's is no pair; what else is wrong with it is said when it is
    learned from."""
    if not isinstance(task.train, DatasetExamples):
        return
    before = generators_state()
    try:
        task.train.batch(torch.tensor([0]))
    except ValueError:
        raise
    except Exception:
        return
    finally:
        restore_generators(before)


def config_of(job: Job, world: World) -> dict[str, Any]:
    """The content of config.json: what was asked."""
    task = job.task
    reference: Mapping[str, Any] = task.reference or {"name": None, "options": {}}
    division = job.strategy.division(task, job.seed)
    return {
        "label": job.label,
        "task": {
            "name": reference["name"],
            "options": dict(reference["options"]),
            "title": task.name,
        },
        "strategy": encode(job.strategy),
        "world": encode(world),
        **({} if getattr(job.strategy, "deterministic", True) else {"deterministic": False}),
        "stop": msgspec.to_builtins(job.stop),
        "seed": job.seed,
        "evaluate_every": job.evaluate_every,
        "checkpoint_every": job.checkpoint_every,
        "parameters": job.parameters,
        "train_examples": len(task.train),
        "test_examples": len(task.test) if task.test is not None else 0,
        "classes": task.train.classes,
        "partition": division.as_dict() if division is not None else None,
        "versions": {
            "dure": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }

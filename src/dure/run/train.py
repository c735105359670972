"""Train a task under a strategy in a world, and resume runs."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from msgspec import structs
from torch import nn

from dure import __version__, catalog
from dure.arguments import check_path
from dure.contracts.fresh_model import unused_copy
from dure.contracts.initial_weights import warn_of_drawn
from dure.contracts.learner import Proof
from dure.contracts.lr_schedule import check_schedule
from dure.contracts.optimizer_checks import checked_optimizer
from dure.contracts.stop import Stop
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.errors import DureError, RunFolderError, described, exit_is_a_failure, text_of
from dure.fleet.conditions import conditions_of
from dure.machine.compiler import deferred_compiler
from dure.machine.devices import check_device_dtypes
from dure.machine.user_code import call_with_modules, user_modules_of
from dure.memory.file_backed_init import in_files_like, why_not
from dure.parallel.learner_offloading import check_device_offload
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.disk import disk_errors
from dure.record.history import is_spread
from dure.record.live_status import delete_status as forget_now
from dure.record.live_status import record_failure
from dure.record.run import Run, RunFolder
from dure.record.settings import LINEAGE
from dure.references import is_reference
from dure.run.argument_checks import check_function, check_peak_flops, check_run_arguments
from dure.run.bad_data import bad_values_named, warn_of_bad_values
from dure.run.callbacks import Callbacks, check_callbacks
from dure.run.config import RunRequest, config_of, run_request_in
from dure.run.drive import drive
from dure.run.early_stopping import check_early, resumed_limits
from dure.run.hugging_face_layout import write_hugging_face_layout
from dure.run.job import Job
from dure.run.memory_check import check_fits, made_in_memory
from dure.run.model_predictions import write_answers
from dure.run.progress import bars_here
from dure.run.rank_data import release_rank_data, task_for_checks
from dure.run.registry import check_kind, decode_strategy, decode_world, default_world, is_lost
from dure.run.run_model import RunModel, check_untrained, new_model
from dure.run.task_checks import (
    check_can,
    check_data_asks,
    check_drawn,
    check_learned,
    with_learning,
)
from dure.run.track import tracker
from dure.run.trusted_code import ReferenceGuard, remember_run
from dure.run.validation import check_validation, with_validation
from dure.tasks.builtin import load_task
from dure.tasks.dtypes import check_dtypes
from dure.tasks.loss_check import check_loss, warn_of_ignored_targets
from dure.tasks.parts import check_whole, parts_of
from dure.tensors.supported import check_supported
from dure.worlds.launcher_environment import is_leader_process
from dure.worlds.processes.fork_server import server

# Ranks run this module.
server.import_at_start("dure.run.drive")

Kind = TypeVar("Kind", Strategy, World)

Progress = Callable[[dict[str, Any]], None]


def _ignore(event: dict[str, Any]) -> None:
    pass


def _shown(on_progress: Progress, stop: Stop) -> Progress:
    """Return the requested progress function, or by default a notebook's bar."""
    bars = bars_here(stop) if on_progress is _ignore else None
    return on_progress if bars is None else bars.of("training")


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
    check: bool = True,
    callbacks: Sequence[Any] = (),
    track: str | None = None,
    peak_flops: float | None = None,
    on_progress: Progress = _ignore,
) -> Run:
    """Train `task` by `strategy` in `world` until `stop`.

    Ctrl-C ends the run after its step: the run so far is returned, and summary["ended"] is
    "interrupt".

    Args:
        task: model, loss, data and optimizer.
        strategy: division of the training among workers or clients.
        world: workers or clients; by default processes of this machine (or the torchrun job that
            this process is part of), this very process for `SingleWorker`, simulated clients for
            federated strategies.
        stop: limits of the run; by default ten epochs.
        seed: seed of the initial weights, the order of examples, sampling and dropout. The same
            seed and world give the same bits.
        out: run folder (docs/run-folder.md), which must be new or empty; None keeps everything in
            memory. In an elastic torchrun job (docs/elastic.md), a folder in which this very run
            was begun is resumed.
        evaluate_every: steps or rounds between evaluations on the test data; by default an epoch,
            or a round.
        checkpoint_every: steps or rounds between checkpoints; by default checkpoints are written at
            evaluations, at least ten seconds apart.
        label: name of the run in reports; by default the strategy's description.
        check: before the first step, test the strategy's assumptions about the model on one
            micro-batch: that a traced program, or layers that a plan divides, compute the same as
            the model. False skips the test.
        callbacks: objects with any of the methods on_begin, on_step, on_round, on_evaluation,
            on_end and on_failure, called in this process (`dure.run.callbacks`); a callback that
            raises `dure.StopRun` ends the run.
        track: tracker that the run is reported to: tensorboard:FOLDER, mlflow:URI or wandb:PROJECT
            (`dure.run.track`).
        peak_flops: floating-point operations per second of the device of a rank, such as 989e12,
            for the utilisation (`mfu`) in the summary; by default those of a table of common
            devices.
        on_progress: called at most ten times a second, with a dict of unit, step, epoch, samples,
            seconds, loss, metrics, bytes (sent so far, if they are a limit), evaluated (step of the
            metrics), numbers (of the strategy about the step), and proofs (tests before the first
            step, as pairs of words and seconds). By default a notebook draws a bar.

    Returns:
        The trained model with history, summary and folder.

    Raises:
        ValueError: before any work, for arguments that do not fit.
        RunFolderError: for a folder in use.
        LossNotFiniteError: if the loss is NaN or infinite. The folder keeps all that was written;
            so it does after the errors below.
        WorkerFailedError: if the user's code fails.
        PeerLostError: if a rank or client is lost.
    """
    world = world if world is not None else default_world(strategy)
    stop = stop if stop is not None else Stop(epochs=10)
    check_path("out", out, optional=True)
    check_function("on_progress", on_progress)
    check_peak_flops(peak_flops)
    hearing = all_callbacks(callbacks, track)
    on_progress = _shown(on_progress, stop)
    job, config = prepare(
        task,
        strategy,
        world,
        stop,
        seed,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        label=label,
        check=check,
    )
    if peak_flops is not None:
        config["peak_flops"] = peak_flops
        job = dataclasses.replace(job, peak_flops=peak_flops)
    # Every rank of a torchrun job gets here; rank 0 leads.
    folder = Path(out) if out is not None else None
    elastic = world.starts_again and folder is not None
    if folder is not None and world.is_leader:
        # An elastic job that torchrun restarts finds its own folder.
        if elastic:
            RunFolder.enter(folder, config, strategy.traits.oldest_checkpoint)
        else:
            RunFolder.create(folder, config)
        begun_here(folder, task, strategy, world)
    return run_job(
        dataclasses.replace(job, folder=folder, resume=elastic, elastic=elastic, config=config),
        world,
        on_progress,
        hearing,
    )


def begun_here(folder: Path, task: Task, strategy: Strategy, world: World) -> None:
    """Record on this machine that a run was begun in this folder, so that it can be resumed here.

    Warns, before training, if only a process with the class of the strategy or world can resume it.
    """
    config = RunFolder(folder).read_json("config.json")
    _note(folder, config, task, strategy, world)
    lost = [what for what in ("strategy", "world") if is_lost(config[what])]
    if lost:
        wanted = ", ".join(f"{what}=..." for what in lost)
        names = " and ".join(repr(config[what]["name"]) for what in lost)
        warnings.warn(
            f"{folder} can be resumed only as dure.resume({str(folder)!r}, {wanted}): the "
            f"{' and '.join(lost)} {names} is defined where another process cannot import it, or "
            "has a field that cannot be written to config.json; define the class in its own file",
            # Points at the user's call of `train` or `compare`.
            stacklevel=3,
        )


def resume(
    folder: str | Path,
    *,
    task: Task | str | None = None,
    strategy: Strategy | str | None = None,
    world: World | str | None = None,
    rules: Sequence[str] = (),
    weights: str | Path | None = None,
    device: str | None = None,
    stop: Stop | None = None,
    check: bool = True,
    callbacks: Sequence[Any] = (),
    track: str | None = None,
    on_progress: Progress = _ignore,
) -> Run:
    """Resume the run in `folder` from its newest checkpoint, or from the start without one.

    The result has the same bits as an uninterrupted run.

    A folder is data. If the run's task, strategy, world or rules are a user's own, config.json has
    the file or module of the code. The code is imported only if the run was begun on this machine
    and neither config.json nor the code has changed since (`dure.run.trusted_code`), or if the user
    names the code again here: `path/to/file.py:Name`. A name replaces the name in config.json;
    options and fields stay as they are there.

    Args:
        folder: run folder.
        task: name or object that replaces the task. An object is needed for a task that was made in
            Python and is in no file or module; a warning said so when the run began.
        strategy: name or object that replaces the strategy, such as a class of a notebook. A
            strategy may say that the work is done elsewhere (`Strategy.moves`), such as on another
            mesh: the training path is then the same except for rounding.
        world: name or object that replaces the world.
        rules: names of other user code in strategy and world, such as a partition.
        weights: new path of the run's initial weights, whose content must be the same.
        device: other devices than those in config.json, as in `dure.Processes`, such as "cpu".
            Objects for strategy and world have their own.
        stop: new limits, to train an ended run further.
        check: as in `train`.
        callbacks: as in `train`.
        track: as in `train`.
        on_progress: as in `train`.

    Returns:
        The trained model with history, summary and folder.

    Raises:
        ValueError: for names that are no `path/to/file.py:Name`, and limits that do not fit.
        RunFolderError: if the folder has no run, another process is training in it, it names code
            that must not run, its task, strategy or world cannot be found, its checkpoint or
            history is damaged or not of this run, or an unknown version of dure wrote its
            checkpoint.
    """
    check_path("folder", folder)
    check_path("weights", weights, optional=True)
    check_function("on_progress", on_progress)
    hearing = all_callbacks(callbacks, track)
    path = Path(folder)
    config = RunFolder.open(path).read_json("config.json")
    asked = run_request_in(path, config)
    again = {"task": task, "strategy": strategy, "world": world}
    named = [*rules, *(one for one in (strategy, world) if isinstance(one, str))]
    for one in named:
        if not is_reference(one):
            raise ValueError(f"{one!r} does not name a class of yours: write path/to/file.py:Name")
    stop = asked.stop if stop is None else resumed_limits(stop, asked.stop)
    on_progress = _shown(on_progress, stop)
    ask = ReferenceGuard(path, config, named)
    if device is not None:
        asked = _on_device(asked, device, strategy, world)
    task, strategy, world = reload_run(path, asked, ask, task, strategy, world)
    task = _with_weights(path, task, asked, weights)
    if is_leader_process():
        _tell_of_versions(path, asked)
    # If the user passed no object, every error stems from config.json.
    alone = not any(isinstance(one, (Task, Strategy, World)) for one in again.values())
    with _blames(path) if alone else nullcontext():
        job, new_config = prepare(
            task,
            strategy,
            world,
            stop,
            asked.seed,
            evaluate_every=asked.evaluate_every,
            checkpoint_every=asked.checkpoint_every,
            label=asked.label,
            check=check,
        )
    # Only checks and config.json here: rank 0 locks the folder once it runs.
    if world.is_leader:
        new_config["run"] = asked.run or new_config["run"]
        if asked.peak_flops is not None:
            new_config["peak_flops"] = asked.peak_flops
        # Before the folder is written: another process may resume the run right after.
        _note(path, new_config, task, strategy, world)
        RunFolder(path).begin_again(
            new_config,
            strategy.traits.oldest_checkpoint,
            named_again=_named_again(again),
            moves=strategy.traits.moves,
            model=job.fresh.state_dict() if job.fresh is not None else None,
        )
        # The lineage describes an earlier end of the run, and is no longer true.
        with disk_errors(path / LINEAGE):
            (path / LINEAGE).unlink(missing_ok=True)
    job = dataclasses.replace(
        job,
        folder=path,
        resume=True,
        elastic=world.starts_again,
        config=new_config,
        peak_flops=asked.peak_flops,
    )
    return run_job(job, world, on_progress, hearing)


def _on_device(
    asked: RunRequest, device: str, strategy: Strategy | str | None, world: World | str | None
) -> RunRequest:
    """Return the request with another device of its strategy, or else of its world.

    Raises ValueError if neither has a device that this setting replaces.
    """
    if strategy is None and "device" in asked.strategy:
        return structs.replace(asked, strategy={**asked.strategy, "device": device})
    if world is None and asked.world["name"] in ("processes", "torchrun", "simulated"):
        return structs.replace(asked, world={**asked.world, "device": device})
    raise ValueError(
        f"device={device} replaces the device in config.json, but the run's "
        f"{asked.world['name']} has none there: give strategy or world with their devices"
    )


def _with_weights(folder: Path, task: Task, asked: RunRequest, given: str | Path | None) -> Task:
    """Return the task with the run's initial weights. Raises RunFolderError if they are gone.

    given: path from the user; None takes the path in config.json.
    """
    if given is not None:
        return dataclasses.replace(task, weights=Path(given))
    was = asked.task.weights_from
    if task.weights is not None or was is None:
        return task
    if not Path(was).exists():
        raise RunFolderError(
            f"the run in {folder} started from the weights in {was}, which does not exist any "
            "more: give their path with --weights"
        )
    return dataclasses.replace(task, weights=Path(was))


@contextmanager
def _blames(folder: Path) -> Iterator[None]:
    """Context manager: turn ValueError into RunFolderError, since the folder's request is wrong."""
    try:
        yield
    except DureError:
        raise
    except (ValueError, OverflowError) as error:
        raise RunFolderError(
            f"{folder / 'config.json'} contains an invalid setting: {error}"
        ) from error


def reload_run(
    folder: Path,
    asked: RunRequest,
    ask: ReferenceGuard,
    task: Task | str | None,
    strategy: Strategy | str | None,
    world: World | str | None,
) -> tuple[Task, Strategy, World]:
    """Return the objects that config.json names, or the user's replacements."""
    if not isinstance(task, Task):
        task = reload_task(folder, asked, task, ask)
    # A strategy may name user code in any of its fields.
    if not isinstance(strategy, Strategy):
        written = _named(folder, "strategy", asked.strategy, strategy)
        strategy = _again(folder, functools.partial(decode_strategy, ask=ask), written)
    if not isinstance(world, World):
        written = _named(folder, "world", asked.world, world)
        world = _again(folder, functools.partial(decode_world, ask=ask), written)
    # A user's own object is compared with the run's strategy by its name.
    if strategy.name != asked.strategy["name"]:
        raise RunFolderError(
            f"{folder} was trained by {asked.strategy['name']}, not {strategy.name}"
        )
    return task, strategy, world


def reload_task(
    folder: Path, asked: RunRequest, reference: str | None, ask: ReferenceGuard
) -> Task:
    """Return the task of a folder. reference: the user's replacement for the folder's name.

    Raises RunFolderError if the task was made in Python, or its code must not run.
    """
    if reference is None:
        reference = asked.task.name
        if not reference:
            raise _made_in_python(folder, "task")
        # A built-in name has no colon, and needs no permission.
        if ":" in reference:
            reference = ask(reference)
    try:
        task = with_learning(load_task(reference, **asked.task.options), asked.task.learning)
        if asked.task.validation is not None:
            task = dataclasses.replace(task, validation=asked.task.validation)
        return task
    except (TypeError, ValueError) as error:
        if ":" in reference:
            raise
        # Options that the built-in task does not have, or of another type.
        raise RunFolderError(
            f"{folder / 'config.json'} does not match this version of dure: {error}"
        ) from error


def _named(
    folder: Path, what: str, written: dict[str, Any], reference: str | None
) -> dict[str, Any]:
    """Return config.json's entry of a strategy or world, with the class named by the user."""
    if reference is not None:
        written = {**written, "from": reference}
    if is_lost(written):
        raise _made_in_python(folder, what)
    return written


def _named_again(given: Mapping[str, object]) -> list[str]:
    """Return the settings that the user replaces in config.json."""
    # A task loaded by a reference keeps the options of config.json.
    of_task = {"task.name"} if isinstance(given["task"], str) else {"task"}
    of_world = {"world.name"} if isinstance(given["world"], str) else {"world"}
    return [
        *(of_task if given["task"] is not None else ()),
        *(of_world if given["world"] is not None else ()),
    ]


def _again(folder: Path, decode: Callable[[Mapping[str, Any]], Kind], asked: Any) -> Kind:
    """Return the object that config.json requests. Raises RunFolderError if this dure has none."""
    try:
        return decode(asked)
    except (ValueError, TypeError) as error:
        raise RunFolderError(
            f"{folder / 'config.json'} does not match this version of dure: {error}"
        ) from error


def _made_in_python(folder: Path, what: str) -> RunFolderError:
    return RunFolderError(
        f"the {what} of {folder} was created in Python: give it with dure.resume({str(folder)!r}, "
        f"{what}=...)"
    )


def _tell_of_versions(folder: Path, asked: RunRequest) -> None:
    """Warn if other versions began the run: the last digits of numbers may differ."""
    here = {"dure": __version__, "torch": torch.__version__}
    others = [
        f"{name} {asked.versions[name]} (here {version})"
        for name, version in here.items()
        if asked.versions.get(name, version) != version
    ]
    if others:
        warnings.warn(
            f"{folder} was written by {' and '.join(others)}: results may differ from those of an "
            "uninterrupted run",
            stacklevel=3,
        )


def _note(
    folder: Path, config: Mapping[str, Any], task: Task, strategy: Strategy, world: World
) -> None:
    """Record on this machine that the run was begun here; warn if the record cannot be written."""
    try:
        remember_run(config, task, strategy, world)
    except OSError as error:
        warnings.warn(
            f"dure cannot record on this machine that the run was started here ({error}): to "
            f"resume {folder}, name its code again, as in --task path/to/file.py:name",
            stacklevel=4,
        )


def all_callbacks(callbacks: Sequence[Any], track: str | None) -> list[Any]:
    """Return all callbacks of a run. Raises ValueError for invalid callbacks or trackers."""
    check_callbacks(callbacks)
    return [*callbacks, *([] if track is None else [tracker(track)])]


def run_job(job: Job, world: World, on_progress: Progress, callbacks: Sequence[Any] = ()) -> Run:
    """Execute a prepared job, and call its callbacks in this process.

    Raises the run's errors, and CallbackFailedError after the run if a callback has failed.
    """
    if not callbacks or not world.is_leader:
        return _done(job, world, on_progress)
    called = Callbacks(callbacks, on_progress)
    called.begin(job.config)
    try:
        run = _done(dataclasses.replace(job, told=True), world, called)
    except BaseException as error:
        called.fail(error)
        raise
    called.end(run)
    return run


def _done(job: Job, world: World, on_progress: Progress) -> Run:
    """Execute a prepared job, whose folder exists already.

    Raises ValueError for a simulation that stores updates without a folder for them.
    """
    conditions = conditions_of(world)
    keeps = conditions is not None and conditions.keep_updates
    if keeps and job.folder is None:
        raise ValueError(
            "keep_updates writes into the run folder, but the run has none: give its path with out"
        )
    # `prepare` made the model in this process.
    assert job.fresh is not None
    # In a world of processes the job travels to the ranks; its model does not (`RunModel`).
    program = functools.partial(drive, job)
    if world.elsewhere:
        job.fresh.rest()
        release_rank_data(job.task)
        if job.task.reference is not None:
            files = user_modules_of(job.task.reference["name"])
            program = functools.partial(call_with_modules, files, program)
    with _kept(job.folder if world.is_leader else None), bad_values_named(job.task):
        outcome = world.run(program, on_progress)
    warn_of_bad_values(job.task, outcome.summary)
    # The task's factory may be called once more.
    with exit_is_a_failure("the task", "creating the trained model"):
        elsewhere = outcome.summary.get("weights_elsewhere", ())
        model = job.fresh.trained(outcome.weights, outcome.buffers, elsewhere)
    run = Run(model, outcome.history, outcome.summary, job.folder, outcome.best)
    if world.is_leader:
        write_hugging_face_layout(run, job.task.weights)
        write_answers(run, job.task, job.strategy, world)
    return run


@contextmanager
def _kept(folder: Path | None) -> Iterator[None]:
    """Context manager: write the reason for a failure into the folder, for readers of the run."""
    if folder is not None:
        forget_now(folder)
    try:
        yield
    # An interrupt ends a run, and is no failure.
    except Exception as error:
        if folder is not None:
            record_failure(folder, text_of(error).strip() or described(error))
        raise


# The checks run the user's own code: the model, its data, perhaps a loss.
@exit_is_a_failure("the task", "the checks before the first step")
def prepare(
    task: Task,
    strategy: Strategy,
    world: World,
    stop: Stop,
    seed: int,
    *,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    label: str | None = None,
    check: bool = True,
    model: nn.Module | None = None,
) -> tuple[Job, dict[str, Any]]:
    """Check the request, and return the job and the content of config.json.

    Args:
        task: as in `train`.
        strategy: as in `train`.
        world: as in `train`.
        stop: as in `train`.
        seed: as in `train`.
        evaluate_every: as in `train`.
        checkpoint_every: as in `train`.
        label: as in `train`.
        check: as in `train`.
        model: the task's model under the seed, if other runs need it too; it is not changed.

    Raises:
        ValueError: if arguments do not fit together.
    """
    # First, since all further checks call their methods.
    check_run_arguments(
        task,
        stop,
        seed=seed,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        label=label,
    )
    _check_kinds(strategy, world)
    check_can(task, strategy, world)
    check_whole(task, strategy.traits.trains_parts, world.serves)
    check_validation(task, strategy, world)
    asked = task
    task = with_validation(task_for_checks(task, strategy, world), seed)
    has_data = len(task.train) > 0
    if not has_data and not world.serves:
        raise ValueError(
            "the task has no training data, and only a server can run without them: give "
            "Task(train=...)"
        )
    for name, every in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if every is not None and every < 1:
            raise ValueError(
                f"{name} is {every}, but it is a number of {strategy.traits.unit}s: 1 or more"
            )
    world.begin(strategy.run_traits.imports)  # while this process looks at what is asked
    strategy = strategy.planned(task, stop)
    check_data_asks(task, strategy, world.kind)
    strategy.check(task, world)
    check_drawn(task, strategy, world.workers, seed)
    stop.check(strategy.traits.unit)
    _check_bytes(stop, world)
    if has_data:
        _check_first_example(task)
    check_loss(task)
    # A model from the caller serves other runs too: learners take copies of it.
    keep = model is not None
    divided = strategy.holds_parts(world.workers)
    # After the cheap checks: creating a large model takes long.
    if model is None:
        with made_in_memory():
            model = new_model(task, seed, divided, world.elsewhere)
        check_untrained(model)
    if task.weights is not None and world.is_leader:
        warn_of_drawn(model, task.weights)
    # The checks create optimizers, the first of which would load the compiler for seconds.
    with deferred_compiler(), in_files_like(model):
        proofs = _checked(task, strategy, world, stop, model, seed, check)
    parameters = _checked_parameters(task, model)
    floating = Counter(one.dtype for one in model.parameters() if one.is_floating_point())
    job = Job(
        task=asked,
        strategy=strategy,
        stop=stop,
        seed=seed,
        label=label or _label(strategy, world),
        world=world.describe(),
        parameters=parameters,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        check=check,
        dtype=floating.most_common(1)[0][0] if floating else None,
        proofs=(*_told_of_files(divided), *proofs),
        # FreshModel only creates models, so it need not carry the examples of the checks.
        fresh=RunModel(asked, seed, model, keep, divided, world.elsewhere),
    )
    return job, config_of(job, world, task)


def _checked(
    task: Task,
    strategy: Strategy,
    world: World,
    stop: Stop,
    model: nn.Module,
    seed: int,
    check: bool,
) -> tuple[Proof, ...]:
    """Return the tests of the model that passed. Raises ValueError if the model does not fit."""
    # A single worker neither adds tensors to those of others nor sends them.
    check_supported(model, sent=not strategy.traits.alone)
    measured = strategy.measures(task, model, world)
    if stop.target:
        _check_target(stop, measured, world.serves)
    check_early(task, stop, measured)
    _check_devices(strategy, world, model)
    _check_optimizers(task, model)
    check_learned(task, model)
    check_fits(task, strategy, world, model)
    check_dtypes(task, model, functools.partial(unused_copy, model, task, seed))
    proofs = _checked_model(task, strategy, world, model, check)
    if world.is_leader and len(task.train):
        # Points at the user's call of `train`.
        warn_of_ignored_targets(
            task, functools.partial(unused_copy, model, task, seed), stacklevel=5
        )
    return proofs


def _told_of_files(divided: bool) -> tuple[Proof, ...]:
    """Return a note if each rank creates the whole model in memory although it takes a part."""
    reason = why_not() if divided else None
    if reason is None:
        return ()
    return (Proof(f"every rank holds the whole model in memory: {reason}", 0.0),)


def _check_kinds(strategy: Strategy, world: World) -> None:
    """Raise ValueError for objects of the wrong type, or a strategy that this world cannot run."""
    check_kind(strategy, Strategy)
    check_kind(world, World)
    if world.kind not in strategy.traits.kinds:
        lives = ", or of ".join(map(catalog.worlds_for, strategy.traits.kinds))
        raise ValueError(
            f"{type(strategy).__name__} does not run in {type(world).__name__}; it needs a world "
            f"of {lives}"
        )


def _check_bytes(stop: Stop, world: World) -> None:
    """Raise ValueError if bytes are the only limit of a run that sends none."""
    alone = world.kind == "ranks" and world.workers == 1
    if alone and stop.bytes is not None and stop.bytes_alone:
        raise ValueError(
            "a limit of bytes cannot end a run of one rank, which sends none: give another limit "
            "as well"
        )


def _check_target(stop: Stop, measured: Sequence[str], serves: bool) -> None:
    """Raise ValueError for a target that no evaluation measures.

    serves: remote clients may have data for metrics that are unknown here.
    """
    for name in stop.target or ():
        theirs = serves and name.startswith(("client_", "personal_"))
        if name not in measured and not theirs:
            # Of the statistics of a metric over clients, one is shown for all.
            shown = [one for one in measured if not is_spread(one) or one.endswith("_p10")]
            raise ValueError(
                f"the target {name!r} is not measured; available metrics: "
                f"{', '.join(sorted(shown)) or 'no test data'}"
            )


def _check_devices(strategy: Strategy, world: World, model: nn.Module) -> None:
    """Raise ValueError for a model on a device that the run does not use, or on several devices.

    Also for a device that does not have the numbers of the model, or that cannot offload.
    """
    used = {
        torch.device(name).type for name in strategy.run_traits.computes_on or world.computes_on
    }
    if used - {"cpu"}:
        check_device_offload(strategy.run_traits.offloaded)
    tensors = [*model.parameters(), *model.buffers()]
    check_device_dtypes(used, {tensor.dtype for tensor in tensors})
    conditions = conditions_of(world)
    if conditions is not None and conditions.device is not None:
        return  # the run moves the model
    there = sorted({str(tensor.device) for tensor in tensors} - {"cpu", "meta"})
    if not there:
        return
    if world.kind == "clients" and not world.serves and strategy.traits.follows_model:
        if any(str(tensor.device) != there[0] for tensor in tensors):
            raise ValueError(
                f"the task's model function returns a model on {' and '.join(there)}: move the "
                "whole model to one device"
            )
        return
    if used <= {"cpu"}:
        raise ValueError(
            f"the task's model function returns a model on {there[0]}, but this system computes "
            "on the CPU: return the model on the CPU. Ranks and a single worker compute on the "
            "device of --device (dure.Processes(device=...), SingleWorker(device=...)), threads on "
            "that of --devices, simulated clients on that of --device "
            "(dure.Simulated(device=...)), and those of federated systems by default on the model's"
        )


def _checked_model(
    task: Task, strategy: Strategy, world: World, model: nn.Module, check: bool
) -> tuple[Proof, ...]:
    """Return the strategy's test of the model. Raises ValueError if it cannot train the model."""
    proof = None
    if check:
        proof = strategy.prove(task, model, world)
    else:
        strategy.check_model(task, model, world)
    return () if proof is None else (proof,)


def _check_optimizers(task: Task, model: nn.Module) -> None:
    """Raise ValueError for an optimizer that cannot step here, or an invalid schedule."""
    tasks: list[Task] = [part for _, part in parts_of(task)]
    for one in tasks or [task]:
        # The first optimizer of a process would load the compiler, which takes seconds.
        with deferred_compiler():
            optimizer = checked_optimizer(one.optimizer, model.parameters())
        if optimizer is not None and one.lr_schedule is not None:
            check_schedule(one.lr_schedule, optimizer)


def _checked_parameters(task: Task, model: nn.Module) -> int:
    """Return the number of parameters. Raises ValueError if none is trainable."""
    # A list, because it is iterated twice.
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("the model has no trainable parameter")
    return sum(parameter.numel() for parameter in parameters)


def _label(strategy: Strategy, world: World) -> str:
    """Return the default label: the strategy, its workers, and conditions that are not ideal."""
    name = strategy.label_in(world.kind)
    workers = world.workers or 1
    conditions = conditions_of(world)
    told = conditions.told() if conditions is not None else []
    label = ", ".join([f"{name} ×{workers}" if workers > 1 else name, *told])
    # Whole numbers lose their ".0": 5.0 becomes 5.
    return re.sub(r"(?<=\d)\.0(?!\d)", "", label)


def _check_first_example(task: Task) -> None:
    """Raise ValueError if the first example of a dataset is no pair.

    Other errors of the example are reported during training.
    """
    if hasattr(task.train, "targets"):
        return
    # Reading an example may draw random numbers, such as a crop; the run must not depend on it.
    before = generators_state()
    try:
        task.train.batch(torch.tensor([task.train.first]))
    except ValueError:
        raise
    # During training the same error names the worker and the step.
    except Exception:
        return
    finally:
        restore_generators(before)

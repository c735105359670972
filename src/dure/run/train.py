"""One run: a Task under a Strategy in a World."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from dure import __version__, catalog
from dure.arguments import check_path
from dure.contracts.lr_schedule import check_schedule
from dure.contracts.own_optimizer import checked_optimizer
from dure.contracts.stop import Stop
from dure.contracts.strategy import Proof, Strategy, World, another
from dure.contracts.task import Task
from dure.contracts.weights_from import warn_of_drawn
from dure.errors import DureError, RunFolderError, described, exit_is_a_failure, text_of
from dure.machine.compiler import left_out
from dure.machine.own_code import begun_with, files_of
from dure.memory.undivided import beside, why_not
from dure.randomness.seeds import generators_state, restore_generators
from dure.record.disk import told
from dure.record.history import is_spread
from dure.record.now import failed
from dure.record.now import forget as forget_now
from dure.record.run import Run, RunFolder
from dure.record.settings import LINEAGE
from dure.references import is_reference
from dure.run.answers import write_answers
from dure.run.asked import check_asked, check_function
from dure.run.bad_data import bad_values_named, warn_of_bad_values
from dure.run.begun import Asks, note
from dure.run.callbacks import Callbacks, check_callbacks
from dure.run.config import Asked, asked_in, config_of
from dure.run.data_asks import check_data_asks, check_drawn
from dure.run.drive import drive
from dure.run.early import check_early, goes_on
from dure.run.fits import check_fits, made_in_memory
from dure.run.fresh import FreshModel, check_fresh, fresh_model
from dure.run.job import Job
from dure.run.learning import check_can, check_learned, with_learning
from dure.run.own_data import forget, to_look_at
from dure.run.progress import bars_here
from dure.run.registry import check_kind, decode_strategy, decode_world, default_world, is_lost
from dure.run.track import tracker
from dure.run.validation import check_validation, with_validation
from dure.tasks.builtin import load_task
from dure.tasks.dtypes import check_dtypes
from dure.tasks.loss_check import check_loss, warn_of_ignored_targets
from dure.tasks.parts import check_whole, parts_of
from dure.tensors.supported import check_supported
from dure.worlds.launched import leads_here
from dure.worlds.processes.fork_server import server

server.begins_with("dure.run.drive")  # what a rank runs

Kind = TypeVar("Kind", Strategy, World)

Progress = Callable[[dict[str, Any]], None]


def _ignore(event: dict[str, Any]) -> None:
    pass


def _shown(on_progress: Progress, stop: Stop) -> Progress:
    """Who is told of progress: the one asked for, or the bar of a notebook."""
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
    label: what the report calls the run; by default what the strategy says of itself.
    check: try, before the first step and on one micro-batch, what a strategy believes about the
        model: that a traced program, or layers that a plan divides, compute what the model
        computes. False trusts them.
    callbacks: objects with any of the methods on_begin, on_step, on_round, on_evaluation, on_end
        and on_failure, called in this process (`dure.run.callbacks`); one that raises
        `dure.StopRun` ends the run.
    track: where the run is told of besides: tensorboard:FOLDER, mlflow:URI or wandb:PROJECT
        (`dure.run.track`).
    on_progress: called ten times a second or less, with a dict of unit, step, epoch, samples,
        seconds, loss, metrics, bytes: that have travelled, where they are a limit, evaluated: the
        step of the metrics, numbers: what the strategy says of the step, and proofs: what was tried
        before the first step, as pairs of words and seconds. By default a notebook draws a bar.

    Raises ValueError for arguments that do not fit, before any work; RunFolderError for a folder in
    use; LossNotFiniteError, WorkerFailedError or PeerLostError for a run that failed, which keeps
    what it has written. Ctrl-C ends the run after its step: it returns what was done, and
    summary["ended"] is "interrupt".
    """
    world = world if world is not None else default_world(strategy)
    stop = stop if stop is not None else Stop(epochs=10)
    check_path("out", out, optional=True)
    check_function("on_progress", on_progress)
    hearing = heard(callbacks, track)
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
    # Every rank of a torchrun job comes here; one of them leads.
    folder = Path(out) if out is not None else None
    elastic = world.starts_again and folder is not None
    if folder is not None and world.leads:
        # An elastic job that torchrun starts again finds its own folder there: no error.
        if elastic:
            RunFolder.enter(folder, config, strategy.oldest_checkpoint)
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
    """A run was begun in this folder: it is remembered on this machine, to be resumed here.

    Warns, before anything is trained, where only the owner of the strategy's or world's class can
    resume it.
    """
    config = RunFolder(folder).read_json("config.json")
    _note(folder, config, task, strategy, world)
    lost = [what for what in ("strategy", "world") if is_lost(config[what])]
    if lost:
        wanted = ", ".join(f"{what}=..." for what in lost)
        names = " and ".join(repr(config[what]["name"]) for what in lost)
        warnings.warn(
            f"{folder} can be resumed only as dure.resume({str(folder)!r}, {wanted}): the "
            f"{' and '.join(lost)} {names} is made where no other process finds it, or has a "
            f"field that cannot be written; a class in a file of its own is found again",
            # The line of the user who called `train` or `compare`.
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
    stop: Stop | None = None,
    check: bool = True,
    callbacks: Sequence[Any] = (),
    track: str | None = None,
    on_progress: Progress = _ignore,
) -> Run:
    """Goes on with the run in `folder` from its newest checkpoint, or from the start without one.

    The result has the same bits as if the run had never been interrupted. stop: new limits, to
    train an ended run further. check, callbacks, track, on_progress: as in `train`.

    A folder is data. Where the run's task, strategy, world or rules are a user's own, config.json
    says in which file or module they are. Those are imported only if the run was begun on this
    machine and neither config.json nor the code has changed since (`dure.run.begun`), or if they
    are named again here: `path/to/file.py:Name` for task, strategy and world, and rules for what
    else a strategy or world names, such as a partition. A name takes the place of the one that
    config.json has; options and fields stay as they are there.

    task, strategy, world: also the object itself, which is needed for what was made in Python and
    lies in no file or module, such as a class of a notebook; a warning said so when the run began.
    weights: where those lie by now with which the run began, which have to be the same.

    A strategy that is given may say that the work is done elsewhere (`Strategy.moves`), such as on
    another mesh: the path is then the same but for rounding.

    Raises ValueError for names that are no `path/to/file.py:Name`, and limits that do not fit;
    RunFolderError if the folder holds no run, somebody is training in it, it names code that
    must not be run, its task, strategy or world cannot be found again, its checkpoint or history is
    damaged or not of this run, or a dure that this one does not know wrote its checkpoint.
    """
    check_path("folder", folder)
    check_path("weights", weights, optional=True)
    check_function("on_progress", on_progress)
    hearing = heard(callbacks, track)
    path = Path(folder)
    config = RunFolder.open(path).read_json("config.json")
    asked = asked_in(path, config)
    again = {"task": task, "strategy": strategy, "world": world}
    named = [*rules, *(one for one in (strategy, world) if isinstance(one, str))]
    for one in named:
        if not is_reference(one):
            raise ValueError(f"{one!r} is no class of your own: it is path/to/file.py:Name")
    stop = asked.stop if stop is None else goes_on(stop, asked.stop)
    on_progress = _shown(on_progress, stop)
    ask = Asks(path, config, named)
    task, strategy, world = found_again(path, asked, ask, task, strategy, world)
    task = _with_weights(path, task, asked, weights)
    if leads_here():
        _tell_of_versions(path, asked)
    # Of what nobody gave here, config.json alone is to blame.
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
    # Only checks and config.json here: rank 0 holds the folder once it runs.
    if world.leads:
        new_config["run"] = asked.run or new_config["run"]
        # Before it is written: another process may resume the run right after.
        _note(path, new_config, task, strategy, world)
        RunFolder(path).begin_again(
            new_config,
            strategy.oldest_checkpoint,
            named_again=_named_again(again),
            moves=strategy.moves,
            model=job.fresh.state_dict() if job.fresh is not None else None,
        )
        # It says of an earlier end what is no longer so, as a summary did.
        with told(path / LINEAGE):
            (path / LINEAGE).unlink(missing_ok=True)
    job = dataclasses.replace(
        job, folder=path, resume=True, elastic=world.starts_again, config=new_config
    )
    return run_job(job, world, on_progress, hearing)


def _with_weights(folder: Path, task: Task, asked: Asked, given: str | Path | None) -> Task:
    """The task, with the weights with which the run began. Raises RunFolderError if they are gone.

    given: where the user says that they are.
    """
    if given is not None:
        return dataclasses.replace(task, weights=Path(given))
    was = asked.task.weights_from
    if task.weights is not None or was is None:
        return task
    if not Path(was).exists():
        raise RunFolderError(
            f"the run in {folder} began with the weights in {was}, which is gone: say with "
            f"--weights where they are"
        )
    return dataclasses.replace(task, weights=Path(was))


@contextmanager
def _blames(folder: Path) -> Iterator[None]:
    """What cannot be done as the folder says is an error of the folder. Raises RunFolderError."""
    try:
        yield
    except DureError:
        raise
    except (ValueError, OverflowError) as error:
        raise RunFolderError(
            f"{folder / 'config.json'} asks for what cannot be: {error}"
        ) from error


def found_again(
    folder: Path,
    asked: Asked,
    ask: Asks,
    task: Task | str | None,
    strategy: Strategy | str | None,
    world: World | str | None,
) -> tuple[Task, Strategy, World]:
    """What config.json names, or what was given in its place."""
    if not isinstance(task, Task):
        task = task_again(folder, asked, task, ask)
    # A strategy may name rules of a user's own in any of its fields.
    if not isinstance(strategy, Strategy):
        written = _named(folder, "strategy", asked.strategy, strategy)
        strategy = _again(folder, functools.partial(decode_strategy, ask=ask), written)
    if not isinstance(world, World):
        written = _named(folder, "world", asked.world, world)
        world = _again(folder, functools.partial(decode_world, ask=ask), written)
    # A class of one's own is given again; whether it is the one meant, its name tells.
    if strategy.name != asked.strategy["name"]:
        raise RunFolderError(
            f"{folder} was trained by {asked.strategy['name']}, not {strategy.name}"
        )
    return task, strategy, world


def task_again(folder: Path, asked: Asked, reference: str | None, ask: Asks) -> Task:
    """The task of a folder. reference: what the user named in place of what the folder names.

    Raises RunFolderError where it was made in Python, or must not be run.
    """
    if reference is None:
        reference = asked.task.name
        if not reference:
            raise _made_in_python(folder, "task")
        # A name of dure's own has no colon, and needs nobody's permission.
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
        # Options that dure's own task does not have, or of another type.
        raise RunFolderError(f"{folder / 'config.json'} does not fit this dure: {error}") from error


def _named(
    folder: Path, what: str, written: dict[str, Any], reference: str | None
) -> dict[str, Any]:
    """What config.json says of a strategy or world, with the class that the user named again."""
    if reference is not None:
        written = {**written, "from": reference}
    if is_lost(written):
        raise _made_in_python(folder, what)
    return written


def _named_again(given: Mapping[str, object]) -> list[str]:
    """Which settings are the user's, and no longer those of config.json."""
    # A task that is loaded by a reference has the options that config.json says.
    of_task = {"task.name"} if isinstance(given["task"], str) else {"task"}
    of_world = {"world.name"} if isinstance(given["world"], str) else {"world"}
    return [
        *(of_task if given["task"] is not None else ()),
        *(of_world if given["world"] is not None else ()),
    ]


def _again(folder: Path, decode: Callable[[Mapping[str, Any]], Kind], asked: Any) -> Kind:
    """What config.json asks for. Raises RunFolderError if this dure has nothing of the kind."""
    try:
        return decode(asked)
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{folder / 'config.json'} does not fit this dure: {error}") from error


def _made_in_python(folder: Path, what: str) -> RunFolderError:
    return RunFolderError(
        f"the {what} of {folder} was made in Python: give it as dure.resume({str(folder)!r}, "
        f"{what}=...)"
    )


def _tell_of_versions(folder: Path, asked: Asked) -> None:
    """Warns where other versions began the run, whose numbers may differ in their last digits."""
    here = {"dure": __version__, "torch": torch.__version__}
    others = [
        f"{name} {asked.versions[name]} (here {version})"
        for name, version in here.items()
        if asked.versions.get(name, version) != version
    ]
    if others:
        warnings.warn(
            f"{folder} was written by {' and '.join(others)}: from here on its numbers may differ "
            f"from those of a run that was not interrupted",
            stacklevel=3,
        )


def _note(
    folder: Path, config: Mapping[str, Any], task: Task, strategy: Strategy, world: World
) -> None:
    """Remembers on this machine that the run was begun here; warns where that cannot be."""
    try:
        note(config, task, strategy, world)
    except OSError as error:
        warnings.warn(
            f"this machine cannot remember that the run was begun here ({error}): to resume "
            f"{folder}, its code has to be named again, as in --task path/to/file.py:name",
            stacklevel=4,
        )


def heard(callbacks: Sequence[Any], track: str | None) -> list[Any]:
    """All callbacks of a run. Raises ValueError for what is none, or a missing tracker."""
    check_callbacks(callbacks)
    return [*callbacks, *([] if track is None else [tracker(track)])]


def run_job(job: Job, world: World, on_progress: Progress, callbacks: Sequence[Any] = ()) -> Run:
    """Does a prepared job, of which callbacks hear in this process.

    Raises what the run raises, and CallbackFailedError, after it, where a callback has failed.
    """
    if not callbacks or not world.leads:
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
    """Does a prepared job; its folder, if it has one, exists already.

    Raises ValueError for a simulation that is to keep updates, and has no folder for them.
    """
    keeps = world.conditions is not None and world.conditions.keep_updates
    if keeps and job.folder is None:
        raise ValueError(
            "keep_updates writes into the run folder, and there is none: say with out where it is"
        )
    # `prepare` made it, in this process.
    assert job.fresh is not None
    # In a world of processes the job travels to the ranks; its model does not (`FreshModel`).
    program = functools.partial(drive, job)
    if world.elsewhere:
        job.fresh.rest()
        forget(job.task)
        if job.task.reference is not None:
            files = files_of(job.task.reference["name"])
            program = functools.partial(begun_with, files, program)
    with _kept(job.folder if world.leads else None), bad_values_named(job.task):
        outcome = world.run(program, on_progress)
    warn_of_bad_values(job.task, outcome.summary)
    # The task's factory may be called once more.
    with exit_is_a_failure("the task", "making the trained model"):
        elsewhere = outcome.summary.get("weights_elsewhere", ())
        model = job.fresh.trained(outcome.weights, outcome.buffers, elsewhere)
    run = Run(model, outcome.history, outcome.summary, job.folder, outcome.best)
    if world.leads:
        write_answers(run, job.task, job.strategy, world)
    return run


@contextmanager
def _kept(folder: Path | None) -> Iterator[None]:
    """Why a run failed is kept in its folder, for whoever watches it."""
    if folder is not None:
        forget_now(folder)
    try:
        yield
    # An interrupt ends a run, and is no failure.
    except Exception as error:
        if folder is not None:
            failed(folder, text_of(error).strip() or described(error))
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
    """The job and the content of config.json.

    Raises ValueError if anything asked does not fit together.

    model: the task's under the seed, where other runs need it as well; it stays as it is.
    """
    # First: all that follows calls their methods.
    check_asked(
        task,
        stop,
        seed=seed,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        label=label,
    )
    _check_kinds(strategy, world)
    check_can(task, strategy, world)
    check_whole(task, strategy.trains_parts, world.serves)
    check_validation(task, strategy, world)
    asked = task
    task = with_validation(to_look_at(task, strategy, world), seed)
    has_data = len(task.train) > 0
    if not has_data and not world.serves:
        raise ValueError(
            "the task has no training data, which only a server does without: give Task(train=...)"
        )
    for name, every in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if every is not None and every < 1:
            raise ValueError(f"{name} is {every}, but it counts {strategy.unit}s: at least 1")
    world.begin(strategy.imports)  # while this process looks at what is asked
    strategy = strategy.planned(task, stop)
    check_data_asks(task, strategy, world.kind)
    strategy.check(task, world.workers)
    check_drawn(task, strategy, world.workers, seed)
    strategy.check_in(world)
    stop.check(strategy.unit)
    _check_bytes(stop, world)
    if has_data:
        _check_first_example(task)
    check_loss(task)
    # A model that was given serves other runs too: learners take copies of it.
    keep = model is not None
    divided = strategy.holds_parts(world.workers)
    # Only after the cheap checks: to make a large model takes long.
    if model is None:
        with made_in_memory():
            model = fresh_model(task, seed, divided, world.elsewhere)
        check_fresh(model)
    if task.weights is not None and world.leads:
        warn_of_drawn(model, task.weights)
    # Optimizers are made to be looked at: the first would load the compiler, which takes seconds.
    with left_out(), beside(model):
        proofs = _checked(task, strategy, world, stop, model, seed, check)
    parameters = _checked_parameters(task, model)
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
        proofs=(*_told_of_files(divided), *proofs),
        # Which makes models alone: the examples that were looked at need not travel with it.
        fresh=FreshModel(asked, seed, model, keep, divided, world.elsewhere),
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
    """What was tried of the model. Raises ValueError where it does not fit what is asked."""
    # What a single worker has, it neither adds to that of others nor sends.
    check_supported(model, sent=not strategy.alone)
    measured = strategy.measures(task, model, world.conditions)
    if stop.target:
        _check_target(stop, measured, world.serves)
    check_early(task, stop, measured)
    _check_devices(strategy, world, model)
    _check_optimizers(task, model)
    check_learned(task, model)
    check_fits(task, strategy, world, model)
    check_dtypes(task, model, functools.partial(another, model, task, seed))
    proofs = _checked_model(task, strategy, world, model, check)
    if world.leads and len(task.train):
        # The line of the user who called `train`.
        warn_of_ignored_targets(task, functools.partial(another, model, task, seed), stacklevel=5)
    return proofs


def _told_of_files(divided: bool) -> tuple[Proof, ...]:
    """Why each rank makes the whole model in memory, though it holds a part of it, if so."""
    reason = why_not() if divided else None
    if reason is None:
        return ()
    return (Proof(f"the undivided model lies in memory, on every rank: {reason}", 0.0),)


def _check_kinds(strategy: Strategy, world: World) -> None:
    """Raises ValueError if one of them is something else, or they do not go together."""
    check_kind(strategy, Strategy)
    check_kind(world, World)
    if world.kind not in strategy.dwellings():
        lives = ", or of ".join(map(catalog.homes, strategy.dwellings()))
        raise ValueError(
            f"{type(strategy).__name__} does not live in {type(world).__name__}; it needs a world "
            f"of {lives}"
        )


def _check_bytes(stop: Stop, world: World) -> None:
    """Raises ValueError where bytes alone are to end a run in which nobody sends any."""
    alone = world.kind == "ranks" and world.workers == 1
    if alone and stop.bytes is not None and stop.bytes_alone:
        raise ValueError(
            "bytes alone end no run of one rank, which sends none: give another limit as well"
        )


def _check_target(stop: Stop, measured: Sequence[str], serves: bool) -> None:
    """Raises ValueError for a target that no evaluation measures.

    serves: clients elsewhere may have data to measure with, of which nobody knows here.
    """
    for name in stop.target or ():
        theirs = serves and name.startswith(("client_", "personal_"))
        if name not in measured and not theirs:
            # Of how a metric is spread over clients, one stands for all.
            shown = [one for one in measured if not is_spread(one) or one.endswith("_p10")]
            raise ValueError(
                f"the target {name!r} is not measured; there is "
                f"{', '.join(sorted(shown)) or 'no test data'}"
            )


def _check_devices(strategy: Strategy, world: World, model: nn.Module) -> None:
    """Raises ValueError for a model on a GPU that would be trained elsewhere, or on several."""
    tensors = [*model.parameters(), *model.buffers()]
    there = sorted({str(tensor.device) for tensor in tensors if tensor.is_cuda})
    if not there:
        return
    if world.kind == "clients" and not world.serves and strategy.follows_model:
        if any(str(tensor.device) != there[0] for tensor in tensors):
            raise ValueError(
                f"the task's model function makes a model on {' and '.join(there)} that is not on "
                f"one device as a whole: move all of it there"
            )
        return
    if not any(name.startswith("cuda") for name in strategy.computes_on or world.computes_on):
        raise ValueError(
            f"the task's model function makes a model on {there[0]}, and here the CPU computes: "
            f"let it make the model on the CPU. One GPU is used by single-worker with device=cuda, "
            f"by worlds of threads, and by simulated clients of federated systems"
        )


def _checked_model(
    task: Task, strategy: Strategy, world: World, model: nn.Module, check: bool
) -> tuple[Proof, ...]:
    """What was tried of the model. Raises ValueError if the strategy cannot train it."""
    proof = None
    if check:
        proof = strategy.prove(task, model, world.workers)
    else:
        strategy.check_model(task, model, world.workers)
    # Conditions are of clients; other worlds have none.
    if world.conditions is not None:
        strategy.check_under(task, model, world.conditions)
    return () if proof is None else (proof,)


def _check_optimizers(task: Task, model: nn.Module) -> None:
    """Raises ValueError for an optimizer that cannot step here, or a schedule that is none."""
    tasks: list[Task] = [part for _, part in parts_of(task)]
    for one in tasks or [task]:
        # The first optimizer of a process would load the compiler, which takes seconds.
        with left_out():
            optimizer = checked_optimizer(one.optimizer, model.parameters())
        if optimizer is not None and one.lr_schedule is not None:
            check_schedule(one.lr_schedule, optimizer)


def _checked_parameters(task: Task, model: nn.Module) -> int:
    """How many parameters there are. Raises ValueError where none is trained."""
    # A list: it is gone through more than once.
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("the model has no trainable parameter")
    return sum(parameter.numel() for parameter in parameters)


def _label(strategy: Strategy, world: World) -> str:
    """What tables call the run: the strategy, its workers, and conditions that are not ideal."""
    name = strategy.label_in(world.kind)
    workers = world.workers or 1
    told = world.conditions.told() if world.conditions is not None else []
    label = ", ".join([f"{name} ×{workers}" if workers > 1 else name, *told])
    # Whole numbers lose their ".0": 5.0 reads 5.
    return re.sub(r"(?<=\d)\.0(?!\d)", "", label)


def _check_first_example(task: Task) -> None:
    """Raises ValueError if the first example of what is not in memory is no pair.

    What else is wrong with it is said when it is learned from.
    """
    if hasattr(task.train, "targets"):
        return
    # Reading an example may draw random numbers, such as a crop; the run is not to feel it.
    before = generators_state()
    try:
        task.train.batch(torch.tensor([task.train.first]))
    except ValueError:
        raise
    # Where it is learned from, the same error names the worker and the step.
    except Exception:
        return
    finally:
        restore_generators(before)

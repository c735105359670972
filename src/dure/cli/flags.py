"""The flags of the command line: dataclasses, and the parsing of several of them at once.

A strategy's fields, the parameters of a task's function, and the options below share one level of
flags. tyro makes flags of them, with help from their docstrings; what it complains of is told in
one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dure.cli.help import captured, grouped

if TYPE_CHECKING:
    from dure.contracts.stop import Stop
    from dure.contracts.task import Task

WorldName = Literal["processes", "threads"]
"""The worlds that share the flags of `WorldOptions`."""


@dataclass(frozen=True)
class Limits:
    """When the run ends, whichever comes first; ten epochs if nothing is said, twenty in compare.

    Args:
        epochs: passes over the training data, counted in examples over all workers.
        steps: optimizer steps, for systems that count steps.
        rounds: federated rounds, for systems that count rounds.
        seconds: training time, evaluation and checkpoints left out.
        target: METRIC=VALUE, such as test_accuracy=0.99; several must all be reached.
        bytes: that have travelled, such as 100MB, each counted once: what all workers have sent,
            a server and its clients too.
        patience: evaluations in a row after the best one in which a metric of the validation set
            gets no better (--validation).
        monitor: that metric, such as validation_accuracy; by default validation_loss. By it the
            best model is kept.
        min_delta: by how much an evaluation has to be better to count for patience.
    """

    epochs: float | None = None
    steps: int | None = None
    rounds: int | None = None
    seconds: float | None = None
    target: tuple[str, ...] = ()
    bytes: str | None = None
    patience: int | None = None
    monitor: str | None = None
    min_delta: float = 0.0

    def stop(self, epochs: float = 10) -> Stop:
        """The limits; `epochs` is the default if none is given."""
        from dure.contracts.stop import Stop
        from dure.settings import read_bytes

        target: dict[str, float] = {}
        for text in self.target:
            name, _, value = text.partition("=")
            try:
                target[name] = float(value)
            except ValueError:
                raise ValueError(
                    f"--target {text}: it is METRIC=VALUE, such as test_accuracy=0.99"
                ) from None
        limits = Stop(
            epochs=self.epochs,
            steps=self.steps,
            rounds=self.rounds,
            seconds=self.seconds,
            target=target or None,
            bytes=None if self.bytes is None else read_bytes(self.bytes),
            patience=self.patience,
            monitor=self.monitor,
            min_delta=self.min_delta,
        )
        # Any limit that is given stands alone: --steps 100 does not end after ten epochs too.
        none = Stop(monitor=self.monitor, min_delta=self.min_delta)
        return dataclasses.replace(limits, epochs=epochs) if limits == none else limits


@dataclass(frozen=True)
class WorldOptions:
    """Who takes part.

    Args:
        workers: ranks or threads, for systems that divide the work; one a core by default.
        world: whether the workers are processes or threads, for systems that live in both.
        devices: where threads compute, such as cpu or cuda:0 cuda:1; GPUs by default where there
            are.
        deadline: seconds that a rank waits for a silent peer.
        backend: what carries the bytes between ranks: dure through shared memory, gloo through
            sockets.
    """

    workers: int | None = None
    world: WorldName | None = None
    devices: tuple[str, ...] = ()
    deadline: float = 60.0
    backend: Literal["dure", "gloo"] = "dure"


@dataclass(frozen=True)
class RankOptions:
    """Where the ranks are, for systems whose own flags say how many there are.

    Args:
        world: processes of this machine, or simulated, under a virtual clock; --world simulated
            --help lists the conditions there.
        deadline: seconds that a rank waits for a silent peer.
        backend: what carries the bytes between ranks: dure through shared memory, gloo through
            sockets.
    """

    world: Literal["processes", "simulated"] | None = None
    deadline: float = 60.0
    backend: Literal["dure", "gloo"] = "dure"


@dataclass(frozen=True)
class NamedWorld:
    """Who takes part, where it is neither processes nor threads.

    Args:
        world: its name, or where it is: path/to/file.py:Name.
    """

    world: str


@dataclass(frozen=True)
class LearningOptions:
    """How the model is trained, whatever divides the work; what a system cannot do it refuses.

    Args:
        clip_norm: the largest norm that the gradient of an optimizer's step may have.
        precision: bf16: forward and loss under autocast.
        ema: what an average of the weights, which is then evaluated and given back, keeps of itself
            in a step or round, such as 0.999.
        compile: torch's backend that compiles the model, such as inductor.
        unfreeze: NAME=STEP, such as body.*=100: parameters that stay as they are before that step
            of the optimizer, or round; several may be named.
        validation: the share of the training data, such as 0.1, that nobody trains on and by which
            the best model is kept (best.safetensors).
    """

    clip_norm: float | None = None
    precision: Literal["bf16"] | None = None
    ema: float | None = None
    compile: str | None = None
    unfreeze: tuple[str, ...] = ()
    validation: float | None = None

    def of(self, task: Task) -> Task:
        """The task, with what is given here in place of its own."""
        given: dict[str, Any] = {}
        for name in ("clip_norm", "precision", "ema", "compile", "validation"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.unfreeze:
            given["unfreeze"] = dict(map(_from_step, self.unfreeze))
        return dataclasses.replace(task, **given) if given else task


def _from_step(text: str) -> tuple[str, int]:
    name, _, step = text.rpartition("=")
    if not name or not step.isdecimal():
        raise ValueError(f"--unfreeze {text}: it is NAME=STEP, such as body.*=100")
    return name, int(step)


@dataclass(frozen=True)
class TrainOptions:
    """How to run it.

    Args:
        seed: of weights, order of examples, sampling and dropout; same seed, same bits.
        seeds: how many seeds to train under, counted from --seed on: a run each, and over them
            mean, deviation and interval.
        out: the run folder; by default a new one in runs/. Under torchrun with restarts it is gone
            on with.
        evaluate_every: steps or rounds between evaluations; by default an epoch or a round.
        checkpoint_every: steps or rounds between checkpoints; by default an evaluation every 10 s
            or more.
        label: how tables call the run.
        weights: that the model begins with: a safetensors file, the index of several, a folder of
            Hugging Face's save_pretrained, or of a run.
        check: try on one micro-batch, before the first step, that traced and divided models compute
            what the model computes.
        track: tensorboard:FOLDER, mlflow:URI or wandb:PROJECT, which are told of the run as well.
        json: print the summary as JSON on standard output, and no progress.
    """

    seed: int = 0
    seeds: int = 1
    out: Path | None = None
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    label: str | None = None
    weights: Path | None = None
    check: bool = True
    track: str | None = None
    json: bool = False

    def with_weights(self, task: Task) -> Task:
        """The task, with these weights if any are named."""
        return task if self.weights is None else dataclasses.replace(task, weights=self.weights)

    def of_train(self) -> dict[str, Any]:
        """Those that `dure.train` takes by the same names, but for the folder."""
        names = ("seed", "evaluate_every", "checkpoint_every", "label", "check", "track")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ResumeOptions:
    """Go on with a run; everything else is in its folder.

    Args:
        resume: the run folder.
        task: the task, path/to/file.py:name, where the run was not begun here and its task is not
            one of dure's own.
        strategy: the class of the strategy, path/to/file.py:Name, likewise.
        world: the class of the world, path/to/file.py:Name, likewise.
        rules: other classes that the run names, such as a partition of your own, likewise.
        weights: where those lie that the run began with, if they are elsewhere by now.
        check: try on one micro-batch, before the first step, that traced and divided models compute
            what the model computes.
        track: tensorboard:FOLDER, mlflow:URI or wandb:PROJECT, which are told of the run as well.
        json: print the summary as JSON on standard output, and no progress.
    """

    resume: Path
    task: str | None = None
    strategy: str | None = None
    world: str | None = None
    rules: tuple[str, ...] = ()
    weights: Path | None = None
    check: bool = True
    track: str | None = None
    json: bool = False


@dataclass(frozen=True)
class CompareOptions:
    """How to compare.

    Args:
        workers: ranks or threads, for systems that divide the work; one a core by default. Of a
            parameter server: those that compute, where its settings do not say it.
        seed: of weights, order of examples, sampling and dropout; same seed, same bits.
        seeds: how many seeds each system is trained under, counted from --seed on: a run each, and
            over them mean, deviation and interval.
        out: the folder of the comparison; by default a new one in runs/.
        evaluate_every: steps or rounds between evaluations; by default an epoch or a round.
        weights: that the model begins with: a safetensors file, the index of several, a folder of
            Hugging Face's save_pretrained, or of a run.
        check: try on one micro-batch, before the first step, that traced and divided models compute
            what the model computes.
        track: tensorboard:FOLDER, mlflow:URI or wandb:PROJECT, which are told of the run as well.
        json: print the summaries as JSON on standard output, and no progress.
    """

    workers: int | None = None
    seed: int = 0
    seeds: int = 1
    out: Path | None = None
    evaluate_every: int | None = None
    weights: Path | None = None
    check: bool = True
    track: str | None = None
    json: bool = False

    def with_weights(self, task: Task) -> Task:
        """The task, with these weights if any are named."""
        return task if self.weights is None else dataclasses.replace(task, weights=self.weights)


@dataclass(frozen=True)
class ReportOptions:
    """Where to write the page.

    Args:
        out: the page; by default report.html in the first run's folder.
    """

    out: Path | None = None


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Without any of these: 4 KiB to 256 MiB on 2, 4 and 8 ranks, every contender, 5 repetitions.

    Args:
        sizes: bytes of each rank's tensor, such as 65536, 64K or 16M.
        ranks: numbers of ranks.
        contenders: of gloo, open-mpi, dure, dure-direct, dure-ordinary, dure-torch,
            dure-torch-ordinary, ring, master, one-shot, tree, halving-doubling, hierarchical,
            memory; all of them by default.
        repeats: timed batches a contender and size; their median counts.
        quick: 4 KiB to 16 MiB on 2 and 4 ranks with 3 short repetitions, where nothing else is
            said.
        fit: fit a cost model to some of the measurements, predict the others, keep the fit for this
            machine.
        out: a folder for all-reduce.json and all-reduce.html.
        json: print the result as JSON on standard output, and no progress.
    """

    sizes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    contenders: tuple[str, ...] = ()
    repeats: int | None = None
    quick: bool = False
    fit: bool = False
    out: Path | None = None
    json: bool = False


class Shown(Exception):  # noqa: N818, it is no error
    """The help that was asked for has been printed, and nothing else is to be done."""


def names_before_flags(given: list[str]) -> tuple[list[str], list[str]]:
    """The leading arguments that are no flags, and the rest."""
    # Names come first: after a flag, a word may be its value.
    count = next((i for i, argument in enumerate(given) if argument.startswith("-")), len(given))
    return given[:count], given[count:]


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """What is given for a flag, "" if nothing follows it; None if it is not there."""
    # Looked up before tyro parses: which flags there are may depend on this one.
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            return value if equals else "".join(arguments[number + 1 : number + 2])
    return None


def without(flag: str, arguments: Sequence[str]) -> list[str]:
    """The arguments, less a flag and its value."""
    left = list(arguments)
    for number, argument in enumerate(left):
        name, equals, _ = argument.partition("=")
        if name == flag:
            return left[:number] + left[number + (1 if equals else 2) :]
    return left


def parse_flags(
    prog: str,
    parts: dict[str, Any],
    arguments: list[str],
    description: str = "",
    hidden: Collection[str] = (),
) -> dict[str, Any]:
    """Parses flags into instances of several dataclasses, whose fields share one level of flags.

    parts: the dataclasses by name, as which their instances are returned. hidden: flags that the
    help leaves out. Raises ValueError with one line where tyro would print a box and end the
    process, and Shown after --help.
    """
    import tyro

    _check_own_names(parts)
    registry = tyro.constructors.ConstructorRegistry()
    texts = _texts(parts.values())

    @registry.primitive_rule
    def text_rule(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        # None leaves the type to tyro.
        return _text(info.type, texts[info.type]) if info.type in texts else None

    # Without prefixes flags are short, but two of the same name would be one.
    short = () if _names_meet(parts.values()) else (tyro.conf.OmitArgPrefixes,)
    config = (tyro.conf.FlagCreatePairsOff, *short)
    if {"--help", "-h"} & set(arguments):

        def help_of(kind: type[Any], left_out: Collection[str]) -> str:
            one = _together({"one": kind}, "", left_out)
            return captured(lambda: tyro.cli(one, prog=prog, args=["--help"], config=config))

        with registry:
            told = grouped(parts, hidden, help_of)
        print(f"usage: {prog} [--help] [OPTIONS]\n\n{description}\n\n{told}".rstrip())
        raise Shown
    together = _together(parts, description)
    # tyro prints its complaint and raises SystemExit.
    complaint = io.StringIO()
    try:
        with registry, contextlib.redirect_stderr(complaint):
            parsed: Any = tyro.cli(
                together, prog=prog, args=arguments, config=config, description=description
            )
    except SystemExit:
        raise ValueError(
            f"{_complaint(complaint.getvalue())} ({prog} --help lists the options)"
        ) from None
    return {name: _instance(kind, getattr(parsed, name)) for name, kind in parts.items()}


_PLAIN = ("builtins", "pathlib", "types", "typing")
"""Modules of types that tyro reads by itself."""


def _texts(kinds: Iterable[Any]) -> Mapping[type[Any], Callable[[str], Any]]:
    """Return the readers of fields that are written as text, by their types.

    Commands whose flags are plain need none, and are not to wait for torch.
    """
    hints = [hint for kind in kinds for hint in typing.get_type_hints(kind).values()]
    named = [one for hint in hints for one in (hint, *typing.get_args(hint))]
    if all(getattr(one, "__module__", "builtins") in _PLAIN for one in named):
        return {}
    from dure.run.registry import TEXTS

    return TEXTS


def _together(
    parts: Mapping[str, Any], description: str, left_out: Collection[str] = ()
) -> type[Any]:
    """Several dataclasses as one, as tyro is to see them. left_out: fields without help."""
    import tyro

    # name="": the parts are dataclasses in a dataclass, whose names are to be in no flag.
    fields = [
        (name, Annotated[_with_texts(kind, left_out), tyro.conf.arg(name="")])
        for name, kind in parts.items()
    ]
    together = dataclasses.make_dataclass("Options", fields, frozen=True)
    together.__doc__ = description
    return together


def _text(kind: type[Any], parse: Callable[[str], Any], optional: bool = False) -> Any:
    """How a field is read that is written as text. optional: or None."""
    import tyro

    def read(texts: list[str]) -> Any:
        return None if optional and texts[0] == "None" else parse(texts[0])

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=("{None}|" if optional else "") + kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, kind) or (optional and value is None),
        str_from_instance=lambda value: [str(value)],
    )


def _with_texts(kind: type[Any], left_out: Collection[str] = ()) -> type[Any]:
    """The dataclass as tyro is to see it. left_out: fields that no help tells of.

    A setting or None would be a choice of subcommands to it, and not a text.
    """
    import tyro

    changed: list[Any] = []
    texts = _texts([kind])
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = field.name
        inner = [one for one in typing.get_args(hints[name]) if one in texts]
        annotated: Any = hints[name]
        if inner:
            annotated = Annotated[annotated, _text(inner[0], texts[inner[0]], optional=True)]
        given: Any = field
        # What no help tells of is not asked for in it either.
        if name in left_out and _is_required(field):
            annotated = annotated | None
            given = dataclasses.field(default=None)
        if name in left_out:
            annotated = Annotated[annotated, tyro.conf.Suppress]
        if inner or name in left_out:
            changed.append((name, annotated, given))
    if not changed:
        return kind
    return dataclasses.make_dataclass(
        # Where a default is put first, the fields that need a value may follow it all the same.
        kind.__name__,
        changed,
        bases=(kind,),
        frozen=True,
        kw_only=bool(left_out),
    )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _instance(kind: type[Any], parsed: Any) -> Any:
    """What was parsed as `_with_texts`, of the dataclass itself."""
    if type(parsed) is kind:
        return parsed
    return kind(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(kind)})


_OF_USERS = {"task": "parameter", "strategy": "field", "world": "field"}
"""The parts that may be of a user's own, and what makes a flag there."""


def _check_own_names(parts: dict[str, Any]) -> None:
    """Raises ValueError if two parts have a flag of the same name."""
    names = {
        part: {field.name for field in dataclasses.fields(kind)} for part, kind in parts.items()
    }
    for part, what in _OF_USERS.items():
        # dure's own parts share no name; what a user writes may meet any of them.
        others = set().union(*(own for other, own in names.items() if other != part))
        for name in sorted(names.get(part, set()) & others):
            owner = "the task" if part == "task" else parts[part].__name__
            raise ValueError(
                f"{owner} has a {what} {name!r}, which is the name of a flag of dure: rename it"
            )


def _names_meet(kinds: Iterable[Any]) -> bool:
    """Whether a field of a dataclass inside one of these has the name of another flag.

    Then flags keep their prefixes.
    """
    hints = [hint for kind in kinds for hint in typing.get_type_hints(kind).items()]
    inner = [
        field.name
        for _, hint in hints
        if dataclasses.is_dataclass(hint)
        for field in dataclasses.fields(hint)
    ]
    outer = [name for name, hint in hints if not dataclasses.is_dataclass(hint)]
    return bool(set(inner) & set(outer))


def _complaint(box: str) -> str:
    """What tyro says in a box of many lines, in one line.

    That is its first paragraph, and the flag that was perhaps meant.
    """
    plain = re.sub(
        r"\x1b\[[0-9;]*m", "", box
    )  # it colours a terminal, and draws in ASCII where it has to
    # The first line is the upper edge of the box.
    lines = [line.strip(" │") for line in plain.splitlines()[1:]]
    if not lines[0].strip("-"):
        del lines[0]
    # The first paragraph ends at a line that is empty, or of which only the box is left.
    end = next((i for i, line in enumerate(lines) if not line.strip("─-╰╯")), len(lines))
    meant = next((line.split()[0] for line in lines[end:] if re.match("--[a-z]", line)), None)
    is_guess = any(line.startswith("Perhaps you meant") for line in lines)
    return " ".join(lines[:end]) + (f", did you mean {meant}?" if is_guess and meant else "")


def options_of_task(reference: str) -> type[Any]:
    """The task's own options as a dataclass: the parameters of the function that makes it.

    A parameter without default may be left out here: `load_task` says better what is missing.
    """
    import inspect

    from dure.tasks.builtin import hints_of, task_factory

    factory = task_factory(reference)
    fields: list[Any] = []
    if inspect.isfunction(factory):
        hints = hints_of(factory)
        for name, parameter in inspect.signature(factory).parameters.items():
            # *arguments and **options have no names to make flags of.
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            # None says that it was not given (`given_options`).
            if parameter.default is parameter.empty:
                fields.append((name, hints.get(name, str) | None, None))
            else:
                fields.append((name, hints.get(name, type(parameter.default)), parameter.default))
    options = dataclasses.make_dataclass("TaskOptions", fields, frozen=True)
    options.__doc__ = factory.__doc__ if fields else "The task has no options."
    return options


def given_options(options: Any) -> dict[str, Any]:
    """The options that were given; those left out keep the default of the task's function."""
    values = {
        field.name: (getattr(options, field.name), field.default)
        for field in dataclasses.fields(options)
    }
    return {
        name: value
        for name, (value, default) in values.items()
        # None where None is the default was not given, or would change nothing.
        if value is not None or default is not None
    }

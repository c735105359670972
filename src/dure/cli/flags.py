"""Flags of the command line: dataclasses, and the parsing of several of them together.

A strategy's fields, the parameters of a task's function, and the options below share a level of
flags. tyro turns them into flags, with help from their docstrings; its errors are shortened to a
line.
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

if TYPE_CHECKING:
    from dure.contracts.stop import Stop
    from dure.contracts.task import Task

WorldName = Literal["processes", "threads"]
"""Worlds that share the flags of `WorldOptions`."""


@dataclass(frozen=True)
class LimitOptions:
    """Limits of the run, of which the first ends it; by default ten epochs, twenty in compare.

    Args:
        epochs: passes over the training data, counted in examples over all workers.
        steps: optimizer steps, for systems that count steps.
        rounds: federated rounds, for systems that count rounds.
        seconds: training time, without evaluations and checkpoints.
        target: METRIC=VALUE, such as test_accuracy=0.99; several must all be reached.
        bytes: bytes sent, such as 100MB, each counted once, by all workers together, including a
            server and its clients.
        patience: consecutive evaluations after the best without an improvement of a metric of the
            validation set (--validation).
        monitor: that metric, such as validation_accuracy; by default validation_loss. It chooses
            the best model too.
        min_delta: least improvement of an evaluation that counts for patience.
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

    def to_stop(self, epochs: float = 10) -> Stop:
        """Return the limits; `epochs` is the default if no limit is given."""
        from dure.contracts.stop import Stop
        from dure.settings import read_bytes

        target: dict[str, float] = {}
        for text in self.target:
            name, _, value = text.partition("=")
            try:
                target[name] = float(value)
            except ValueError:
                raise ValueError(
                    f"--target {text}: write METRIC=VALUE, such as test_accuracy=0.99"
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
        # Any given limit replaces the default: --steps 100 does not end after ten epochs too.
        none = Stop(monitor=self.monitor, min_delta=self.min_delta)
        return dataclasses.replace(limits, epochs=epochs) if limits == none else limits


@dataclass(frozen=True)
class WorkerOptions:
    """Options of the workers, for a system whose own flags set the device.

    Args:
        workers: ranks or threads, for systems that divide the work; by default a worker per core.
        world: whether the workers are processes or threads, for systems that support both.
        devices: devices of threads, such as cpu or cuda:0 cuda:1; by default GPUs if there are any.
        deadline: timeout in seconds for a silent peer.
        backend: transport between ranks: dure through shared memory, gloo through sockets.
    """

    workers: int | None = None
    world: WorldName | None = None
    devices: tuple[str, ...] = ()
    deadline: float = 60.0
    backend: Literal["dure", "gloo"] = "dure"


@dataclass(frozen=True)
class WorldOptions(WorkerOptions):
    """Options of the workers.

    Args:
        device: devices of processes: cpu; cuda, a GPU for each; cuda:0, which all share; or auto.
    """

    device: str = "cpu"


@dataclass(frozen=True)
class RankOptions:
    """Options of the ranks, for systems whose own flags set the number of ranks.

    Args:
        world: processes of this machine, or simulated, under a virtual clock; --world simulated
            --help lists the conditions there.
        device: devices of processes: cpu; cuda, a GPU for each; cuda:0, which all share; or auto.
        deadline: timeout in seconds for a silent peer.
        backend: transport between ranks: dure through shared memory, gloo through sockets.
    """

    world: Literal["processes", "simulated"] | None = None
    device: str = "cpu"
    deadline: float = 60.0
    backend: Literal["dure", "gloo"] = "dure"


@dataclass(frozen=True)
class NamedWorld:
    """Option of a world that is neither processes nor threads.

    Args:
        world: its name, or its reference: path/to/file.py:Name.
    """

    world: str


@dataclass(frozen=True)
class LearningOptions:
    """Learning options of the task, for any system; a system refuses options that it cannot honour.

    Args:
        clip_norm: largest norm of the gradient of an optimizer step; larger gradients are scaled
            down.
        precision: bf16 or fp16: forward and loss under autocast; fp16 with a scale of the loss.
        ema: decay per step or round of a moving average of the weights, which is then evaluated and
            returned, such as 0.999.
        compile: torch's backend that compiles the model, such as inductor.
        unfreeze: NAME=STEP, such as body.*=100: parameters that are frozen before that step of the
            optimizer, or round; several are possible.
        adapter: lora:RANK:TARGETS:ALPHA, such as lora:8:q_proj|v_proj:16: low-rank adapters are
            trained, and the model is frozen; then stack, svd, factors, freeze-a, rslora or
            train=NAMES.
        validation: share of the training data, such as 0.1, that is not trained on and that chooses
            the best model (best.safetensors).
    """

    clip_norm: float | None = None
    precision: Literal["bf16", "fp16"] | None = None
    ema: float | None = None
    compile: str | None = None
    unfreeze: tuple[str, ...] = ()
    adapter: str | None = None
    validation: float | None = None

    def of(self, task: Task) -> Task:
        """Return the task with these options in place of its own."""
        given: dict[str, Any] = {}
        for name in ("clip_norm", "precision", "ema", "compile", "adapter", "validation"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.unfreeze:
            given["unfreeze"] = dict(map(_from_step, self.unfreeze))
        return dataclasses.replace(task, **given) if given else task


def _from_step(text: str) -> tuple[str, int]:
    name, _, step = text.rpartition("=")
    if not name or not step.isdecimal():
        raise ValueError(f"--unfreeze {text}: write NAME=STEP, such as body.*=100")
    return name, int(step)


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run.

    Args:
        seed: seed of weights, order of examples, sampling and dropout; the same seed gives the same
            bits.
        seeds: number of seeds, counted from --seed on: a run for each seed, and over the runs mean,
            deviation and interval.
        out: the run folder; by default a new folder in runs/. Under torchrun with restarts an
            existing run in it is resumed.
        evaluate_every: steps or rounds between evaluations; by default an epoch or a round.
        checkpoint_every: steps or rounds between checkpoints; by default checkpoints are written at
            evaluations, at least 10 s apart.
        label: name of the run in tables.
        weights: initial weights of the model: a safetensors file, the index of several files, a
            folder of Hugging Face's save_pretrained, or a run folder.
        check: test on a micro-batch, before the first step, that traced and divided models compute
            the same as the model.
        track: tensorboard:FOLDER, mlflow:URI or wandb:PROJECT, trackers that the run is reported
            to.
        peak_flops: floating-point operations per second of the device of a rank, such as 989e12,
            for the utilisation in tables; by default those of a table of common devices.
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
    peak_flops: float | None = None
    json: bool = False

    def with_weights(self, task: Task) -> Task:
        """Return the task with these initial weights, if any are named."""
        return task if self.weights is None else dataclasses.replace(task, weights=self.weights)

    def of_train(self) -> dict[str, Any]:
        """Return the options that `dure.train` takes by the same names, except for the folder."""
        names = (
            *("seed", "evaluate_every", "checkpoint_every", "label", "check", "track"),
            "peak_flops",
        )
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ResumeOptions:
    """Options of a resumed run; everything else is in its folder.

    Args:
        resume: the run folder.
        task: the task, path/to/file.py:name, if the run was not started here and its task is not
            built in.
        strategy: the class of the strategy, path/to/file.py:Name, likewise.
        world: the class of the world, path/to/file.py:Name, likewise.
        rules: other classes that the run names, such as a partition of your own, likewise.
        weights: new path of the run's initial weights, if they have moved.
        check: test on a micro-batch, before the first step, that traced and divided models compute
            the same as the model.
        track: tensorboard:FOLDER, mlflow:URI or wandb:PROJECT, trackers that the run is reported
            to.
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
class ResumeDevice:
    """Devices of a resumed run.

    Args:
        device: other devices than before, as of dure train: cpu, cuda, cuda:0 or auto.
    """

    device: str | None = None


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison.

    Args:
        workers: ranks or threads, for systems that divide the work; by default a worker per core.
            For a parameter server: the computing workers, if its settings do not set them.
        seed: seed of weights, order of examples, sampling and dropout; the same seed gives the same
            bits.
        seeds: number of seeds of each system, counted from --seed on: a run for each seed, and over
            the runs mean, deviation and interval.
        out: the folder of the comparison; by default a new folder in runs/.
        evaluate_every: steps or rounds between evaluations; by default an epoch or a round.
        weights: initial weights of the model: a safetensors file, the index of several files, a
            folder of Hugging Face's save_pretrained, or a run folder.
        check: test on a micro-batch, before the first step, that traced and divided models compute
            the same as the model.
        track: tensorboard:FOLDER, mlflow:URI or wandb:PROJECT, trackers that the run is reported
            to.
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
        """Return the task with these initial weights, if any are named."""
        return task if self.weights is None else dataclasses.replace(task, weights=self.weights)


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report.

    Args:
        out: path of the page; by default report.html in the first run's folder.
        language: language of the page, en or ko (Korean).
    """

    out: Path | None = None
    language: str = "en"


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark.

    By default: 4 KiB to 256 MiB on 2, 4 and 8 ranks, every contender, 5 repetitions.

    Args:
        sizes: bytes of each rank's tensor, such as 65536, 64K or 16M.
        ranks: numbers of ranks.
        contenders: any of gloo, open-mpi, dure, dure-direct, dure-ordinary, dure-torch,
            dure-torch-ordinary, ring, master, one-shot, tree, halving-doubling, hierarchical,
            memory; all of them by default.
        repeats: timed batches per contender and size; their median counts.
        quick: change the defaults to 4 KiB to 16 MiB on 2 and 4 ranks with 3 short repetitions.
        fit: fit a cost model to some of the measurements, predict the others, store the fit for
            this machine.
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


class HelpPrinted(Exception):  # noqa: N818, it is no error
    """Raised after the requested help was printed, to end the command."""


def names_before_flags(given: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments into the leading names and the rest, which begins with a flag."""
    # Names come first: after a flag, a word may be its value.
    count = next((i for i, argument in enumerate(given) if argument.startswith("-")), len(given))
    return given[:count], given[count:]


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value of a flag, "" if no value follows it, None if the flag is missing."""
    # Looked up before tyro parses: the set of flags may depend on this flag.
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            return value if equals else "".join(arguments[number + 1 : number + 2])
    return None


def without(flag: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments without a flag and its value."""
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
    """Parse flags into instances of several dataclasses, whose fields share a level of flags.

    Args:
        prog: command, for usage and errors.
        parts: dataclasses by name; the result has their instances by the same names.
        arguments: flags to parse.
        description: text of the help.
        hidden: flags that the help leaves out.

    Raises:
        ValueError: with a single line, where tyro would print a box and end the process.
        Shown: after --help.
    """
    import tyro

    _check_own_names(parts)
    registry = tyro.constructors.ConstructorRegistry()
    texts = _texts(parts.values())

    @registry.primitive_rule
    def text_rule(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        # None leaves the type to tyro.
        return _text(info.type, texts[info.type]) if info.type in texts else None

    # Without prefixes flags are short, but two flags of the same name would collide.
    short = () if _names_meet(parts.values()) else (tyro.conf.OmitArgPrefixes,)
    config = (tyro.conf.FlagCreatePairsOff, *short)
    if {"--help", "-h"} & set(arguments):

        def help_of(kind: type[Any], left_out: Collection[str]) -> str:
            one = _together({"one": kind}, "", left_out)
            return captured(lambda: tyro.cli(one, prog=prog, args=["--help"], config=config))

        with registry:
            told = grouped(parts, hidden, help_of)
        print(f"usage: {prog} [--help] [OPTIONS]\n\n{description}\n\n{told}".rstrip())
        raise HelpPrinted
    together = _together(parts, description)
    # tyro prints its error and raises SystemExit.
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
"""Modules of types that tyro parses by itself."""


def _texts(kinds: Iterable[Any]) -> Mapping[type[Any], Callable[[str], Any]]:
    """Return the parsers of fields with a text form, by type.

    Commands with plain flags need none, and must not wait for torch.
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
    """Return several dataclasses as a single class for tyro. left_out: fields without help."""
    import tyro

    # name="": the parts are nested dataclasses, whose names must not appear in flags.
    fields = [
        (name, Annotated[_with_texts(kind, left_out), tyro.conf.arg(name="")])
        for name, kind in parts.items()
    ]
    together = dataclasses.make_dataclass("Options", fields, frozen=True)
    together.__doc__ = description
    return together


def _text(kind: type[Any], parse: Callable[[str], Any], optional: bool = False) -> Any:
    """Return the tyro specification of a field with a text form. optional: None is allowed."""
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
    """Return the dataclass in the form that tyro needs. left_out: fields without help.

    tyro would take a setting or None for a choice of subcommands, and not for a text.
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
        # A field that the help leaves out must not be required either.
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
        # kw_only permits required fields after a field that got a default above.
        kind.__name__,
        changed,
        bases=(kind,),
        frozen=True,
        kw_only=bool(left_out),
    )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _instance(kind: type[Any], parsed: Any) -> Any:
    """Return an instance of the dataclass itself for an instance of its `_with_texts` form."""
    if type(parsed) is kind:
        return parsed
    return kind(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(kind)})


_OF_USERS = {"task": "parameter", "strategy": "field", "world": "field"}
"""Parts that may be a user's own, and the kind of name that becomes a flag there."""


def _check_own_names(parts: dict[str, Any]) -> None:
    """Raise ValueError if two parts have a flag of the same name."""
    names = {
        part: {field.name for field in dataclasses.fields(kind)} for part, kind in parts.items()
    }
    for part, what in _OF_USERS.items():
        # dure's own parts have distinct names; a user's part may collide with any of them.
        others = set().union(*(own for other, own in names.items() if other != part))
        for name in sorted(names.get(part, set()) & others):
            owner = "the task" if part == "task" else parts[part].__name__
            raise ValueError(
                f"{owner} has a {what} {name!r}, but dure has a flag of that name: rename it"
            )


def _names_meet(kinds: Iterable[Any]) -> bool:
    """Return whether a field of a nested dataclass has the name of another flag.

    Flags then keep their prefixes.
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
    """Return tyro's error box as a single line.

    The line has the first paragraph, and the flag that tyro suggests.
    """
    plain = re.sub(
        r"\x1b\[[0-9;]*m", "", box
    )  # it colours a terminal, and draws in ASCII where it has to
    # The first line is the upper edge of the box.
    lines = [line.strip(" │") for line in plain.splitlines()[1:]]
    if not lines[0].strip("-"):
        del lines[0]
    # The first paragraph ends at an empty line, or at a line with only the edge of the box.
    end = next((i for i, line in enumerate(lines) if not line.strip("─-╰╯")), len(lines))
    meant = next((line.split()[0] for line in lines[end:] if re.match("--[a-z]", line)), None)
    is_guess = any(line.startswith("Perhaps you meant") for line in lines)
    return " ".join(lines[:end]) + (f", did you mean {meant}?" if is_guess and meant else "")


def options_of_task(reference: str) -> type[Any]:
    """Return the task's options as a dataclass, from the parameters of its factory.

    A parameter without a default is optional here: the error of `load_task` is clearer.
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
            # None means that the option was not given (`given_options`).
            if parameter.default is parameter.empty:
                fields.append((name, hints.get(name, str) | None, None))
            else:
                fields.append((name, hints.get(name, type(parameter.default)), parameter.default))
    options = dataclasses.make_dataclass("TaskOptions", fields, frozen=True)
    options.__doc__ = factory.__doc__ if fields else "The task has no options."
    return options


def given_options(options: Any) -> dict[str, Any]:
    """Return the given options; others keep the default of the task's function."""
    values = {
        field.name: (getattr(options, field.name), field.default)
        for field in dataclasses.fields(options)
    }
    return {
        name: value
        for name, (value, default) in values.items()
        # None with a default of None was not given, or would change nothing.
        if value is not None or default is not None
    }


TITLES = {
    "strategy": "system",
    "named": "world",
    "how": "run",
    "hears": "output",
}
"""Titles of parts of the flags, if they differ from the part's name."""

OUTPUT = ("evaluate_every", "checkpoint_every", "label", "out", "json", "track")
"""Options of a run that concern its output."""

_ORDER = ("system", "task", "world", "limits", "run", "picture", "output")


def grouped(
    parts: Mapping[str, type[Any]],
    hidden: Collection[str],
    help_of: Callable[[type[Any], Collection[str]], str],
) -> str:
    """Return the help of all groups, in sequence.

    parts: dataclasses by the names of their parts. hidden: fields that do not apply. help_of:
    function that returns tyro's help of a dataclass without some fields.
    """
    texts: dict[str, list[str]] = {}
    for part, kind in parts.items():
        names = {field.name for field in dataclasses.fields(kind)}
        title = TITLES.get(part, part)
        output = names & set(OUTPUT) if title == "run" else set()
        for heading, shown in ((title, names - output), ("output", output)):
            if shown - set(hidden):
                left_out = {*hidden, *(names - shown)}
                texts.setdefault(heading, []).append(_box(help_of(kind, left_out), heading))
    others = [heading for heading in texts if heading not in _ORDER]
    return "".join(text for heading in (*_ORDER, *others) for text in texts.get(heading, ()))


def _box(text: str, heading: str) -> str:
    """Return the flags of a help text under their heading, without --help itself."""
    lines = [line.rstrip(" │|").lstrip("│|") for line in text.splitlines()]
    # tyro draws a box or, without Unicode, a rule below the heading: both are removed.
    first = next(place for place, line in enumerate(lines) if "-h, --help" in line)
    flags = [line for line in lines[first + 1 :] if line.strip(" ╰─╯+-")]
    return "\n".join([heading, *flags, "", ""])


def captured(program: Callable[[], Any]) -> str:
    """Return the standard output of a program until it exits."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        program()
    return said.getvalue()

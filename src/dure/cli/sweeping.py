"""`dure sweep TASK SYSTEM --grid NAME=VALUES ...`: find the best of several settings.

A setting is a field of the system or its world, or an option of the task, as behind a system's name
in `dure compare`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dure.cli.comparing import all_of, resumed, show_comparison
from dure.cli.flags import (
    CompareOptions,
    LearningOptions,
    LimitOptions,
    given_options,
    names_before_flags,
    options_of_task,
    parse_flags,
    value_of,
    without,
)
from dure.cli.running import check_names, file_name, run_folder, start_fork_server

if TYPE_CHECKING:
    from dure.run.compare import Comparison

USAGE = "dure sweep TASK SYSTEM --grid NAME=VALUE,VALUE ..."

ABOUT = (
    "Train one system with many settings, each in its own run. Settings are those of the system, "
    "its world or the task; settings with one value may follow the system's name, or be flags."
)


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep.

    Args:
        grid: settings with their values, such as lr=0.1,0.01 batch_size=16,64; with --random also
            ranges, lr=log:0.001:1, momentum=uniform:0:0.99 or batch_size=int:8:128.
        random: number of random trials, each of which draws every setting; by default every
            combination.
        metric: metric that ranks the trials, such as test_loss; by default a metric of validation
            data, if there are any.
    """

    grid: tuple[str, ...] = ()
    random: int | None = None
    metric: str | None = None


def main(given: list[str]) -> int:
    """Train every trial, and print the best."""
    names, flags = names_before_flags(given)
    if not names and "--resume" in [flag.partition("=")[0] for flag in flags]:
        metric = value_of("--metric", flags)
        judges = partial(_judged, metric=metric)
        return resumed(without("--metric", flags), _going_on(metric), judges)
    parts: dict[str, Any] = {
        "sweep": SweepOptions,
        "limits": LimitOptions,
        "learning": LearningOptions,
        "how": CompareOptions,
    }
    if not names and flags in (["--help"], ["-h"]):
        parse_flags(USAGE, parts, flags, ABOUT)
    if len(names) != 2:
        raise ValueError(f"{USAGE}: name a task and a system (dure --help lists them)")
    reference, system = names
    check_names(reference, [system.partition(",")[0]])
    start_fork_server()
    from dure.cli.comparison_entries import ComparisonEntries, without_options
    from dure.cli.shared_flags import shared
    from dure.run.sweep import parse_values, trials

    parts["task"] = options_of_task(reference)
    own = {field.name for part in parts.values() for field in dataclasses.fields(part)}
    system, options = without_options(system, reference)
    given_to = shared([system], flags, {*own, "help"})
    asked = parse_flags(f"dure sweep {reference} {system}", parts, given_to.flags, ABOUT)
    how: CompareOptions = asked["how"]
    what: SweepOptions = asked["sweep"]
    space = {}
    for text in what.grid:
        name, equals, values = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--grid {text}: write NAME=VALUE,VALUE, such as lr=0.1,0.01")
        setting = name.replace("-", "_")
        if setting in space:
            raise ValueError(f"--grid names {name} twice: give all its values at once, {name}=A,B")
        space[setting] = parse_values(name, values)
    learning: LearningOptions = asked["learning"]
    entries = ComparisonEntries(
        reference,
        given_options(asked["task"]),
        lambda task: how.with_weights(learning.of(task)),
    )
    tried = [
        _entry(entries, given_to.systems[0], options, trial, how.workers)
        for trial in trials(space, what.random, how.seed)
    ]
    stop = asked["limits"].to_stop()
    task = entries.task(options)
    with run_folder(how.out, f"sweep-{file_name(task)}-{system.partition(',')[0]}") as out:
        program = all_of(task, tried, stop, out, how)
        return show_comparison(
            program,
            stop,
            out,
            as_json=how.json,
            command=_going_on(what.metric),
            judges=partial(_judged, metric=what.metric),
        )


def _going_on(metric: str | None) -> str:
    """Return the command that resumes the sweep with the same metric."""
    return "dure sweep" if metric is None else f"dure sweep --metric {shlex.quote(metric)}"


def _entry(
    entries: Any,
    system: str,
    options: Mapping[str, str],
    trial: Mapping[str, Any],
    workers: int | None,
) -> tuple[Any, ...]:
    """Return a trial as a system of a comparison, labelled by its settings."""
    from dure.cli.comparison_entries import without_options

    texts = {name: str(value) for name, value in trial.items()}
    name, *settings = system.split(",")
    # Values of the trial replace settings behind the system's name.
    kept = [text for text in settings if text.partition("=")[0] not in texts]
    tried = [f"{setting}={value}" for setting, value in texts.items()]
    own, of_task = without_options(",".join([name, *kept, *tried]), entries.reference)
    told = (f"{setting.replace('_', ' ')} {_short(value)}" for setting, value in trial.items())
    label = ", ".join(told)
    return *entries.entry(own, {**options, **of_task}, workers), label


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _judged(done: Comparison, metric: str | None = None) -> Mapping[str, Any]:
    """Return the best trial and its metric, or the reason for having none."""
    from dure.run.sweep import judge_of, ranked

    if not done.runs:
        return {}
    try:
        judge = judge_of(done.runs, metric)
    # The runs are reported even if they cannot be ranked.
    except ValueError as error:
        return {"best": f"none: {error}"}
    found = ranked(done.runs, judge)
    if not found:
        return {"best": f"none: no trial has a finite {judge}"}
    best = found[0]
    said = {"best": best.label, judge: best.value}
    if best.runs[0].folder is not None:
        said["where"] = ", ".join(str(run.folder) for run in best.runs)
    if judge.startswith("test"):
        said["note"] = (
            f"it was chosen by {judge}, which is therefore too optimistic: measure it on other data"
        )
    return said

"""Run folder -> dataclasses: what `docs/run-folder.md` describes, read so that nothing left out
stops it.

A run may have been killed at any moment: `summary.json` and `trace.json` may be absent, the last
line of `history.jsonl` may be half a line. What is missing is rebuilt from the history where that
is honest and is `None` where it is not; what is damaged is left out and told in `Run.notes`. A
value of the wrong type, NaN and infinity count as missing. Where a resumed run wrote a step again,
the newer line stands.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dure.errors import RunFolderError
from dure.report.runs import (
    Assignment,
    Federation,
    Line,
    Partition,
    Rank,
    Result,
    Run,
    Runs,
    Sent,
    Span,
    Stage,
    Target,
    Trace,
    Worker,
)
from dure.report.words import higher_is_better

T = TypeVar("T")


def read_runs(folders: Sequence[Path]) -> Runs:
    """Read run folders, and folders of run folders: a comparison, or any folder with runs right
    below it.

    RunFolderError: a folder holds no run, or there are none at all.
    """
    failed: dict[str, str] = {}
    found: list[Path] = []
    for folder in map(Path, folders):
        if _is_run(folder):
            found.append(folder)
            continue
        comparison = _object(folder / "comparison.json", [])
        names = [name for name in _list(comparison.get("runs")) if isinstance(name, str)]
        below = [folder / name for name in names if _is_run(folder / name)]
        if not comparison and folder.is_dir():
            below = sorted(filter(_is_run, folder.iterdir()), key=_natural)
        broken = _mapping(comparison.get("failed"))
        failed.update({name: str(reason) for name, reason in broken.items()})
        failed.update(
            {name: "its folder is missing" for name in names if not _is_run(folder / name)}
        )
        if not below and not broken:
            raise RunFolderError(
                f"{folder} is not a run folder: it has no config.json; "
                "give a folder that dure train or dure compare wrote"
            )
        found.extend(below)
    if not found and not failed:
        raise RunFolderError("no run folders given: a report needs at least one")
    return Runs(_distinct_labels([read_run(folder) for folder in dict.fromkeys(found)]), failed)


def read_run(folder: Path) -> Run:
    """Read one run folder, however little of it there is."""
    notes: list[str] = []
    config = _object(folder / "config.json", notes)
    summary = _object(folder / "summary.json", notes)
    steps, evaluations = _history(folder / "history.jsonl", notes)
    return Run(
        folder=folder,
        label=_text(config.get("label")) or _text(summary.get("label")) or folder.name,
        config=config,
        steps=steps,
        evaluations=evaluations,
        result=_result(config, summary, steps, evaluations),
        trace=_trace(folder / "trace.json", notes),
        partition=_partition(config),
        notes=notes,
        ranks=_ranks(summary),
        federation=_federation(summary),
    )


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "history.jsonl").is_file()


def _natural(folder: Path) -> list[tuple[int, str]]:
    """run-2 before run-10."""
    parts = re.split(r"(\d+)", folder.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _distinct_labels(runs: Sequence[Run]) -> list[Run]:
    labels = [run.label for run in runs]
    return [
        replace(run, label=f"{run.label} ({run.folder.name})")
        if labels.count(run.label) > 1
        else run
        for run in runs
    ]


def _object(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} is damaged and was left out")
    return {}


def _history(path: Path, notes: list[str]) -> tuple[list[Line], list[Line]]:
    steps: list[Line] = []
    evaluations: list[Line] = []
    damaged = 0
    if not path.is_file():
        return steps, evaluations
    with path.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                raw = json.loads(text)
                step = number(raw["step"])
                kind = {"step": steps, "evaluation": evaluations}[raw["kind"]]
            except (ValueError, KeyError, TypeError):
                # A killed run leaves half a line at the end, which is no damage.
                damaged += bool(text.strip()) and text.endswith("\n")
                continue
            if step is None:
                damaged += 1
                continue
            while kind and kind[-1].step >= step:
                kind.pop()
            kind.append(_line(step, raw))
    if damaged:
        notes.append(f"{damaged} damaged lines of {path.name} were left out")
    return steps, evaluations


def _line(step: float, raw: Mapping[str, Any]) -> Line:
    return Line(
        step=step,
        epoch=number(raw.get("epoch")),
        seconds=number(raw.get("seconds")),
        loss=number(raw.get("loss")),
        bytes_sent=number(raw.get("bytes_sent")),
        compute=number(raw.get("compute_seconds")),
        communication=number(raw.get("communication_seconds")),
        idle=number(raw.get("idle_seconds")),
        peak_memory=number(raw.get("peak_memory")),
        metrics={
            str(key): number(value)
            for key, value in _mapping(raw.get("metrics", raw.get("numbers"))).items()
        },
    )


def _result(
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    steps: Sequence[Line],
    evaluations: Sequence[Line],
) -> Result:
    newest = max((*steps[-1:], *evaluations[-1:]), key=lambda line: line.step, default=None)
    evaluated = evaluations[-1] if evaluations else None
    best = _numbers(_mapping(summary.get("best"))) or _best(evaluations)
    final = {key: number(summary.get(key)) for key in best}
    if not any(value is not None for value in final.values()) and evaluated:
        final = dict(evaluated.metrics)
    per_worker = [_worker(raw) for raw in _list(summary.get("per_worker")) if isinstance(raw, dict)]
    everyone = _everyone(summary, evaluated, steps)
    return Result(
        unit=_text(summary.get("unit")) or _unit(config),
        world=_text(summary.get("world")),
        ended=_text(summary.get("ended")),
        steps=_first(number(summary.get("steps")), newest.step if newest else None),
        epochs=_first(number(summary.get("epochs")), newest.epoch if newest else None),
        seconds=_first(number(summary.get("seconds")), newest.seconds if newest else None),
        final={key: value for key, value in final.items() if value is not None},
        best=best,
        train_loss=_first(number(summary.get("train_loss")), newest.loss if newest else None),
        bytes_per_worker=_first(
            number(summary.get("bytes_sent_per_worker")), _bytes_each(config, evaluated)
        ),
        peak_memory=_first(
            number(summary.get("peak_memory")), evaluated.peak_memory if evaluated else None
        ),
        everyone=everyone,
        workers=[worker for worker in per_worker if worker.total > 0]
        or ([everyone] if everyone else []),
        targets=_targets(_mapping(summary.get("to_target"))),
    )


def _best(evaluations: Iterable[Line]) -> dict[str, float]:
    best: dict[str, float] = {}
    for line in evaluations:
        for key, value in line.metrics.items():
            if value is not None:
                better = max if higher_is_better(key) else min
                best[key] = better(best.get(key, value), value)
    return best


def _everyone(
    summary: Mapping[str, Any], evaluated: Line | None, steps: Sequence[Line]
) -> Worker | None:
    """The time of all workers together; of a run killed before it evaluated, rank 0's alone."""
    total = _worker({**summary, "name": "all workers"})
    if not total.total and evaluated:
        total = _line_worker("all workers, at the last evaluation", evaluated)
    if not total.total and steps:
        total = _line_worker("first worker", steps[-1])
    return total if total.total > 0 else None


def _worker(raw: Mapping[str, Any]) -> Worker:
    def seconds(key: str) -> float:
        return max(number(raw.get(f"{key}_seconds")) or 0.0, 0.0)

    def moved(key: str) -> float:
        return max(number(raw.get(f"bytes_{key}")) or 0.0, 0.0)

    times = (seconds("compute"), seconds("communication"), seconds("idle"))
    return Worker(str(raw.get("name", "?")), *times, moved("sent"), moved("received"))


def _line_worker(name: str, line: Line) -> Worker:
    return Worker(name, line.compute or 0.0, line.communication or 0.0, line.idle or 0.0)


def _bytes_each(config: Mapping[str, Any], evaluated: Line | None) -> float | None:
    """Bytes per rank of a killed run. Not for federations, whose sum counts the server's bytes
    too."""
    ranks = number(_mapping(config.get("world")).get("ranks"))
    if not ranks or not evaluated or evaluated.bytes_sent is None or config.get("partition"):
        return None
    return evaluated.bytes_sent / ranks


def _unit(config: Mapping[str, Any]) -> str:
    return (
        "round" if config.get("partition") or _mapping(config.get("stop")).get("rounds") else "step"
    )


def _targets(raw: Mapping[str, Any]) -> list[Target]:
    targets = []
    for key, entry in raw.items():
        value = number(_mapping(entry).get("target"))
        if value is not None:
            targets.append(Target(key, value, number(_mapping(entry).get("reached"))))
    return targets


def _trace(path: Path, notes: list[str]) -> Trace | None:
    raw = _object(path, notes)
    lanes: dict[int, str] = {}
    spans: list[Span] = []
    dropped = 0
    for event in _list(raw.get("traceEvents")):
        if not isinstance(event, dict) or not isinstance(event.get("tid", 0), int):
            continue
        lane = event.get("tid", 0)
        arguments = _mapping(event.get("args"))
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            lanes[lane] = str(arguments.get("name", lane))
        elif event.get("ph") == "M" and event.get("name") == "spans_dropped":
            dropped += int(number(arguments.get("count")) or 0)
        elif event.get("ph") == "X":
            start, length = number(event.get("ts")), number(event.get("dur"))
            if start is not None and length is not None and length >= 0:
                step = number(arguments.get("step"))
                name = str(event.get("name", "")) + ("" if step is None else f" {step:.0f}")
                category, at = str(event.get("cat", "")), None if step is None else int(step)
                spans.append(Span(lane, name, category, start / 1000, length / 1000, at))
    if not spans:
        return None
    spans.sort(key=lambda span: span.start)
    return Trace({**{span.lane: f"lane {span.lane}" for span in spans}, **lanes}, spans, dropped)


def _ranks(summary: Mapping[str, Any]) -> list[Rank]:
    """The ranks that told something of themselves; empty where one of them did not."""
    told = [_mapping(facts) for facts in _list(summary.get("facts"))]
    workers = [_mapping(worker) for worker in _list(summary.get("per_worker"))]
    if len(told) != len(workers):
        return []
    ranks: list[Rank] = []
    for facts, worker in zip(told, workers, strict=True):
        at = [
            number(_mapping(facts.get("at")).get(axis)) for axis in ("data", "pipeline", "tensor")
        ]
        if None in at or not isinstance(facts.get("held"), dict):
            return []
        inside = _mapping(facts.get("inside"))
        seconds, steps = number(inside.get("seconds")), number(inside.get("steps"))
        ranks.append(
            Rank(
                name=str(worker.get("name", f"rank {len(ranks)}")),
                at=(int(at[0] or 0), int(at[1] or 0), int(at[2] or 0)),
                stages=[_stage(_mapping(stage)) for stage in _list(facts.get("stages"))],
                held=_numbers(facts["held"]),
                peak_memory=number(worker.get("peak_memory")) or None,
                inside=seconds / steps if seconds and steps else None,
                schedule=_text(facts.get("schedule")),
            )
        )
    return ranks


def _stage(raw: Mapping[str, Any]) -> Stage:
    def whole(key: str) -> int:
        return int(number(raw.get(key)) or 0)

    return Stage(
        whole("stage"),
        str(raw.get("begins", "")),
        whole("parameters"),
        whole("there"),
        whole("back"),
    )


def _federation(summary: Mapping[str, Any]) -> Federation | None:
    """What the server told; None where it is no federation's."""
    facts = _mapping(next(iter(_list(summary.get("facts"))), None))
    if not isinstance(facts.get("flights"), list):
        return None
    return Federation(
        engine=_text(facts.get("engine")),
        assignments=_rows(facts["flights"], _assignment),
        outcomes={
            str(key): int(number(value) or 0)
            for key, value in _mapping(facts.get("outcomes")).items()
        },
        staleness=_counts(facts.get("staleness")),
        turns=_counts(facts.get("turns")),
        updates=_rows(facts.get("updates"), _sent),
        by_client={
            str(key): [number(value) for value in _list(values)]
            for key, values in _mapping(facts.get("by_client")).items()
        },
        why=_text(facts.get("why")),
        refusals={
            str(key): int(number(value) or 0)
            for key, value in _mapping(facts.get("refusals")).items()
        },
    )


def _assignment(raw: Sequence[Any]) -> Assignment:
    client, round, outcome = raw[0], raw[1], raw[4]
    began, ended = number(raw[2]), number(raw[3])
    if began is None or ended is None:
        raise ValueError("an assignment has a beginning and an end")
    return Assignment(int(client), int(round), began, ended, str(outcome))


def _sent(raw: Sequence[Any]) -> Sent:
    round, client, lies, norm, cosine = raw
    return Sent(int(round), int(client), bool(lies), number(norm), number(cosine))


def _counts(raw: object) -> dict[int, int]:
    def pair(row: Sequence[Any]) -> tuple[int, int]:
        key, value = row
        return int(key), int(value)

    return dict(_rows(raw, pair))


def _rows(raw: object, made: Callable[[Sequence[Any]], T]) -> list[T]:
    """What is made of each row; damaged ones are left out."""
    rows: list[T] = []
    for row in _list(raw):
        with contextlib.suppress(TypeError, ValueError, LookupError):
            rows.append(made(row))
    return rows


def _partition(config: Mapping[str, Any]) -> Partition | None:
    raw = _mapping(config.get("partition"))
    counts = [int(number(value) or 0) for value in _list(raw.get("counts"))]
    rows = [
        [int(number(cell) or 0) for cell in _list(row)]
        for row in _list(raw.get("label_histograms"))
    ]
    if not counts:
        counts = [sum(row) for row in rows]
    if not counts:
        return None
    width = max(map(len, rows), default=0)
    histograms = (
        [row + [0] * (width - len(row)) for row in rows]
        if width and len(rows) == len(counts)
        else None
    )
    names = [str(name) for name in _list(config.get("classes"))]
    classes = names if len(names) == width else [str(index) for index in range(width)]
    return Partition(_text(raw.get("description")) or "partition", counts, histograms, classes)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _numbers(raw: Mapping[str, Any]) -> dict[str, float]:
    pairs = {key: number(value) for key, value in raw.items()}
    return {key: value for key, value in pairs.items() if value is not None}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []

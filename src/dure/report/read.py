"""Read run folders into dataclasses: the files of `docs/run-folder.md`, as far as they exist.

A run may have been killed at any moment: `summary.json` and `trace.json` may be absent, the last
line of `history.jsonl` may be incomplete. Missing values are rebuilt from the history if that is
exact, and are `None` otherwise; damaged content is left out and reported in `ReportedRun.notes`. A
value of the wrong type, NaN and infinity count as missing. If a resumed run wrote a step again, the
newer line counts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dure.errors import RunFolderError
from dure.record.largest_sender import largest_sender
from dure.record.live_status import NOW
from dure.record.settings import LINEAGE, alteration_note, without_sums
from dure.record.training_amount import training_amount
from dure.record.untrusted_files import contents
from dure.report.facts import (
    divided_of,
    federation_of,
    leakage_of,
    promises_of,
    ranks_of,
    servers_of,
)
from dure.report.formatting import higher_is_better
from dure.report.history_file import HistoryFile
from dure.report.json_values import listing, mapping, number, numbers, text_of, whole
from dure.report.prediction_tables import answers_of
from dure.report.runs import (
    BestModel,
    HistoryLine,
    PartitionSummary,
    ReportedRun,
    ReportedRuns,
    RunResult,
    RunTimeline,
    TargetResult,
    TimelineSpan,
    WorkerTime,
)
from dure.report.update_leakage import audit_of


def read_runs(folders: Sequence[Path]) -> ReportedRuns:
    """Read run folders, and folders of run folders: a comparison, or any folder with runs.

    Raises RunFolderError if a folder has no run, or no folders are given.
    """
    found, failed = run_folders(folders)
    return ReportedRuns(distinct_labels([read_run(folder) for folder in found]), failed)


def run_folders(folders: Sequence[Path]) -> tuple[list[Path], dict[str, str]]:
    """Return (run folders, failed runs with reasons). Raises RunFolderError if there are none."""
    failed: dict[str, str] = {}
    found: list[Path] = []
    # A run folder itself, or a folder with runs directly below; no deeper search.
    for folder in map(Path, folders):
        if _is_run(folder):
            found.append(folder)
            continue
        below, broken = _runs_below(folder)
        if not below and not broken:
            raise RunFolderError(
                f"{folder} is not a run folder: it has no config.json; give a folder written by "
                "dure train or dure compare"
            )
        found.extend(below)
        failed.update(broken)
    if not found and not failed:
        raise RunFolderError("no run folders given: a report needs at least one")
    # dict.fromkeys: a folder that is given twice, or is inside a given folder, counts once.
    return list(dict.fromkeys(found)), failed


def _runs_below(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the run folders in a folder, and the failed runs of a comparison with reasons."""
    comparison = _object(folder / "comparison.json", [])
    # No comparison, or a damaged one: all runs in the folder.
    if not comparison:
        inside = folder.iterdir() if folder.is_dir() else ()
        return sorted(filter(_is_run, inside), key=_natural), {}
    # In the requested order, which the names of folders do not show. A comparison that is in
    # progress, or was killed, lists only the planned runs.
    begun = comparison.get("runs")
    names = [name for name in listing(begun or comparison.get("planned")) if isinstance(name, str)]
    # Only subfolders: a comparison from elsewhere must not show other folders of the reader.
    names = [name for name in names if Path(name).name == name]
    failed = {name: str(reason) for name, reason in mapping(comparison.get("failed")).items()}
    if begun is None:
        names = [name for name in names if (folder / name / "history.jsonl").is_file()]
    missing = [name for name in names if not _is_run(folder / name)]
    failed.update(dict.fromkeys(missing, "its folder is missing"))
    return [folder / name for name in names if name not in missing], failed


def read_run(folder: Path, lines: HistoryFile | None = None) -> ReportedRun:
    """Read a run folder, however incomplete.

    lines: history of the run, if the caller reads it repeatedly while it grows.
    """
    notes: list[str] = []
    config = _config(folder, notes)
    summary = _object(folder / "summary.json", notes)
    lines = HistoryFile(folder / "history.jsonl") if lines is None else lines
    lines.read()
    if lines.damaged:
        notes.append(f"{lines.damaged} damaged lines of {lines.path.name} were left out")
    steps = lines.steps
    evaluations = lines.evaluations
    # Facts of the run at its end; before the end the last report (docs/run-folder.md).
    told = summary or _object(folder / NOW, notes)
    return ReportedRun(
        folder=folder,
        label=text_of(config.get("label")) or text_of(summary.get("label")) or folder.name,
        config=config,
        steps=steps,
        evaluations=evaluations,
        result=_result(config, summary, steps, evaluations),
        trace=_trace(folder / "trace.json", notes),
        partition=_partition(config),
        notes=notes,
        ranks=ranks_of(told),
        federation=federation_of(told),
        servers=servers_of(told),
        divided=divided_of(told),
        leakage=leakage_of(told),
        promises=promises_of(told),
        audit=audit_of(folder, _object(folder / "audit.json", notes)),
        answers=answers_of(folder, _object(folder / "answers.json", notes)),
    )


def _config(folder: Path, notes: list[str]) -> Mapping[str, Any]:
    """Return config.json. A note reports changes since it was written or signed."""
    config = _object(folder / "config.json", notes)
    lineage = mapping(_object(folder / LINEAGE, notes).get("lineage"))
    wrong = alteration_note(config, lineage.get("config_sha256"))
    if wrong is not None:
        notes.append(wrong)
    served = mapping(config.get("world")).get("name") == "network"
    if served and not lineage and (folder / "summary.json").is_file():
        notes.append("this run is not signed: its files may have been changed")
    return without_sums(config)


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "history.jsonl").is_file()


def _natural(folder: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts run-2 before run-10."""
    parts = re.split(r"(\d+)", folder.name)
    # Pairs, so that numbers and texts compare; a text precedes a number.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def distinct_labels(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Return the runs with distinct labels: equal labels get the name of the folder."""
    times = Counter(run.label for run in runs)

    def named(run: ReportedRun) -> ReportedRun:
        if times[run.label] == 1:
            return run
        return replace(run, label=f"{run.label} ({run.folder.name})")

    return list(map(named, runs))


def _object(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        value = json.loads(contents(path).decode(errors="replace"))
    except FileNotFoundError:
        return {}
    # RecursionError: nesting that is too deep, which no run writes.
    except (OSError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} is damaged and was left out")
    return {}


def _result(
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    steps: Sequence[HistoryLine],
    evaluations: Sequence[HistoryLine],
) -> RunResult:
    # The last step, or a later evaluation if the step lines end before it.
    newest = max((*steps[-1:], *evaluations[-1:]), key=lambda line: line.step, default=_NOTHING)
    evaluated = evaluations[-1] if evaluations else _NOTHING
    best = numbers(mapping(summary.get("best"))) or _best(evaluations)
    # summary.json mixes final metrics with other keys: those with a best value are metrics.
    final = numbers({key: summary.get(key) for key in best}) or numbers(evaluated.metrics)
    per_worker = [
        _worker(raw) for raw in listing(summary.get("per_worker")) if isinstance(raw, dict)
    ]
    # Clients that were never chosen have spent no time.
    busy = [worker for worker in per_worker if worker.total > 0]
    everyone = _everyone(summary, evaluated, steps)

    def told(key: str, otherwise: float | None) -> float | None:
        """Return the summary's value; without a summary, the history's."""
        said = number(summary.get(key))
        return otherwise if said is None else said

    unit = text_of(summary.get("unit")) or _unit(config)
    sent = told("bytes_sent_per_worker", _bytes_each(config, evaluated))
    # The newest line has the numbers of a run without a summary.
    newest_numbers = {"numbers": newest.metrics, "steps": newest.step, "epochs": newest.epoch}
    return RunResult(
        unit=unit,
        world=text_of(summary.get("world")),
        ended=text_of(summary.get("ended")),
        steps=told("steps", None if newest is _NOTHING else newest.step),
        epochs=told("epochs", newest.epoch),
        seconds=told("seconds", newest.seconds),
        final=final,
        best=best,
        train_loss=told("train_loss", newest.loss),
        bytes_per_worker=sent,
        peak_memory=told("peak_memory", evaluated.peak_memory),
        device_memory=told("peak_device_memory", evaluated.device_memory),
        mfu=number(summary.get("mfu")),
        everyone=everyone,
        workers=busy or ([everyone] if everyone else []),
        targets=_targets(mapping(summary.get("to_target"))),
        shuffle=_shuffle(summary),
        chosen=_chosen(summary),
        mean_of=text_of(summary.get("mean_of")),
        baseline=numbers(mapping(summary.get("baseline"))),
        amount=training_amount(config, {**newest_numbers, **summary, "unit": unit}),
        largest_sender=largest_sender(
            [raw for raw in listing(summary.get("per_worker")) if isinstance(raw, dict)], sent
        ),
    )


def _chosen(summary: Mapping[str, Any]) -> BestModel | None:
    """Return the best model; None if none was chosen, or an older dure wrote no metrics."""
    said = mapping(summary.get("best_model"))
    step = number(said.get("step"))
    metrics = numbers(mapping(said.get("metrics")))
    if step is None or not metrics:
        return None
    return BestModel(step, text_of(said.get("monitor")) or "", metrics)


def _shuffle(summary: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return bytes and seconds of shuffling of a worker; None if unknown."""
    workers = number(summary.get("workers"))
    nbytes = number(summary.get("shuffle_bytes"))
    seconds = number(summary.get("shuffle_seconds"))
    if not workers or nbytes is None or seconds is None:
        return None
    return nbytes / workers, seconds / workers


_NOTHING = HistoryLine(
    step=0.0,
    epoch=None,
    seconds=None,
    loss=None,
    bytes_sent=None,
    compute=None,
    communication=None,
    idle=None,
    peak_memory=None,
    metrics={},
)
"""Values of a history without lines."""


def _best(evaluations: Iterable[HistoryLine]) -> dict[str, float]:
    best: dict[str, float] = {}
    for line in evaluations:
        for key, value in line.metrics.items():
            if value is not None:
                better = max if higher_is_better(key) else min
                best[key] = better(best.get(key, value), value)
    return best


def _everyone(
    summary: Mapping[str, Any], evaluated: HistoryLine, steps: Sequence[HistoryLine]
) -> WorkerTime | None:
    """Return the time of all workers together; of rank 0 alone, if killed before an evaluation."""
    total = _worker({**summary, "name": "all workers"})
    # No summary: a killed run. Evaluations count all workers, steps rank 0 alone.
    if not total.total:
        total = _line_worker("all workers, at the last evaluation", evaluated)
    if not total.total and steps:
        total = _line_worker("first worker", steps[-1])
    return total if total.total > 0 else None


def _worker(raw: Mapping[str, Any]) -> WorkerTime:
    def amount(key: str) -> float:
        return max(number(raw.get(key)) or 0.0, 0.0)

    return WorkerTime(
        name=str(raw.get("name", "?")),
        compute=amount("compute_seconds"),
        communication=amount("communication_seconds"),
        idle=amount("idle_seconds"),
        sent=amount("bytes_sent"),
        received=amount("bytes_received"),
    )


def _line_worker(name: str, line: HistoryLine) -> WorkerTime:
    return WorkerTime(name, line.compute or 0.0, line.communication or 0.0, line.idle or 0.0)


def _bytes_each(config: Mapping[str, Any], evaluated: HistoryLine) -> float | None:
    """Return the bytes per rank of a killed run.

    None for federations, whose sum includes the server's bytes.
    """
    ranks = number(mapping(config.get("world")).get("ranks"))
    # Only a federation has a partition.
    if not ranks or evaluated.bytes_sent is None or config.get("partition"):
        return None
    return evaluated.bytes_sent / ranks


def _unit(config: Mapping[str, Any]) -> str:
    of_rounds = config.get("partition") or mapping(config.get("stop")).get("rounds")
    return "round" if of_rounds else "step"


def _targets(raw: Mapping[str, Any]) -> list[TargetResult]:
    targets = []
    for key, entry in raw.items():
        value = number(mapping(entry).get("target"))
        if value is not None:
            targets.append(TargetResult(key, value, number(mapping(entry).get("reached"))))
    return targets


def _trace(path: Path, notes: list[str]) -> RunTimeline | None:
    raw = _object(path, notes)
    lanes: dict[int, str] = {}
    spans: list[TimelineSpan] = []
    dropped = 0
    for event in listing(raw.get("traceEvents")):
        if not isinstance(event, dict) or not isinstance(event.get("tid", 0), int):
            continue
        lane = event.get("tid", 0)
        arguments = mapping(event.get("args"))
        kind = (event.get("ph"), event.get("name"))
        if kind == ("M", "thread_name"):
            lanes[lane] = str(arguments.get("name", lane))
        elif kind == ("M", "spans_dropped"):
            dropped += whole(arguments.get("count"))
        elif kind[0] == "X":
            spans += _spans(lane, event, arguments)
    if not spans:
        return None
    spans.sort(key=lambda span: span.start)
    # A lane whose name was damaged still has its spans.
    nameless = {span.lane: f"lane {span.lane}" for span in spans}
    return RunTimeline(nameless | lanes, spans, dropped)


def _spans(lane: int, event: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[TimelineSpan]:
    """Return the span of an event, times in milliseconds; [] if its times are damaged."""
    start = number(event.get("ts"))
    length = number(event.get("dur"))
    if start is None or length is None or length < 0:
        return []
    step = number(arguments.get("step"))
    name = str(event.get("name", ""))
    return [
        TimelineSpan(
            lane,
            name if step is None else f"{name} {step:.0f}",
            category=str(event.get("cat", "")),
            # Chrome's trace events count microseconds.
            start=start / 1000,
            duration=length / 1000,
            step=None if step is None else int(step),
        )
    ]


def _partition(config: Mapping[str, Any]) -> PartitionSummary | None:
    raw = mapping(config.get("partition"))
    counts = list(map(whole, listing(raw.get("counts"))))
    rows = [list(map(whole, listing(row))) for row in listing(raw.get("label_histograms"))]
    if not counts:
        counts = [sum(row) for row in rows]
    if not counts:
        return None
    width = max(map(len, rows), default=0)
    histograms = None
    if width and len(rows) == len(counts):
        # Short rows are padded: the chart needs a rectangle.
        histograms = [row + [0] * (width - len(row)) for row in rows]
    names = [str(name) for name in listing(config.get("classes"))]
    classes = names if len(names) == width else [str(index) for index in range(width)]
    called = [str(name) for name in listing(raw.get("names"))]
    return PartitionSummary(
        text_of(raw.get("description")) or "partition",
        counts,
        histograms,
        classes,
        called if len(called) == len(counts) else None,
    )

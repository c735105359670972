"""A pipeline in the report: a measured step, and its schedule simulated with the same times.

The measured step is the full step with the median makespan among the recorded steps, except for the
first. The simulation executes the same schedule. In each stage each kind of action takes its mean
time in that step, and messages take no time: the measured step takes longer by its messages and by
uneven work.

    bubble = 1 - busy / (p · makespan)   of p ranks: idle as a share of all time
    idle over busy = bubble / (1 - bubble)
    makespan = from the first action's start to the last action's end

The ranks are those of the first pipeline: in a mesh, the ranks with data and tensor index 0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.record import idleness
from dure.report.document import section
from dure.report.formatting import UNKNOWN, count, duration, escape, size
from dure.report.html_fragments import swatch
from dure.report.runs import RankFacts, ReportedRun, RunTimeline, StageFacts
from dure.report.translation import recorded, translated

if TYPE_CHECKING:
    from dure.parallel.pipeline.schedule import Action, Schedule
    from dure.parallel.pipeline.simulate import ActionSpan, ScheduleSimulation, Times

# Spans of a pipeline are named "forward 3.1": kind, stage, micro-batch, in the order of `Action`.
_NAMED = re.compile(r"(forward|backward|input gradient|weight gradient) ([0-9]+)\.([0-9]+)\b")


@dataclass(frozen=True)
class MeasuredPipelineStep:
    """A step of a run, on the ranks of its first pipeline, and its simulation."""

    step: int
    ranks: Sequence[RankFacts]
    measured: ScheduleSimulation
    simulated: ScheduleSimulation


def measured_step(run: ReportedRun) -> MeasuredPipelineStep | None:
    """Return the median step of a run.

    None for a run that has no pipeline, no facts about it, or no full step.
    """
    # Along the pipeline axis alone: data index 0, tensor index 0.
    ranks = [rank for rank in run.ranks if rank.at[0] == 0 and rank.at[2] == 0]
    text = run.ranks[0].schedule if run.ranks else None
    if len(ranks) < 2 or text is None or run.trace is None:
        return None
    # These modules load torch, which a report of other runs does not need.
    from dure.parallel.pipeline.schedule import Schedule
    from dure.parallel.pipeline.simulate import simulate

    try:
        schedule = Schedule.parse(text)
    # The text is from the folder, which may be damaged.
    except ValueError:
        return None
    steps = _full_steps(run.trace, [rank.name for rank in ranks], schedule)
    # The first step is slower than the others; it counts only if there is no other.
    rest = {step: spans for step, spans in steps.items() if step > min(steps)} or steps
    if not rest:
        return None
    found = {step: _simulation(spans, schedule.ranks) for step, spans in rest.items()}
    ordered = sorted(found, key=lambda step: (found[step].makespan, step))
    # The lower median: a measured step, and not the mean of two.
    step = ordered[(len(ordered) - 1) // 2]
    times = _mean_times(found[step].spans, schedule.stages)
    return MeasuredPipelineStep(
        step, ranks, measured=found[step], simulated=simulate(schedule, times)
    )


def _simulation(spans: Sequence[ActionSpan], ranks: int) -> ScheduleSimulation:
    """Return the measured spans in the form of a simulation."""
    from dure.parallel.pipeline.simulate import ScheduleSimulation, peak_of

    # In order of execution, which determines the number of stored activations.
    actions = _by_rank(spans, ranks)
    return ScheduleSimulation(ranks, tuple(spans), tuple(map(peak_of, actions)))


def _by_rank(spans: Sequence[ActionSpan], ranks: int) -> list[list[Action]]:
    """Return the actions of each rank, in order."""
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    for span in spans:
        actions[span.rank].append(span.action)
    return actions


def _full_steps(
    trace: RunTimeline, names: Sequence[str], schedule: Schedule
) -> dict[int, list[ActionSpan]]:
    """Return the computing spans of each full step, by start; times in seconds.

    A step is full if every action of the schedule was recorded.
    """
    from dure.parallel.pipeline.schedule import Action
    from dure.parallel.pipeline.simulate import ActionSpan

    place = {lane: names.index(name) for lane, name in trace.lanes.items() if name in names}
    kinds = {kind.replace("_", " "): kind for kind in _KINDS}
    steps: dict[int, list[ActionSpan]] = defaultdict(list)
    for span in trace.spans:
        if span.lane not in place or span.category != "compute" or span.step is None:
            continue
        said = _NAMED.match(span.name)
        if said is not None:
            action = Action(kinds[said[1]], int(said[2]), int(said[3]))  # type: ignore[arg-type]
            start = span.start / 1000
            end = start + span.duration / 1000
            steps[span.step].append(ActionSpan(place[span.lane], action, start, end))
    whole = [set(actions) for actions in schedule.computing]
    # The number too: an action that was recorded twice would not show in a set.
    expected = sum(map(len, whole))

    def full(spans: Sequence[ActionSpan]) -> bool:
        return len(spans) == expected and [*map(set, _by_rank(spans, schedule.ranks))] == whole

    return {step: spans for step, spans in steps.items() if full(spans)}


_KINDS = ("forward", "backward", "input_gradient", "weight_gradient")


def _mean_times(spans: Sequence[ActionSpan], stages: int) -> Times:
    """Return the mean time of each kind of action in each stage."""
    from dure.parallel.pipeline.simulate import Times

    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in spans:
        seconds[span.action.kind, span.action.stage].append(span.end - span.start)

    def means(kind: str) -> tuple[float, ...]:
        found = [seconds.get((kind, stage), [0.0]) for stage in range(stages)]
        return tuple(sum(times) / len(times) for times in found)

    return Times(
        forward=means("forward"),
        backward=means("backward"),
        input_gradient=means("input_gradient"),
        weight_gradient=means("weight_gradient"),
    )


def in_a_line(run: ReportedRun) -> str | None:
    """Return the stages and the bubble in a line for a terminal; None without a pipeline."""
    found = measured_step(run)
    if found is None:
        return None
    stages = _stages(found.ranks)
    begins = [stage.begins or "the start" for stage, _ in stages]
    shown = begins if len(begins) <= _STAGES_IN_A_LINE else [*begins[: _STAGES_IN_A_LINE - 1], "…"]
    # Both forms, as everywhere: 50 % (1.00) is as long idle as busy.
    measured = f"bubble (over busy) {idleness.written(found.measured.bubble)}"
    simulated = f"simulated {idleness.written(found.simulated.bubble)}"
    where = f"{len(stages)} stages, from {', '.join(shown)}"
    return f"{where}; {measured}, {simulated}, in step {found.step}"


_STAGES_IN_A_LINE = 6
"""Most stages in a line; a longer list ends in an ellipsis."""


# The section.


def pipelines(runs: Sequence[ReportedRun]) -> str:
    """Return the section on the pipelines among the runs; empty without pipelines."""
    blocks = ""
    for index, run in enumerate(runs):
        step = measured_step(run)
        if step is not None:
            title = translated("{run}, step {step}", run=escape(run.label), step=step.step)
            body = f"{_gantt(step)}{_numbers(step)}{_stage_table(step)}"
            blocks += (
                f'<div class="pipeline"><h3>{swatch(index)}<span>{title}</span></h3>{body}</div>'
            )
    if not blocks:
        return ""
    lead = (
        "One step from the middle of each run, the median of its full steps, as measured. Below "
        "it the same schedule, simulated: messages take no time, and each kind of action takes "
        "its mean duration in that step and stage. The bubble is the share of the ranks’ time in "
        "which they compute nothing, and idle over busy that time over the one in which they "
        "compute. The table has the largest number of micro-batches that a rank holds at once, "
        "each of one stage. There and back are the bytes of values and of gradients that cross "
        "to the next stage in a full step. For a mesh, the first pipeline is shown; for divided "
        "layers, one part."
    )
    return section("pipelines", "Pipeline", lead, blocks)


def _gantt(step: MeasuredPipelineStep) -> str:
    from dure.parallel.pipeline.gantt import gantt_svg

    def in_milliseconds(spans: Sequence[ActionSpan]) -> list[ActionSpan]:
        return [span._replace(start=span.start * 1000, end=span.end * 1000) for span in spans]

    panels = [(translated(name), in_milliseconds(one.spans)) for name, one in _both(step).items()]
    names = [recorded(rank.name) for rank in step.ranks]
    drawn = gantt_svg(panels, "ms", names=names, inside=True, write=translated)
    name = translated("Gantt chart")
    return f'<div class="gantt" role="region" aria-label="{name}" tabindex="0">{drawn}</div>'


def _both(step: MeasuredPipelineStep) -> Mapping[str, ScheduleSimulation]:
    return {"measured": step.measured, "simulated": step.simulated}


def _numbers(step: MeasuredPipelineStep) -> str:
    held = [translated("held by {rank}", rank=escape(recorded(rank.name))) for rank in step.ranks]
    rows = ""
    for name, one in _both(step).items():
        over = one.idle_over_busy
        idle = [_percent(one.bubble), UNKNOWN if over is None else f"{over:.3f}"]
        cells = [*idle, duration(one.makespan), *map(str, one.peak_activations)]
        rows += f'<tr><th scope="row">{translated(name)}</th>{"".join(map(_cell, cells))}</tr>'
    return _table("Bubble", _heads("", "bubble", "idle over busy", "makespan", *held), rows)


def _stage_table(step: MeasuredPipelineStep) -> str:
    rows = ""
    stages = _stages(step.ranks)
    for place, (stage, rank) in enumerate(stages):
        if place + 1 == len(stages):
            crossing = f"<td>{UNKNOWN}</td><td>{UNKNOWN}</td>"
        # Interleaved: the next stage is on the same rank, so nothing is sent.
        elif stages[place + 1][1] is rank:
            crossing = f'<td colspan="2">{translated("stays on the rank")}</td>'
        else:
            crossing = _cell(size(stage.there)) + _cell(size(stage.back))
        rows += (
            f'<tr><th scope="row">{stage.number}</th>'
            f'<td class="text">{escape(recorded(rank.name))}</td>'
            f'<td class="text">{escape(stage.begins) or translated("the model itself")}</td>'
            f"<td>{count(stage.parameters)}</td>{crossing}</tr>"
        )
    words = "".join(
        f'<th scope="col" class="text">{translated(name)}</th>' for name in ("on", "begins at")
    )
    head = f"{_heads('stage')}{words}{_heads('parameters', 'there', 'back')}"
    return _table("Stages", head, rows)


def _stages(ranks: Sequence[RankFacts]) -> list[tuple[StageFacts, RankFacts]]:
    """Return every stage with its rank, in order."""
    found: list[tuple[StageFacts, RankFacts]] = []
    for rank in ranks:
        found += [(stage, rank) for stage in rank.stages]
    return sorted(found, key=lambda pair: pair[0].number)


def _heads(*names: str) -> str:
    return "".join(f'<th scope="col">{translated(name)}</th>' for name in names)


def _cell(text: str) -> str:
    return f"<td>{text}</td>"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(name: str, head: str, rows: str) -> str:
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    around = f'class="scroll small" role="region" aria-label="{translated(name)}" tabindex="0"'
    return f"<div {around}>{table}</div>"

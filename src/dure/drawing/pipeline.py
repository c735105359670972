"""Pipeline schedules: the slots of each rank, and the idle time between them.

The picture shows a simulation of the actions that a rank executes
(`dure.parallel.pipeline.builders.make`). A unit of time is given by the costs of a micro-batch in
the layers of one rank. With v stages a rank, a stage takes a v-th of these costs. The naive
schedule has the whole batch as one micro-batch, which takes m times these costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dure.drawing.options import PipelineDrawing
from dure.drawing.picture import Picture, StyledText, TerminalLine, heading, line, text_table
from dure.drawing.svg import MARGIN, WIDTH, Entry, SvgCanvas, svg_page
from dure.parallel.pipeline.builders import make
from dure.parallel.pipeline.gantt import DIGITS, gantt_svg, gantt_text
from dure.parallel.pipeline.schedule import Kind
from dure.parallel.pipeline.simulate import ScheduleSimulation, Times, simulate

_LARGEST = 4096
"""Most boxes of a schedule; a picture with more is unreadable."""

_CLASSES: dict[Kind, str] = {
    "forward": "f",
    "backward": "b",
    "input_gradient": "b",
    "weight_gradient": "w",
}


@dataclass(frozen=True)
class SimulatedSchedule:
    """Schedule by its name, its numbers, and its simulation."""

    name: str
    microbatches: int
    stages_per_rank: int
    simulation: ScheduleSimulation

    @property
    def figures(self) -> tuple[str, str, str, str, str]:
        """Idle time as a share and over busy time, duration, activations of a rank, name."""
        run = self.simulation
        over = run.idle_over_busy
        held = max(run.peak_activations)
        size = "" if self.stages_per_rank == 1 else f" of 1/{self.stages_per_rank} size"
        return (
            self.name,
            f"{100 * run.bubble:.1f} %",
            "–" if over is None else f"{over:.3f}",
            f"{run.makespan:.4g}",
            f"{held}{size}",
        )


def simulated(name: str, how: PipelineDrawing) -> SimulatedSchedule:
    """Simulate a schedule. name: of the schedule.

    Half of a backward is an input gradient, half a weight gradient. Raises ValueError if the
    schedule does not exist, or does not support these numbers.
    """
    ranks, microbatches = how.ranks, how.microbatches
    stages_per_rank = 2 if how.stages_per_rank is None else how.stages_per_rank
    for what, cost in (("forward", how.forward), ("backward", how.backward)):
        if not (math.isfinite(cost) and cost > 0):
            raise ValueError(f"--{what} is {cost:g}: give a cost above 0")
    if not (math.isfinite(how.message) and how.message >= 0):
        raise ValueError(f"--message is {how.message:g}: give a time of 0 or more")
    for what, count in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("stages-per-rank", stages_per_rank),
    ):
        if count < 1:
            raise ValueError(f"--{what} is {count}: give 1 or more")
    stages = {"interleaved": stages_per_rank, "zero-bubble-v": 2}.get(name, 1)
    if ranks * microbatches * stages > _LARGEST:
        raise ValueError(
            f"{ranks} ranks with {stages} stages each and {microbatches} micro-batches are "
            f"{ranks * microbatches * stages} boxes, but a picture has at most {_LARGEST}: give "
            "fewer"
        )
    # The batch of the naive schedule is one micro-batch, as long as all others together.
    joined = microbatches if name == "naive" else 1
    count = 1 if name == "naive" else microbatches
    schedule = make(name, ranks, count, stages)
    share = joined / stages
    times = Times.uniform(schedule.stages, how.forward * share, how.backward * share, how.message)
    return SimulatedSchedule(name, count, stages, simulate(schedule, times))


def pipeline_picture(how: PipelineDrawing, width: int = 100) -> Picture:
    """Draw schedules below one another, on one axis of time. width: columns of a terminal."""
    runs = [simulated(name, how) for name in how.schedule]
    title = f"Pipeline of {_count(how.ranks, 'rank')}, {_count(how.microbatches, 'micro-batch')}"
    figures = (
        f"A forward takes {how.forward:g}, a backward {how.backward:g}, a message {how.message:g}."
    )
    if len(runs) == 1:
        title = f"{title}: {runs[0].name}"
    return Picture(
        svg=_svg(title, figures, runs),
        lines=tuple(_lines(title, figures, runs, width)),
    )


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"


_HEAD = ("schedule", "idle", "idle / busy", "time", "micro-batches held")


def _lines(
    title: str, figures: str, runs: Sequence[SimulatedSchedule], width: int
) -> list[TerminalLine]:
    lines = heading(title, figures)
    for run in runs:
        lines.append(line(StyledText(run.name, "title"), f"  idle {run.figures[1]}"))
        drawn = gantt_text(run.simulation.spans, _columns(run, runs, width)).splitlines()
        lines += [_coloured(row) for row in drawn[:-1]]
        lines += [line(StyledText(drawn[-1] + ", · idle", "soft")), line()]
    lines += text_table([_HEAD, *(run.figures for run in runs)])
    return lines


def _columns(run: SimulatedSchedule, runs: Sequence[SimulatedSchedule], width: int) -> int:
    """Return the columns of a schedule, on one scale: a shorter schedule has fewer columns.

    If there is space, the shortest action of all schedules has a whole number of columns.
    """
    margin = len(f"rank {run.simulation.ranks - 1} ") + 2
    longest = max(each.simulation.makespan for each in runs)
    shortest = min(span.end - span.start for each in runs for span in each.simulation.spans)
    scale = (width - margin) / longest
    if scale * shortest >= 1:
        scale = math.floor(scale * shortest) / shortest
    return max(20, round(scale * run.simulation.makespan) + margin)


_KIND_OF = {digit: kind for kind, digits in DIGITS.items() for digit in digits}


def _coloured(row: str) -> list[StyledText]:
    """Return a row of `gantt_text` with its colours, and a dot for each idle column."""
    name, _, slots = row.partition("│")
    parts = [StyledText(f"{name}│")]
    for character in slots[:-1]:
        kind = _KIND_OF.get(character)
        styled = StyledText("·", "idle") if kind is None else StyledText(character, _CLASSES[kind])
        # Neighbours of one class are one text.
        if parts[-1].kind == styled.kind and len(parts) > 1:
            parts[-1] = StyledText(parts[-1].text + styled.text, styled.kind)
        else:
            parts.append(styled)
    return [*parts, StyledText("│")]


def _svg(title: str, figures: str, runs: Sequence[SimulatedSchedule]) -> str:
    canvas = SvgCanvas()
    panels = [(run.name, run.simulation.spans) for run in runs]
    height = canvas.embed(gantt_svg(panels, "units", inside=True), 0)
    height += _shares(canvas, runs, height + 6)
    caption = [
        "Simulation of the actions that the ranks execute. A number is a micro-batch; each "
        "rectangle is one action of a rank.",
    ]
    if any(run.stages_per_rank > 1 for run in runs):
        caption.append(
            "With several stages a rank, a stage takes a part of the time of a rank's layers."
        )
    if any(run.name == "naive" for run in runs):
        caption.append("The naive schedule sends the whole batch as a single micro-batch.")
    return svg_page(title, figures, _NO_LEGEND, canvas, height, caption)


_NO_LEGEND: tuple[Entry, ...] = ()


def _shares(canvas: SvgCanvas, runs: Sequence[SimulatedSchedule], top: float) -> float:
    """Draw the busy and idle shares of all schedules as bars; return the height."""
    canvas.text(MARGIN, top + 14, "Share of the ranks' time", "title")
    left = MARGIN + 110.0
    full = WIDTH - left - 360
    for number, run in enumerate(runs):
        y = top + 26 + number * 26
        name, idle, over, time, held = run.figures
        busy = full * (1 - run.simulation.bubble)
        canvas.text(left - 10, y + 14, name, "", anchor="end")
        canvas.box(left, y, busy, 18, "f", label="busy")
        canvas.box(left + busy, y, full - busy, 18, "idle", label="idle")
        canvas.text(
            left + full + 12,
            y + 14,
            f"idle {idle} ({over} of busy), {time} units, holds {held}",
            "soft",
        )
    return 26.0 + 26 * len(runs) + 12

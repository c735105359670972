"""ZeRO: the parameters, gradients and optimizer state that each rank holds in each stage.

The bytes are those of `dure.memory.formula` for a model with this number of parameters in float32,
and the elements sent those of `dure.collectives`: an all-reduce in stage 0, a reduce-scatter and an
all-gather in stages 1 and 2, a reduce-scatter and two all-gathers in stage 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dure.collectives.algorithms import ring
from dure.collectives.all_gather import elements_sent as all_gather_elements
from dure.collectives.reduce_scatter import elements_sent as reduce_scatter_elements
from dure.drawing.picture import Picture, StyledText, TerminalLine, heading, line, text_table
from dure.drawing.svg import MARGIN, WIDTH, SvgCanvas, svg_page
from dure.drawing.virtual_run import check_counts
from dure.errors import suggestion
from dure.memory.formula import TrainingMemory, divided_shares, training_memory_of

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}
"""Optimizers by name."""

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class ZeroStage:
    """Memory and traffic of a rank in a stage of ZeRO.

    whole: bytes of the undivided model. held: bytes of a rank. sent: elements that a rank sends in
    a step.
    """

    stage: int
    whole: TrainingMemory
    held: TrainingMemory
    sent: int

    @property
    def parts(self) -> tuple[tuple[str, str, int, int], ...]:
        """Class, name, bytes of a rank and undivided bytes of each kind of tensor."""
        return (
            ("f", "parameters", self.held.weights, self.whole.weights),
            ("b", "gradients", self.held.gradients, self.whole.gradients),
            ("s", "optimizer state", self.held.state, self.whole.state),
        )

    @property
    def total(self) -> int:
        """Bytes of a rank that persist between steps."""
        return sum(nbytes for _, _, nbytes, _ in self.parts)


def zero_stages(parameters: int, ranks: int = 4, optimizer: str = "adam") -> list[ZeroStage]:
    """Return all stages.

    Args:
        parameters: number of parameters of the model.
        ranks: number of ranks.
        optimizer: name of the optimizer.
    """
    check_counts(16, ranks=ranks)
    if not 1 <= parameters <= 10**13:
        raise ValueError(f"--parameters is {parameters}: give 1 to 10000000000000")
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"there is no optimizer {optimizer!r} to draw{suggestion(optimizer, OPTIMIZERS)}"
        )
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(parameters, device="meta"))
    whole = training_memory_of(model, OPTIMIZERS[optimizer])
    reduced = reduce_scatter_elements(parameters, ranks, 0)
    gathered = all_gather_elements(parameters, ranks, 0)
    sent = {
        0: ring.elements_sent(parameters, ranks, 0),
        1: reduced + gathered,
        2: reduced + gathered,
        3: reduced + 2 * gathered,
    }
    return [
        ZeroStage(stage, whole, whole.of(divided_shares(1, stage, ranks)), sent[stage])
        for stage in STAGES
    ]


def zero_picture(parameters: int = 1_000_000, ranks: int = 4, optimizer: str = "adam") -> Picture:
    """Draw the stages. The arguments are those of `zero_stages`."""
    stages = zero_stages(parameters, ranks, optimizer)
    title = f"ZeRO on {ranks} rank{'s' * (ranks != 1)}"
    figures = (
        f"{parameters:,} parameters in float32, {optimizer}: {_size(stages[0].total)} on each rank "
        f"in stage 0, {_size(stages[3].total)} in stage 3."
    )
    return Picture(
        _svg(title, figures, stages, ranks), tuple(_lines(title, figures, stages, ranks))
    )


def _size(nbytes: int) -> str:
    """Return bytes as text with a decimal unit."""
    number = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} TB"


def _rows(stages: list[ZeroStage]) -> list[list[str]]:
    rows = [["stage", "parameters", "gradients", "optimizer state", "bytes of a rank", "sends"]]
    for one in stages:
        cells = [_size(nbytes) for _, _, nbytes, _ in one.parts]
        rows.append([str(one.stage), *cells, _size(one.total), f"{one.sent:,} elements"])
    return rows


def _lines(title: str, figures: str, stages: list[ZeroStage], ranks: int) -> list[TerminalLine]:
    lines = heading(title, figures)
    legend = [StyledText("█", kind) for kind in ("f", "b", "s")]
    names = [name for _, name, _, _ in stages[0].parts]
    lines.append([part for pair in zip(legend, map(_word, names), strict=True) for part in pair])
    lines.append(line())
    columns = max(ranks, 12 - 12 % ranks)
    for one in stages:
        lines.append(line(StyledText(f"stage {one.stage}", "title"), f" divides {_divides(one)}"))
        for rank in range(ranks):
            cells: list[StyledText] = [StyledText(f"  rank {rank:<2} ")]
            for kind, _, held, whole in one.parts:
                text = _blocks(rank, ranks, columns, divided=held < whole, empty=not whole)
                cells += [StyledText(text, kind), StyledText("  ")]
            lines.append(cells)
        lines.append(line())
    return [*lines, *text_table(_rows(stages))]


def _word(name: str) -> StyledText:
    return StyledText(f" {name}   ", "soft")


def _divides(one: ZeroStage) -> str:
    return {0: "nothing", 1: "the optimizer state", 2: "gradients too", 3: "parameters too"}[
        one.stage
    ]


def _blocks(rank: int, ranks: int, columns: int, divided: bool, empty: bool) -> str:
    if empty:
        return "·" * columns
    if not divided:
        return "█" * columns
    each = columns // ranks
    return "·" * (rank * each) + "█" * each + "·" * (columns - (rank + 1) * each)


def _svg(title: str, figures: str, stages: list[ZeroStage], ranks: int) -> str:
    canvas = SvgCanvas()
    left = MARGIN + 62.0
    gap = 10.0
    row = 17.0
    unit = (WIDTH - left - MARGIN - 220 - 2 * gap) / 3
    top = 0.0
    for one in stages:
        canvas.text(MARGIN, top + 16, f"stage {one.stage}: divides {_divides(one)}", "title")
        first = top + 26
        for rank in range(ranks):
            y = first + rank * row
            canvas.text(left - 8, y + 11, f"rank {rank}", "soft", anchor="end")
            for place, (kind, name, held, whole) in enumerate(one.parts):
                x = left + place * (unit + gap)
                canvas.box(x, y, unit, row - 3, "idle", round_by=1)
                share = held / whole if whole else 0.0
                start = rank * unit / ranks if held < whole else 0.0
                hint = f"{name} of rank {rank}: {held:,} of {whole:,} bytes"
                if share:
                    canvas.box(x + start, y, unit * share, row - 3, kind, hint=hint, round_by=1)
        for place, (_, name, held, _) in enumerate(one.parts):
            x = left + place * (unit + gap)
            y = first + ranks * row + 11
            canvas.text(x + unit / 2, y, f"{name}: {_size(held)} a rank", "soft", anchor="middle")
        x = left + 3 * (unit + gap) + 6
        middle = first + ranks * row / 2
        canvas.text(x, middle - 4, f"{_size(one.total)} on each rank", "strong")
        canvas.text(x, middle + 12, f"sends {one.sent:,} elements a step", "soft")
        top = first + ranks * row + 28
    legend = [
        ("f", "parameters"),
        ("b", "gradients"),
        ("s", "optimizer state"),
        ("idle", "on another rank"),
    ]
    caption = [
        "Memory that a rank holds between steps. In stage 3 a rank also holds the parameters of "
        "the units that it is computing.",
    ]
    return svg_page(title, figures, legend, canvas, top, caption)

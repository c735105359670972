"""Tensor parallel: how the matrices of a chain are divided, and which collective runs where.

The plan is that of `dure.parallel.tensor.chain_plans` for a chain of linear layers Y = X·A. A
collective follows from the entry of a layer (`dure.parallel.tensor.layers`):

    Column        input parts: all-gather, backward reduce-scatter; whole input: backward all-reduce
                  (not of the chain's input); gather_output: all-gather of the output
    Row           output parts: reduce-scatter, backward all-gather; otherwise all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from dure.collectives.algorithms import ring
from dure.collectives.all_gather import elements_sent as all_gather_elements
from dure.collectives.reduce_scatter import elements_sent as reduce_scatter_elements
from dure.drawing.picture import Picture, StyledText, TerminalLine, heading, line, text_table
from dure.drawing.svg import MARGIN, WIDTH, SvgCanvas, svg_page
from dure.drawing.virtual_run import check_counts
from dure.errors import suggestion
from dure.parallel.tensor.chain_plans import MAKERS, chain_plan
from dure.parallel.tensor.dividing import check_plan
from dure.parallel.tensor.plan import Column, Row

_SENT = {
    "all-reduce": ring.elements_sent,
    "all-gather": all_gather_elements,
    "reduce-scatter": reduce_scatter_elements,
}
_MOST_LAYERS = 6


@dataclass(frozen=True)
class BoundaryCollective:
    """Collective at a boundary of a chain.

    boundary: 0 before the first layer, l after layer l. backward: whether it runs in the backward
    pass. elements: elements of the undivided tensor. sent: elements that a rank sends.
    """

    boundary: int
    backward: bool
    name: str
    elements: int
    sent: int


@dataclass(frozen=True)
class DividedChain:
    """Chain of linear layers with its plan.

    widths: features before the first and after each layer. columns: for each layer whether it is
    divided by columns. parts: for each boundary whether a rank has a part of the features.
    """

    plan: str
    ranks: int
    widths: tuple[int, ...]
    columns: tuple[bool, ...]
    parts: tuple[bool, ...]
    collectives: tuple[BoundaryCollective, ...]

    def sent(self, backward: bool) -> int:
        """Return the elements that a rank sends in a pass."""
        return sum(one.sent for one in self.collectives if one.backward == backward)


def divided_chain(
    plan: str, ranks: int = 2, widths: Sequence[int] = (8, 16, 16, 8), examples: int = 4
) -> DividedChain:
    """Divide a chain of linear layers.

    Args:
        plan: columns, rows or alternating.
        ranks: number of ranks.
        widths: features before the first and after each layer.
        examples: rows of the activations.
    """
    if plan not in MAKERS:
        raise ValueError(f"there is no picture of the plan {plan!r}{suggestion(plan, MAKERS)}")
    check_counts(8, ranks=ranks)
    check_counts(10**6, examples=examples)
    if not 2 <= len(widths) <= _MOST_LAYERS + 1 or min(widths, default=0) < 1:
        raise ValueError(
            f"--widths is {' '.join(map(str, widths))}: give 2 to {_MOST_LAYERS + 1} numbers of "
            "features, 1 or more each"
        )
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, device="meta"), nn.ReLU()]
    model = nn.Sequential(*layers)
    entries = chain_plan(plan, model)
    check_plan(model, entries, ranks)
    found = [entries[str(2 * number)] for number in range(len(widths) - 1)]
    collectives = []
    for number, entry in enumerate(found):
        if not isinstance(entry, Column | Row):
            raise TypeError(f"the plan {plan} has an entry {entry!r} that is neither kind of layer")
        for boundary, backward, name in _collectives(number, entry):
            elements = examples * widths[boundary]
            sent = _SENT[name](elements, ranks, 0)
            collectives.append(BoundaryCollective(boundary, backward, name, elements, sent))
    return DividedChain(
        plan,
        ranks,
        tuple(widths),
        tuple(isinstance(entry, Column) for entry in found),
        tuple(_parts(found)),
        tuple(collectives),
    )


def _collectives(number: int, entry: Column | Row) -> Iterator[tuple[int, bool, str]]:
    """Yield boundary, pass and name of the collectives of a layer of a chain."""
    before, after = number, number + 1
    if isinstance(entry, Column):
        if entry.features:
            yield before, False, "all-gather"
        # Nothing needs the gradient of the chain's own input.
        if before and entry.features:
            yield before, True, "reduce-scatter"
        elif before and entry.enters:
            yield before, True, "all-reduce"
        if entry.gather_output:
            yield after, False, "all-gather"
        return
    if before and not entry.input_is_parallel:
        yield before, True, "all-gather"
    if entry.features:
        yield after, False, "reduce-scatter"
        yield after, True, "all-gather"
    elif entry.leaves:
        yield after, False, "all-reduce"


def _parts(entries: Sequence[object]) -> Iterator[bool]:
    """Yield for each boundary whether a rank has a part of its features between the layers."""
    yield False
    for entry in entries:
        if isinstance(entry, Column):
            yield not entry.gather_output
        elif isinstance(entry, Row):
            yield entry.features


def tensor_parallel_picture(
    plans: Sequence[str],
    ranks: int = 2,
    widths: Sequence[int] = (8, 16, 16, 8),
    examples: int = 4,
) -> Picture:
    """Draw the plans of a chain. The arguments are those of `divided_chain`."""
    chains = [divided_chain(plan, ranks, widths, examples) for plan in plans]
    title = f"Tensor parallel on {ranks} rank{'s' * (ranks != 1)}: {', '.join(plans)}"
    shown = " → ".join(map(str, widths))
    figures = f"A chain of linear layers {shown} for {examples} examples."
    return Picture(_svg(title, figures, chains), tuple(_lines(title, figures, chains)))


# For a terminal


def _at(chain: DividedChain, boundary: int, backward: bool) -> list[BoundaryCollective]:
    return [
        one for one in chain.collectives if one.boundary == boundary and one.backward == backward
    ]


def _lines(title: str, figures: str, chains: Sequence[DividedChain]) -> list[TerminalLine]:
    lines = heading(title, figures)
    for chain in chains:
        lines.append(line(StyledText(chain.plan, "title")))
        for boundary, width in enumerate(chain.widths):
            held = f"{width // chain.ranks} of {width}" if chain.parts[boundary] else f"all {width}"
            parts: list[str | StyledText] = [f"  features {boundary}: a rank has {held:<10}"]
            for backward, arrow, kind in ((False, "→", "c"), (True, "←", "b")):
                for one in _at(chain, boundary, backward):
                    text = f"  {arrow} {one.name} of {one.elements}"
                    parts.append(StyledText(text, kind))
            lines.append(line(*parts))
            if boundary < len(chain.columns):
                way = "columns" if chain.columns[boundary] else "rows"
                bars = "▐" * chain.ranks if chain.columns[boundary] else "▄" * chain.ranks
                lines.append(line("    ", StyledText(f"A{boundary + 1} by {way} {bars}", "f")))
        lines.append(line())
    rows = [["plan", "sends forward", "sends backward"]]
    rows += [[one.plan, str(one.sent(False)), str(one.sent(True))] for one in chains]
    return [*lines, *text_table(rows)]


# The picture


def _svg(title: str, figures: str, chains: Sequence[DividedChain]) -> str:
    canvas = SvgCanvas()
    top = 0.0
    for chain in chains:
        top += _draw(canvas, chain, top)
    legend = [
        ("f", "part of rank 0"),
        ("f faint", "parts of other ranks"),
        ("c", "forward collective"),
        ("b", "backward collective"),
    ]
    caption = [
        "Matrices A of Y = X·A: vertical bands are columns, horizontal bands are rows. Bars are "
        "the features between layers: a part, or all of them, on each rank.",
    ]
    return svg_page(title, figures, legend, canvas, top, caption)


def _draw(canvas: SvgCanvas, chain: DividedChain, top: float) -> float:
    """Draw a chain; return its height."""
    canvas.text(
        MARGIN,
        top + 16,
        f"{chain.plan}: a rank sends {chain.sent(False):,} elements forward, "
        f"{chain.sent(True):,} backward",
        "title",
    )
    layers = len(chain.columns)
    step = (WIDTH - 2 * MARGIN - 60) / layers
    side = min(84.0, step - 100)
    middle = top + 128
    for number, by_columns in enumerate(chain.columns):
        x = MARGIN + 30 + number * step + (step - side) / 2
        _matrix(canvas, x, middle - side / 2, side, chain.ranks, by_columns)
        way = "columns" if by_columns else "rows"
        text = f"A{number + 1} by {way}, {chain.widths[number]}×{chain.widths[number + 1]}"
        canvas.text(x + side / 2, middle + side / 2 + 16, text, "soft", anchor="middle")
    for boundary, width in enumerate(chain.widths):
        x = MARGIN + 30 + boundary * step
        _features(canvas, x, middle, chain, boundary)
        held = f"{width // chain.ranks} of {width}" if chain.parts[boundary] else f"all {width}"
        canvas.text(x, middle + 46, held, "soft", anchor="middle")
        anchor = "start" if boundary == 0 else "end" if boundary == layers else "middle"
        place = MARGIN if boundary == 0 else WIDTH - MARGIN if boundary == layers else x
        for backward, y, kind in ((False, top + 56, "c"), (True, top + 204, "b")):
            for one in _at(chain, boundary, backward):
                size = 7.0 * len(one.name) + 14
                left = place - {"start": 0.0, "middle": size / 2, "end": size}[anchor]
                canvas.box(left, y - 12, size, 18, kind, label=one.name, round_by=4)
                start, end = (y - 14, middle + 52) if backward else (y + 8, middle - 36)
                canvas.line([(x, start), (x, end)], kind)
                y_of_text = y + 18 if backward else y - 17
                text = f"{one.elements:,} elements"
                canvas.text(place, y_of_text, text, "small", anchor=anchor)
    return 240.0


def _matrix(
    canvas: SvgCanvas, x: float, y: float, side: float, ranks: int, by_columns: bool
) -> None:
    band = side / ranks
    for rank in range(ranks):
        kind = "f" if rank == 0 else "f faint"
        label = str(rank)
        if by_columns:
            canvas.box(x + rank * band, y, band - 2, side, kind, label=label)
        else:
            canvas.box(x, y + rank * band, side, band - 2, kind, label=label)


def _features(
    canvas: SvgCanvas, x: float, middle: float, chain: DividedChain, boundary: int
) -> None:
    """Draw the features at a boundary: a bar, of which a rank has a part or all."""
    high = 64.0
    band = high / chain.ranks
    for rank in range(chain.ranks):
        kind = "f" if rank == 0 or not chain.parts[boundary] else "f faint"
        canvas.box(x - 5, middle - high / 2 + rank * band, 10, band - 1.5, kind, round_by=1)

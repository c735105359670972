"""Ring all-reduce drawn from what it really sends: docs/images/ring.svg, and its table.

The algorithm itself runs, each rank in a thread, over a group that carries its messages and reads
them. Chunk c of rank r holds one number that is not 0, a 1 in the place of (c, r): so a message
says by itself which chunk it is, and whose parts are summed in it.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import torch
from torch import Tensor

from dure.collectives.algorithms import ring

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "collectives.md"
PICTURE = DOCS / "images" / "ring.svg"
BEGIN, END = "<!-- ring -->\n", "<!-- end of ring -->\n"
RANKS = 4
PATIENCE = 20.0


@dataclass(frozen=True)
class Chunk:
    """A chunk by its index, and the ranks whose parts are summed in it."""

    index: int
    summed: frozenset[int]

    def __str__(self) -> str:
        return f"{self.index}: {'+'.join(str(rank) for rank in sorted(self.summed))}"


@dataclass(frozen=True)
class Sent:
    """A message of the schedule."""

    chunk: Chunk
    to: int


@dataclass
class _Carried:
    """What a rank sees of the group: it carries messages, and reads them."""

    rank: int
    size: int
    ways: dict[tuple[int, int], Queue[Tensor]]
    sent: list[Sent] = field(default_factory=list)

    def exchange(self, tensor: Tensor, to: int, into: Tensor, source: int) -> None:
        self.sent.append(Sent(read(tensor, self.size), to))
        self.ways[self.rank, to].put(tensor.clone())
        into.copy_(self.ways[source, self.rank].get(timeout=PATIENCE))


def read(chunk: Tensor, size: int) -> Chunk:
    """The chunk that a message is, and whose parts it holds. Raises ValueError if it is none."""
    places = chunk.reshape(size, size).nonzero().tolist()
    (index,) = {place[0] for place in places}
    if int(chunk.max()) != 1:
        raise ValueError("the part of a rank is in a sum more than once")
    return Chunk(index, frozenset(place[1] for place in places))


def begun(size: int, rank: int) -> Tensor:
    """What a rank has at first: `size` chunks of size·size numbers."""
    flat = torch.zeros(size, size, size, dtype=torch.int64)
    for index in range(size):
        flat[index, index, rank] = 1
    return flat.flatten()


def schedule(size: int) -> tuple[list[list[Sent]], list[list[Chunk]]]:
    """What each rank sends in each step, by step and rank; and what each has in the end."""
    ways: dict[tuple[int, int], Queue[Tensor]] = {
        (one, other): Queue() for one in range(size) for other in range(size)
    }
    groups = [_Carried(rank, size, ways) for rank in range(size)]
    tensors = [begun(size, rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as ranks:
        # The group above has what the ring asks of one.
        list(ranks.map(ring.all_reduce, tensors, groups))  # type: ignore[arg-type]
    steps = [list(step) for step in zip(*(group.sent for group in groups), strict=True)]
    ends = [[read(chunk, size) for chunk in ring.chunks_of(flat, size)] for flat in tensors]
    return steps, ends


def table(size: int = RANKS) -> str:
    """The schedule as Markdown, one row a step."""
    steps, _ = schedule(size)
    rows = [
        "| step | " + " | ".join(f"rank {rank} sends" for rank in range(size)) + " |",
        "| --- |" + " --- |" * size,
    ]
    for number, step in enumerate(steps):
        cells = " | ".join(f"{sent.chunk} → rank {sent.to}" for sent in step)
        rows.append(f"| {number + 1} | {cells} |")
    return "\n".join(rows) + "\n"


def rewritten(text: str) -> str:
    """The page with the table as it is."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


# The picture

COLOURS = ("#0b6e78", "#b4561c", "#5b4aa8", "#3c7a2e", "#a02c5a", "#7a6410", "#2f6db5", "#555f66")
SLOT, HIGH = 11, 24
WIDE = SLOT * RANKS + 4
GAP_X, GAP_Y = 8, 14
LEFT, TOP = 34, 44
PANEL_X = LEFT + RANKS * (WIDE + GAP_X) + 14
PANEL_Y = TOP + RANKS * (HIGH + GAP_Y) + 22
ACROSS = 3


def _cell(x: float, y: float, chunk: Chunk, leaving: bool) -> str:
    """A chunk: a slot for each rank, filled where that rank's part is in the sum."""
    whole = len(chunk.summed) == RANKS
    edge = "#111" if leaving else "#b8c0c4"
    width = 2 if leaving else 1
    parts = [
        f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="3" '
        f'fill="{"#e2f1ec" if whole else "#fff"}" stroke="{edge}" stroke-width="{width}"/>'
    ]
    for rank in sorted(chunk.summed):
        left = x + 2 + rank * SLOT
        parts.append(
            f'<rect x="{left}" y="{y + 3}" width="{SLOT - 1}" height="{HIGH - 6}" '
            f'fill="{COLOURS[rank]}"/>'
            f'<text x="{left + SLOT / 2 - 0.5}" y="{y + HIGH / 2 + 3.5}" class="part">{rank}</text>'
        )
    return "".join(parts)


def _arrow(x: float, y: float, wraps: bool) -> str:
    """From a row to the next; from the last one it leaves at the foot, and comes in at the head."""
    middle = x + WIDE / 2
    if not wraps:
        return f'<path d="M{middle} {y + HIGH + 1}v{GAP_Y - 4}" class="way"/>'
    head = y - (RANKS - 1) * (HIGH + GAP_Y)
    return (
        f'<path d="M{middle} {y + HIGH + 1}v{GAP_Y - 4}" class="round"/>'
        f'<path d="M{middle} {head - GAP_Y + 1}v{GAP_Y - 4}" class="way"/>'
    )


def _panel(title: str, held: list[list[Chunk]], step: list[Sent]) -> str:
    """The ranks one below the other, their chunks side by side, and what leaves."""
    drawn = [f'<text x="{LEFT}" y="16" class="title">{title}</text>']
    for rank, chunks in enumerate(held):
        y = TOP + rank * (HIGH + GAP_Y)
        drawn.append(f'<text x="0" y="{y + HIGH / 2 + 4}" class="rank">{rank}</text>')
        for chunk in chunks:
            x = LEFT - 18 + chunk.index * (WIDE + GAP_X)
            leaving = bool(step) and step[rank].chunk.index == chunk.index
            drawn.append(_cell(x, y, chunk, leaving))
            if leaving:
                drawn.append(_arrow(x, y, wraps=step[rank].to < rank))
    return "".join(drawn)


def _held(size: int, step: list[Sent], held: list[list[Chunk]]) -> list[list[Chunk]]:
    """What ranks have as a step begins: what they had, and the sums that they are about to send."""
    now = []
    for rank in range(size):
        leaving = step[rank].chunk
        now.append([leaving if one.index == leaving.index else one for one in held[rank]])
    return now


def picture(size: int = RANKS) -> str:
    """All steps as one SVG; it has a ground of its own, so that it is read in the dark as well."""
    steps, ends = schedule(size)
    held = [[read(one, size) for one in ring.chunks_of(begun(size, r), size)] for r in range(size)]
    panels = []
    for number, step in enumerate(steps):
        half = "reduce-scatter" if number < size - 1 else "all-gather"
        now = _held(size, step, held)
        panels.append(_panel(f"{number + 1}. {half}", now, step))
        # A sum that was sent on lies in a buffer, and is forgotten; whole chunks stay.
        held = [
            [new if len(new.summed) == size else old for new, old in zip(*pair, strict=True)]
            for pair in zip(now, held, strict=True)
        ]
    panels.append(_panel("the end", ends, []))
    return _page(panels)


def _page(panels: list[str]) -> str:
    rows = -(-len(panels) // ACROSS)
    wide, high = 16 + ACROSS * PANEL_X, 12 + rows * PANEL_Y
    placed = "\n".join(
        f'<g transform="translate({16 + number % ACROSS * PANEL_X},'
        f'{12 + number // ACROSS * PANEL_Y})">{panel}</g>'
        for number, panel in enumerate(panels)
    )
    style = (
        "text{font-family:system-ui,sans-serif;fill:#1d2529}.title{font-size:14px;font-weight:600}"
        ".rank{font-size:13px}.part{font-size:9px;fill:#fff;text-anchor:middle}"
        ".way,.round{fill:none;stroke:#111;stroke-width:1.5}.way{marker-end:url(#tip)}"
        ".round{stroke-dasharray:2 2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" role="img">\n'
        f"<title>Ring all-reduce of {RANKS} ranks, step by step</title>\n<style>{style}</style>\n"
        '<marker id="tip" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
        '<path d="M0 0L6 3L0 6z" fill="#111"/></marker>\n'
        f'<rect width="{wide}" height="{high}" rx="6" fill="#f6f8f9"/>\n{placed}\n</svg>\n'
    )


def main() -> None:
    PICTURE.write_text(picture())
    PAGE.write_text(re.sub(r"\n{3,}", "\n\n", rewritten(PAGE.read_text())))


if __name__ == "__main__":
    main()

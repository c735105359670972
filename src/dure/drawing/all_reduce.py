"""All-reduce algorithms, step by step: the chunk that each rank sends to another rank.

The algorithm itself runs, over a `RecordingGroup`. Chunk c of rank r holds a single 1, at the
position of (c, r): a message then shows which chunks it contains, and the ranks whose parts are
summed in each chunk. The tensor of n elements has as many chunks as the algorithm cuts: N for ring
and one_shot, the largest power of two up to N for halving_doubling, 1 for tree and master, and for
hierarchical the ranks of the smallest host times the number of hosts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from dure.collectives.algorithms.halving_doubling import power_below
from dure.collectives.algorithms.table import ALL_REDUCES
from dure.drawing.picture import Picture, StyledText, TerminalLine, heading, line, text_table
from dure.drawing.recording_group import recorded
from dure.drawing.svg import MARGIN, WIDTH, SvgCanvas, svg_page
from dure.errors import suggestion

MOST_RANKS = 16
"""Most ranks of a picture."""

ALGORITHMS = tuple(name for name, rule in ALL_REDUCES.items() if rule.path is not None)
"""Algorithms whose messages are dure's own; `native` is a backend's."""


@dataclass(frozen=True)
class SummedChunk:
    """Chunk by its index, with the ranks whose parts are summed in it."""

    index: int
    ranks: frozenset[int]

    def __str__(self) -> str:
        return f"{self.index}: {'+'.join(map(str, sorted(self.ranks)))}"


@dataclass(frozen=True)
class ChunkMessage:
    """Message of an all-reduce."""

    source: int
    target: int
    chunks: tuple[SummedChunk, ...]


@dataclass(frozen=True)
class AllReduceSteps:
    """Messages of an all-reduce by step, and the chunks of each rank at the end.

    chunks: number of chunks of the tensor. formula: elements that each rank sends according to the
    algorithm's own formula, for a tensor of `elements` elements.
    """

    algorithm: str
    ranks: int
    chunks: int
    elements: int
    steps: tuple[tuple[ChunkMessage, ...], ...]
    ends: tuple[tuple[SummedChunk, ...], ...]
    formula: tuple[int, ...]

    @property
    def sent(self) -> list[Fraction]:
        """Elements that each rank has sent, in units of the tensor's n elements."""
        counts: Counter[int] = Counter()
        for message in self.messages:
            counts[message.source] += len(message.chunks)
        return [Fraction(counts[rank], self.chunks) for rank in range(self.ranks)]

    @property
    def received(self) -> list[Fraction]:
        """Elements that each rank has received, in units of n."""
        counts: Counter[int] = Counter()
        for message in self.messages:
            counts[message.target] += len(message.chunks)
        return [Fraction(counts[rank], self.chunks) for rank in range(self.ranks)]

    @property
    def messages(self) -> list[ChunkMessage]:
        """All messages, in order."""
        return [message for step in self.steps for message in step]


ChunkState = tuple[frozenset[int], bool]
"""Ranks in the sum of a chunk, and whether the chunk was sent on before its sum was complete."""


def marked(chunks: int, ranks: int, rank: int) -> Tensor:
    """Return a rank's tensor: chunk c has a 1 at the position of (c, rank), and zeros."""
    tensor = torch.zeros(chunks, chunks, ranks, dtype=torch.int64)
    for index in range(chunks):
        tensor[index, index, rank] = 1
    return tensor.flatten()


def read_chunks(content: Tensor, chunks: int, ranks: int) -> tuple[SummedChunk, ...]:
    """Return the chunks of a message.

    Raises ValueError if the part of a rank is in a sum twice, or a chunk is not complete.
    """
    found = []
    for part in content.reshape(-1, chunks, ranks):
        places = part.nonzero().tolist()
        indices = {place[0] for place in places}
        if len(indices) != 1:
            raise ValueError("a message is not made of whole chunks")
        if int(part.max()) != 1:
            raise ValueError("the part of a rank is in a sum more than once")
        found.append(SummedChunk(indices.pop(), frozenset(place[1] for place in places)))
    return tuple(found)


def all_reduce_steps(algorithm: str, ranks: int = 4, hosts: int = 2) -> AllReduceSteps:
    """Run an all-reduce of `ranks` ranks, and return its messages.

    hosts: number of hosts, for `hierarchical` alone. Raises ValueError for an unknown algorithm or
    for numbers that it does not support.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"there is no picture of the all-reduce {algorithm!r}"
            f"{suggestion(algorithm, ALGORITHMS)}"
        )
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"--ranks is {ranks}: give 1 to {MOST_RANKS}")
    if algorithm == "hierarchical" and not 1 <= hosts <= ranks:
        raise ValueError(f"--hosts is {hosts}: give 1 to {ranks}, as there are {ranks} ranks")
    rule = ALL_REDUCES[algorithm]
    # Hosts of neighbouring ranks, the first ones with one rank more if the numbers need it.
    partition = [part.tolist() for part in torch.arange(ranks).tensor_split(hosts)]
    lanes = min(map(len, partition))
    chunks = {
        "halving_doubling": power_below(ranks),
        "hierarchical": lanes * hosts,
        "tree": 1,
        "master": 1,
    }.get(algorithm, ranks)
    tensors = [marked(chunks, ranks, rank) for rank in range(ranks)]
    call = rule.all_reduce
    if rule.over_hosts:
        call = partial(call, hosts=partition)
    messages = recorded(call, tensors, partition)
    steps: list[list[ChunkMessage]] = [
        [] for _ in range(max((message.step + 1 for message in messages), default=0))
    ]
    for message in messages:
        read = read_chunks(message.content, chunks, ranks)
        steps[message.step].append(ChunkMessage(message.source, message.target, read))
    elements = tensors[0].numel()
    extra = (partition,) if rule.over_hosts else ()
    return AllReduceSteps(
        algorithm,
        ranks,
        chunks,
        elements,
        tuple(map(tuple, steps)),
        tuple(read_chunks(tensor, chunks, ranks) for tensor in tensors),
        tuple(rule.elements_sent(elements, ranks, rank, *extra) for rank in range(ranks)),
    )


def all_reduce_picture(algorithm: str, ranks: int = 4, hosts: int = 2) -> Picture:
    """Draw the steps of an all-reduce. hosts: number of hosts, for `hierarchical` alone."""
    drawn = all_reduce_steps(algorithm, ranks, hosts)
    title = f"All-reduce {algorithm} of {ranks} rank{'s' * (ranks != 1)}"
    if algorithm == "hierarchical":
        title += f" on {hosts} host{'s' * (hosts != 1)}"
    loads = sorted(set(drawn.sent))
    load = _times_n(loads[-1])
    if len(loads) > 1:
        load = f"{_times_n(loads[0])} to {load}"
    figures = (
        f"{_count(len(drawn.steps), 'step')}, {_count(len(drawn.messages), 'message')}; a rank "
        f"sends {load} of the n elements of its tensor, which has {_count(drawn.chunks, 'chunk')}."
    )
    return Picture(_svg(title, figures, drawn), tuple(_lines(title, figures, drawn)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _times_n(share: Fraction) -> str:
    return f"{float(share):.4g} n"


# For a terminal


def step_table(drawn: AllReduceSteps) -> list[list[str]]:
    """Return the messages as a table: a row for each step, a column for each rank that sends."""
    rows = [["step", *(f"rank {rank} sends" for rank in range(drawn.ranks))]]
    for number, step in enumerate(drawn.steps):
        cells: list[list[str]] = [[] for _ in range(drawn.ranks)]
        for message in step:
            cells[message.source].append(f"{_content(message, drawn)} → rank {message.target}")
        rows.append([str(number + 1), *("; ".join(cell) for cell in cells)])
    return rows


def _content(message: ChunkMessage, drawn: AllReduceSteps) -> str:
    everyone = frozenset(range(drawn.ranks))
    parts = {chunk.ranks for chunk in message.chunks}
    indices = ",".join(str(chunk.index) for chunk in message.chunks)
    if parts == {everyone}:
        return f"{indices}: all"
    if len(parts) == 1:
        return f"{indices}: {'+'.join(map(str, sorted(parts.pop())))}"
    return ", ".join(map(str, message.chunks))


def _lines(title: str, figures: str, drawn: AllReduceSteps) -> list[TerminalLine]:
    lines = heading(title, figures)
    lines.append(line(StyledText("2: 0+3 is chunk 2 with the sum of the ranks 0 and 3", "soft")))
    lines.append(line())
    held = held_by_step(drawn)
    for number, step in enumerate(drawn.steps):
        lines.append(line(StyledText(f"step {number + 1}", "title")))
        for rank in range(drawn.ranks):
            cells = [_cell(held[number][rank][index], drawn.ranks) for index in range(drawn.chunks)]
            own = [
                f"{_content(message, drawn)} → rank {message.target}"
                for message in step
                if message.source == rank
            ]
            lines.append(
                line(
                    f"  rank {rank:<2} ",
                    StyledText(" ".join(cells), "f"),
                    "   ",
                    StyledText("; ".join(own), "c"),
                )
            )
        lines.append(line())
    lines.append(line(StyledText("the end", "title")))
    for rank, chunks in enumerate(drawn.ends):
        cells = [_cell((chunk.ranks, False), drawn.ranks) for chunk in chunks]
        lines.append(line(f"  rank {rank:<2} ", StyledText(" ".join(cells), "w")))
    lines += [line(), *text_table(_load_rows(drawn))]
    return lines


def _load_rows(drawn: AllReduceSteps) -> list[list[str]]:
    rows = [["rank", "sends", "receives", "formula"]]
    for rank in range(drawn.ranks):
        formula = Fraction(drawn.formula[rank], drawn.elements)
        loads = (drawn.sent[rank], drawn.received[rank], formula)
        rows.append([str(rank), *map(_times_n, loads)])
    return rows


_BLOCKS = " ▁▂▃▄▅▆▇█"


def _cell(state: ChunkState, ranks: int) -> str:
    """Return a block for a chunk, as full as its sum is complete; · if it was given away."""
    parts, given = state
    if given:
        return "·"
    return _BLOCKS[max(1, math.floor(len(parts) / ranks * 8))]


# The state of chunks


def held_by_step(drawn: AllReduceSteps) -> list[list[dict[int, ChunkState]]]:
    """Return the chunks of each rank at the beginning of each step.

    A rank adds a received sum to its own until the sum is complete. An incomplete sum that a rank
    has sent is another rank's from then on.
    """
    everyone = frozenset(range(drawn.ranks))
    now: list[dict[int, ChunkState]] = [
        {index: (frozenset([rank]), False) for index in range(drawn.chunks)}
        for rank in range(drawn.ranks)
    ]
    held = []
    for step in drawn.steps:
        held.append([dict(chunks) for chunks in now])
        for message in step:
            for chunk in message.chunks:
                if chunk.ranks != everyone:
                    now[message.source][chunk.index] = (chunk.ranks, True)
        for message in step:
            for chunk in message.chunks:
                before, given = now[message.target][chunk.index]
                # A complete sum replaces what was there.
                sent = chunk.ranks == everyone
                both = chunk.ranks if sent else before | chunk.ranks
                now[message.target][chunk.index] = (both, given and not sent)
    return held


# The picture

_NODE_GAP = 3


def _svg(title: str, figures: str, drawn: AllReduceSteps) -> str:
    canvas = SvgCanvas()
    cell = _cell_size(drawn)
    node = (drawn.chunks * (cell[0] + _NODE_GAP) - _NODE_GAP, cell[1])
    across = _panels_across(drawn, node)
    wide = (WIDTH - 2 * MARGIN) / across
    # Four ranks stand on the corners of a rectangle, which is smaller than its ellipse.
    corner = math.sqrt(2) if drawn.ranks == 4 else 1.0
    radius_x = corner * min((wide - node[0] - 40) / 2, 60 + 14 * drawn.ranks)
    radius_y = corner * min(max(44.0, 15.0 * drawn.ranks), 170.0)
    high = 2 * radius_y / corner + node[1] + 76
    held = held_by_step(drawn)
    panels = len(drawn.steps) + 1
    for number in range(panels):
        x = MARGIN + number % across * wide
        y = number // across * high
        last = number == panels - 1
        canvas.box(x + 4, y + 4, wide - 8, high - 8, "card", round_by=6)
        step = () if last else drawn.steps[number]
        name = "the end" if last else f"step {number + 1}"
        canvas.text(x + 16, y + 24, name, "title")
        if step:
            canvas.text(x + wide - 16, y + 24, _count(len(step), "message"), "soft", anchor="end")
        states: list[dict[int, ChunkState]] = (
            [{chunk.index: (chunk.ranks, False) for chunk in chunks} for chunks in drawn.ends]
            if last
            else held[number]
        )
        centre = (x + wide / 2, y + 42 + (high - 50) / 2)
        _panel(canvas, drawn, states, step, centre, (radius_x, radius_y), cell)
    height = math.ceil(panels / across) * high + 4
    height += _loads(canvas, drawn, height)
    caption = [
        "A box is a chunk of a rank's tensor, chunk 0 on the left. Its slots are the parts of the "
        "ranks, rank 0 at the top: filled if the part is in the sum.",
        "The number on an arrow is the chunk that it carries; n is the whole tensor. Dashed box: "
        "the sum was sent on, and another rank continues it.",
        "Drawn from the messages of the running algorithm.",
    ]
    legend = [("f", "part in the sum"), ("w", "complete sum"), ("c", "message with its chunks")]
    return svg_page(title, figures, legend, canvas, height, caption)


def _cell_size(drawn: AllReduceSteps) -> tuple[float, float]:
    """Return the width and height of a chunk in pixels."""
    return (18.0 if drawn.chunks == 1 else 12.0 if drawn.chunks <= 8 else 6.0), 30.0


def _panels_across(drawn: AllReduceSteps, node: tuple[float, float]) -> int:
    panels = len(drawn.steps) + 1
    least = (2 + drawn.ranks // 6) * node[0] + 110
    most = min(panels, 4, int((WIDTH - 2 * MARGIN) / least))
    # As few empty places as possible in the last row, with two or more pictures in a row.
    return min(range(min(2, most), most + 1), key=lambda count: (-panels % count, -count))


def _place(
    rank: int, ranks: int, centre: tuple[float, float], radii: tuple[float, float]
) -> tuple[float, float]:
    """Return the middle of a rank; the ranks stand on an ellipse, clockwise from the upper left."""
    offset = math.pi / 4 if ranks == 4 else 0.0
    angle = 2 * math.pi * rank / ranks - math.pi / 2 - offset
    if ranks == 1:
        return centre
    return centre[0] + radii[0] * math.cos(angle), centre[1] + radii[1] * math.sin(angle)


def _panel(
    canvas: SvgCanvas,
    drawn: AllReduceSteps,
    states: Sequence[dict[int, ChunkState]],
    step: Sequence[ChunkMessage],
    centre: tuple[float, float],
    radii: tuple[float, float],
    cell: tuple[float, float],
) -> None:
    places = [_place(rank, drawn.ranks, centre, radii) for rank in range(drawn.ranks)]
    pairs = {(message.source, message.target) for message in step}
    width = drawn.chunks * (cell[0] + _NODE_GAP) - _NODE_GAP
    labels = []
    for message in step:
        source, target = places[message.source], places[message.target]
        both = (message.target, message.source) in pairs
        bend = 9.0 if both else 0.0
        start = _edge(source, target, width, cell[1])
        end = _edge(target, source, width, cell[1])
        canvas.line([start, end], "c", bend=bend)
        labels.append(_label(message, start, end, bend, drawn))
    for x, y, text in labels:
        size = 6.2 * len(text) + 4
        canvas.box(x - size / 2, y - 7, size, 13, "label")
        canvas.text(x, y + 4, text, "small carried", anchor="middle")
    sending = {(message.source, chunk.index) for message in step for chunk in message.chunks}
    for rank, (x, y) in enumerate(places):
        left, top = x - width / 2, y - cell[1] / 2
        canvas.text(x, top - 5, f"rank {rank}", "soft", anchor="middle")
        for index in range(drawn.chunks):
            _chunk(
                canvas,
                left + index * (cell[0] + _NODE_GAP),
                top,
                cell,
                states[rank][index],
                drawn.ranks,
                leaving=(rank, index) in sending,
            )


def _edge(
    one: tuple[float, float], other: tuple[float, float], width: float, height: float
) -> tuple[float, float]:
    """Return the point at which a line to `other` leaves the box around `one`."""
    dx, dy = other[0] - one[0], other[1] - one[1]
    half_x = width / 2 + 5
    # The name of the rank is above its box.
    half_y = height / 2 + (18 if dy < 0 else 5)
    scale = min(half_x / abs(dx) if dx else math.inf, half_y / abs(dy) if dy else math.inf)
    return one[0] + dx * scale, one[1] + dy * scale


def _label(
    message: ChunkMessage,
    start: tuple[float, float],
    end: tuple[float, float],
    bend: float,
    drawn: AllReduceSteps,
) -> tuple[float, float, str]:
    """Return the position and the text of an arrow's label: its chunks, of several."""
    # Nearer to the source, so that labels of crossing arrows are apart.
    along = 0.3 if bend else 0.5
    x = start[0] + along * (end[0] - start[0])
    y = start[1] + along * (end[1] - start[1])
    length = max(math.dist(start, end), 1e-9)
    bulge = 2 * along * (1 - along) * bend
    x += bulge * (end[1] - start[1]) / length
    y -= bulge * (end[0] - start[0]) / length
    if len(message.chunks) == drawn.chunks:
        return x, y, "n"
    indices = [chunk.index for chunk in message.chunks]
    text = str(indices[0]) if len(indices) == 1 else f"{min(indices)}–{max(indices)}"
    return x, y, text


def _chunk(
    canvas: SvgCanvas,
    x: float,
    y: float,
    cell: tuple[float, float],
    state: ChunkState,
    ranks: int,
    leaving: bool,
) -> None:
    parts, given = state
    width, height = cell
    complete = len(parts) == ranks
    kind = "chunk given" if given else "chunk leaving" if leaving else "chunk"
    canvas.box(x, y, width, height, kind, round_by=3)
    if given:
        return
    fill = "w" if complete else "f"
    slot = (height - 4) / ranks
    if slot >= 2.5:
        for rank in sorted(parts):
            canvas.box(x + 2, y + 2 + rank * slot, width - 4, slot - 0.8, fill, round_by=0)
        return
    # Many ranks: the filled part of the chunk is the share of the ranks in the sum.
    part = (height - 4) * len(parts) / ranks
    canvas.box(x + 2, y + height - 2 - part, width - 4, part, fill, round_by=0)


def _loads(canvas: SvgCanvas, drawn: AllReduceSteps, top: float) -> float:
    """Draw the elements that each rank sends; return the height."""
    canvas.text(MARGIN, top + 20, "Elements that a rank sends, in units of n", "title")
    most = max([*drawn.sent, Fraction(1)])
    full = WIDTH - 2 * MARGIN - 250
    for rank, share in enumerate(drawn.sent):
        y = top + 30 + rank * 18
        width = full * float(share / most)
        canvas.text(MARGIN + 52, y + 11, f"rank {rank}", "soft", anchor="end")
        canvas.box(MARGIN + 60, y, width, 13, "c")
        formula = Fraction(drawn.formula[rank], drawn.elements)
        text = f"{_times_n(share)} sent, {_times_n(formula)} by the formula"
        canvas.text(MARGIN + 66 + width, y + 11, text, "soft")
    return 36.0 + 18 * drawn.ranks

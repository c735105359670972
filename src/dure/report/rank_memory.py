"""Memory of each rank of a mesh: a table for every run whose ranks reported it.

Parameters, gradients and the optimizer's state are bytes at the end of the run, gradients those of
the last step; shared memory counts once. The peak is that of the process, with torch, data and
activations. If layers are divided over ranks, their collectives have a column: seconds of a step,
including the wait for neighbours. On the timeline they are inside forward and backward, but they
count as communication, not as compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dure.report.document import section
from dure.report.formatting import UNKNOWN, duration, escape, size
from dure.report.html_fragments import swatch
from dure.report.runs import RankFacts, ReportedRun

_MOST = 32
"""Most ranks in a table."""

_AXES = ("data", "pipeline", "tensor")

RankColumn = tuple[str, Callable[[RankFacts], str]]


def rank_memory_section(runs: Sequence[ReportedRun]) -> str:
    """Return the section with a table for each run whose ranks reported memory, else ""."""
    # With its place among all runs, which determines its mark and colour.
    told = [(index, run) for index, run in enumerate(runs) if run.ranks]
    if not told:
        return ""
    lead = (
        "Bytes of memory that parameters, gradients and the optimizer’s state take on each rank "
        "at the end of the run, and the peak of its process, which includes torch, the data and "
        "the activations. Buffers are those of the model and, where ZeRO divides gradients or "
        "parameters, of its messages."
    )
    if any(_divides_layers(run) for _, run in told):
        lead += (
            " In layers: seconds of a step in the collectives of divided layers, with the wait "
            "for neighbours, and their share of the mean step. On the timeline they are inside "
            "forward and backward; their time counts as communication, not as compute."
        )
    blocks = "".join(_block(index, run) for index, run in told)
    return section("holdings", "Memory of each rank", lead, blocks)


def _divides_layers(run: ReportedRun) -> bool:
    return any(rank.inside is not None for rank in run.ranks)


def _block(index: int, run: ReportedRun) -> str:
    columns = _columns(run)
    names = ("rank", *(name for name, _ in columns))
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "".join(_row(rank, columns) for rank in run.ranks[:_MOST])
    left = len(run.ranks) - _MOST
    note = f'<p class="aside">{left} more ranks are not shown.</p>' if left > 0 else ""
    label = escape(run.label)
    around = f'class="scroll small" role="region" aria-label="Memory of the ranks of {label}"'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return (
        f'<div class="pipeline"><h3>{swatch(index)}<span>{label}</span></h3>'
        f'<div {around} tabindex="0">{table}</div>{note}</div>'
    )


def _row(rank: RankFacts, columns: Sequence[RankColumn]) -> str:
    cells = "".join(f"<td>{text(rank)}</td>" for _, text in columns)
    return f'<tr><th scope="row">{escape(rank.name)}</th>{cells}</tr>'


def _columns(run: ReportedRun) -> list[RankColumn]:
    def held(key: str) -> Callable[[RankFacts], str]:
        return lambda rank: size(rank.held.get(key))

    def index_on(axis: int) -> Callable[[RankFacts], str]:
        return lambda rank: str(rank.at[axis])

    # The number of places along each axis.
    degrees = [len(set(places)) for places in zip(*(rank.at for rank in run.ranks), strict=True)]
    columns: list[RankColumn] = []
    # If a single axis divides, the rank's number is enough.
    if sum(degree > 1 for degree in degrees) > 1:
        columns += [(name, index_on(axis)) for axis, name in enumerate(_AXES) if degrees[axis] > 1]
    columns += [
        ("parameters", held("parameters")),
        ("gradients", held("gradients")),
        ("optimizer", held("optimizer")),
    ]
    if any(rank.held.get("buffers") for rank in run.ranks):
        columns.append(("buffers", held("buffers")))
    columns.append(("peak of the process", lambda rank: size(rank.peak_memory)))
    if _divides_layers(run):
        columns.append(("in layers, a step", lambda rank: _inside(rank, run)))
    return columns


def _inside(rank: RankFacts, run: ReportedRun) -> str:
    if rank.inside is None:
        return UNKNOWN
    seconds = run.result.seconds
    steps = run.result.steps
    # Of the mean step: seconds inside a step, times steps, over all seconds.
    share = f" ({100 * rank.inside * steps / seconds:.0f} %)" if seconds and steps else ""
    return duration(rank.inside) + share

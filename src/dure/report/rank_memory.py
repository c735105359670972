"""Memory of each rank of a device mesh: a table for every run whose ranks reported their memory.

Parameters, gradients and the optimizer's state are bytes at the end of the run, gradients those of
the last step; shared memory counts once. The peak is that of the process, with torch, data and
activations. If layers are divided over ranks (tensor parallelism), a column shows the seconds per
step that a rank spends in the collectives of these layers, including the wait for other ranks. The
timeline shows the collectives inside forward and backward; the division of a worker's time counts
them as communication, not as compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dure.report.document import section
from dure.report.formatting import UNKNOWN, duration, escape, size
from dure.report.html_fragments import swatch
from dure.report.runs import RankFacts, ReportedRun
from dure.report.translation import recorded, translated

_MAX_ROWS = 32
"""Maximum number of ranks in a table; further ranks are only counted."""

_AXES = ("data", "pipeline", "tensor")

RankColumn = tuple[str, Callable[[RankFacts], str]]
"""Title of a column, and the function that returns the HTML of a rank's cell."""


def rank_memory_section(runs: Sequence[ReportedRun]) -> str:
    """Return the section with a table for each run whose ranks reported memory, else ""."""
    # The index among all runs of the report determines the colour of a run.
    reporting = [(index, run) for index, run in enumerate(runs) if run.ranks]
    if not reporting:
        return ""
    lead = translated(
        "Bytes of memory that parameters, gradients and the optimizer’s state take on each rank "
        "at the end of the run, and the peak of its process, which includes torch, the data and "
        "the activations. Buffers are those of the model and, where ZeRO divides gradients or "
        "parameters, of its messages."
    )
    if any(_divides_layers(run) for _, run in reporting):
        lead += translated(
            " Collectives in layers: seconds per step in the collectives of divided layers, with "
            "the wait for other ranks, and their share of the mean step. The timeline shows them "
            "inside forward and backward; the times of workers count them as communication, and "
            "not as compute."
        )
    blocks = "".join(_block(index, run) for index, run in reporting)
    return section("holdings", "Memory of each rank", lead, blocks)


def _divides_layers(run: ReportedRun) -> bool:
    """Return whether layers are divided over ranks, as in tensor parallelism."""
    return any(rank.layer_collective_seconds is not None for rank in run.ranks)


def _block(index: int, run: ReportedRun) -> str:
    columns = _columns(run)
    names = ("rank", *(name for name, _ in columns))
    head = "".join(f'<th scope="col">{translated(name)}</th>' for name in names)
    rows = "".join(_row(rank, columns) for rank in run.ranks[:_MAX_ROWS])
    left = len(run.ranks) - _MAX_ROWS
    more = translated("{count} more ranks are not shown.", count=left)
    note = f'<p class="aside">{more}</p>' if left > 0 else ""
    label = escape(run.label)
    name = translated("Memory of the ranks of {run}", run=label)
    around = f'class="scroll small" role="region" aria-label="{name}"'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return (
        f'<div class="pipeline"><h3>{swatch(index)}<span>{label}</span></h3>'
        f'<div {around} tabindex="0">{table}</div>{note}</div>'
    )


def _row(rank: RankFacts, columns: Sequence[RankColumn]) -> str:
    cells = "".join(f"<td>{text(rank)}</td>" for _, text in columns)
    return f'<tr><th scope="row">{escape(recorded(rank.name))}</th>{cells}</tr>'


def _columns(run: ReportedRun) -> list[RankColumn]:
    def held(key: str) -> Callable[[RankFacts], str]:
        return lambda rank: size(rank.held.get(key))

    def index_on(axis: int) -> Callable[[RankFacts], str]:
        return lambda rank: str(rank.at[axis])

    # The number of ranks along each axis.
    degrees = [len(set(indices)) for indices in zip(*(rank.at for rank in run.ranks), strict=True)]
    columns: list[RankColumn] = []
    # Indices are shown only for several axes: for a single axis, the rank has the same number.
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
        columns.append(
            ("collectives in layers, per step", lambda rank: _layer_collective_seconds(rank, run))
        )
    return columns


def _layer_collective_seconds(rank: RankFacts, run: ReportedRun) -> str:
    """Return the time per step in collectives of layers, with its share of the mean step."""
    if rank.layer_collective_seconds is None:
        return UNKNOWN
    seconds = run.result.seconds
    steps = run.result.steps
    # The mean step takes seconds / steps.
    share = (
        f" ({100 * rank.layer_collective_seconds * steps / seconds:.0f} %)"
        if seconds and steps
        else ""
    )
    return duration(rank.layer_collective_seconds) + share

"""Transfer of tensors in pieces, from and to memory or files.

A rank has a message of a few million bytes in memory at a time, rank 0 a buffer of the same size,
however large the tensors are. Small tensors share a message. The transfer is bookkeeping, like
checkpoints, and not counted by the meter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dure.collectives.group import Group
from dure.record.disk_tensors import PIECE, Leaf, TensorMeta, elements, forms_of, put
from dure.tensors.elements import element_bytes

AllocateLeaf = Callable[[TensorMeta], Leaf]
"""Function that allocates a tensor, or returns its destination."""


class _Run(NamedTuple):
    """Elements [start, stop) of a tensor."""

    form: TensorMeta
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.form.kind.itemsize


def gathered(group: Group, mine: Mapping[str, Leaf], place: AllocateLeaf) -> list[dict[str, Leaf]]:
    """Return the tensors of all ranks on rank 0, in order of rank; elsewhere an empty list.

    Tensors of other ranks are stored at their `place`. All ranks call it.
    """
    if group.size == 1:
        return [dict(mine)]
    forms = forms_of(mine)
    own = _messages(forms) if group.rank else []
    told = group.gather_bytes(json.dumps(forms).encode())
    # All ranks run as many rounds as the rank with the most messages.
    (rounds,) = max(group.all_gather_values([float(len(own))]))
    arriving = [[TensorMeta(*form) for form in json.loads(part)] for part in told[1:]]
    plans = list(map(_messages, arriving))
    found = [{form.name: place(form) for form in forms} for forms in arriving]
    quiet = group.unmetered()
    buffer = torch.empty(PIECE, dtype=torch.uint8)
    with group.during("gathering of tensors"):
        for number in range(int(rounds)):
            if number < len(own):
                quiet.send(_packed(own[number], mine, buffer), 0)
            for source, (plan, leaves) in enumerate(zip(plans, found, strict=True), start=1):
                if number < len(plan):
                    message = plan[number]
                    content = buffer[: sum(run.nbytes for run in message)]
                    quiet.receive(content, source)
                    _unpacked(content, message, leaves)
    return [dict(mine), *found] if told else []


def broadcast(
    group: Group, leaves: Mapping[str, Leaf], forms: Sequence[TensorMeta], place: AllocateLeaf
) -> dict[str, Leaf]:
    """Return rank 0's tensors on every rank.

    forms: forms of the tensors, known to all ranks. On other ranks than 0 the tensors are stored at
    their `place`. All ranks call it.
    """
    found = dict(leaves) if group.rank == 0 else {form.name: place(form) for form in forms}
    buffer = torch.zeros(PIECE, dtype=torch.uint8)
    for message in _messages(forms):
        content = buffer[: sum(run.nbytes for run in message)]
        if group.rank == 0:
            _packed(message, found, buffer)
        group.broadcast_values([content], counted=False)
        if group.rank:
            _unpacked(content, message, found)
    return found


def _messages(forms: Iterable[TensorMeta]) -> list[list[_Run]]:
    """Divide tensors into messages of about `PIECE` bytes, equally on both sides."""
    messages: list[list[_Run]] = []
    room = 0
    for form in forms:
        count = torch.Size(form.shape).numel()
        start = 0
        while start < count:
            if room < form.kind.itemsize:
                messages.append([])
                room = PIECE
            run = _Run(form, start, min(count, start + room // form.kind.itemsize))
            messages[-1].append(run)
            room -= run.nbytes
            start = run.stop
    return messages


def _packed(message: Sequence[_Run], leaves: Mapping[str, Leaf], into: Tensor) -> Tensor:
    """Return the bytes of a message in the reused buffer `into`."""
    at = 0
    for run in message:
        piece = elements(leaves[run.form.name], run.start, run.stop)
        into[at : at + run.nbytes] = element_bytes(piece.cpu())
        at += run.nbytes
    return into[:at]


def _unpacked(content: Tensor, message: Sequence[_Run], leaves: Mapping[str, Leaf]) -> None:
    at = 0
    for run in message:
        # A copy, since a dtype needs its bytes at a multiple of its size.
        piece = content[at : at + run.nbytes].clone().view(run.form.kind)
        put(leaves[run.form.name], run.start, piece)
        at += run.nbytes

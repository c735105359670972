"""The synchronisation of ranks that train apart: one all-reduce of one flat message, once a round.

Every rank puts its vector, already multiplied with its weight, into `bodies`; after `meet` the sum
over the ranks is there, with the same bits on all. With it travel

    f            numbers of floating-point buffers, such as batch norm's statistics: their weighted mean
    S·d          with momentum="average" the optimizer's S tensors for each parameter: their weighted mean
    1            rank 0's wishes: stop, write a checkpoint
    3 a rank     its share of the loss; when it arrived, in whole seconds and the rest, from which idle time is known
    1 a buffer   of other dtypes: whether rank 0 changed it; such buffers then follow in one broadcast from rank 0
    e            further numbers of the strategy, summed

so a round with d trained parameters has d + f + S·d + 1 + 3N + b + e elements
(`elements_in_message`). With a compression the bodies travel compressed, before the rest.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dure.averaging.replica import Replica
from dure.collectives.all_reduce import ALGORITHMS, Algorithm, all_reduce
from dure.collectives.compression import Compression, NoCompression
from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared
from dure.contracts.strategy import Place
from dure.errors import LossNotFiniteError
from dure.randomness.seeds import derive
from dure.tensors.buffers import write
from dure.tensors.flat import by_dtype, views_of

Momentum = Literal["keep", "average", "reset"]
"""What a synchronisation does to the optimizer's state, as momentum buffers: every rank goes on
with its own, with the weighted mean of all, or with none."""


def check_exchange(algorithm: str, momentum: str) -> None:
    """Raises ValueError for an all-reduce, or a choice for the momentum, that there is not."""
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"there is no all-reduce {algorithm!r}; choose one of {', '.join(ALGORITHMS)}"
        )
    if momentum not in get_args(Momentum):
        raise ValueError(
            f"momentum is {momentum!r}; a synchronisation can {', '.join(get_args(Momentum))} it"
        )


def elements_in_message(
    parameters: int,
    ranks: int,
    floating_buffers: int = 0,
    other_buffers: int = 0,
    states: int = 0,
    numbers: int = 0,
) -> int:
    """Elements of a round's message: (1 + S)·d + f + 1 + 3N + b + e.

    parameters: d, the trained ones. floating_buffers: f, elements. other_buffers: b, tensors.
    states: S. numbers: e.
    """
    return (1 + states) * parameters + floating_buffers + 1 + 3 * ranks + other_buffers + numbers


class Met(NamedTuple):
    """What all ranks know after a synchronisation: the sum of the ranks' losses and numbers, and
    rank 0's wish."""

    loss: float
    wish: int
    numbers: list[float]


class Meeting:
    """One rank's side of the synchronisations.

    `bodies`: one vector a dtype, shaped as `replica.flat.buffers`. numbers: how many further ones
    travel.
    """

    def __init__(
        self,
        replica: Replica,
        place: Place,
        algorithm: Algorithm,
        momentum: Momentum = "keep",
        compression: Compression | None = None,
        numbers: int = 0,
    ) -> None:
        self.replica, self.group, self.algorithm, self.momentum = (
            replica,
            place.group,
            algorithm,
            momentum,
        )
        self._find_buffers()
        self._note_buffers()
        self.numbers = numbers
        self._fresh = copy.deepcopy(replica.optimizer.state_dict()["state"])
        self.compressors = _compressors(compression, replica)
        self._pack([])
        self.clock_offset = place.clock_offset
        self.started = self.group.all_gather_values([self._now()])[0][0]

    def _find_buffers(self) -> None:
        """As they are now: the floating-point ones, of which the mean is taken, and the others,
        which are rank 0's."""
        buffers = self.replica.buffers.of(self.replica.model)
        self.means = [buffer for buffer in buffers if buffer.is_floating_point()]
        self.others = [buffer for buffer in buffers if not buffer.is_floating_point()]

    def _note_buffers(self) -> None:
        """Remembers the buffers, now that they are the same on all ranks."""
        self._common = [buffer.clone() for buffer in self.means]
        self._seen = [buffer.clone() for buffer in self.others]

    def _now(self) -> float:
        """Seconds on rank 0's clock."""
        return time.perf_counter() + self.clock_offset

    def _pack(self, states: Sequence[Tensor]) -> None:
        """Makes the message, with room for the optimizer's `states`."""
        bodies = self.replica.flat.buffers
        carried = [*([] if self.compressors else bodies), *self.means, *states]
        tail = 1 + 3 * self.group.size + len(self.others) + self.numbers
        self.message, views, self.tail = packed(carried, tail, self.group)
        self.bodies = (
            [torch.empty_like(body) for body in bodies]
            if self.compressors
            else views[: len(bodies)]
        )
        self.extras = views[len(carried) - len(self.means) - len(states) :]

    @torch.no_grad()
    def meet(
        self, weight: float, loss: float, wish: int, round: int, numbers: Sequence[float] = ()
    ) -> Met:
        """Sums `bodies` over the ranks, takes the mean of the buffers, and does what the momentum's
        choice says.

        weight: this rank's, with which its body was multiplied; those of all ranks add to 1. loss:
        its share of the round's mean loss. round: its number, from 1.
        Raises LossNotFiniteError, on all ranks, if the loss of any of them is not finite.
        """
        entered = time.perf_counter()
        self._find_buffers()
        states = states_of(self.replica) if self.momentum == "average" else []
        changes = [
            difference(now, common) for now, common in zip(self.means, self._common, strict=True)
        ]
        contents = [
            *changes,
            *(state if state is not None else torch.zeros_like(p) for state, p in states),
        ]
        if len(contents) != len(self.extras):  # optimizers make their state in their first step
            filled = self.bodies
            self._pack(contents[len(self.means) :])
            for body, content in zip(self.bodies, filled, strict=True):
                body.copy_(content)
        for extra, content in zip(self.extras, contents, strict=True):
            torch.mul(content, weight, out=extra)
        self._write_tail(loss, wish, numbers)
        began = time.perf_counter()
        for body, (compressor, like) in zip(self.bodies, self.compressors, strict=False):
            compressor.all_reduce(views_of(body, like), self.group, self.algorithm)
        for buffer in self.message:
            all_reduce(buffer, self.group, self.algorithm)
        left = time.perf_counter()
        losses, met, arrival, changed = self._read_tail()
        self.group.meter.compute("pack", entered, began, round)
        arrival += self.started - self.clock_offset
        self.group.meter.communication(f"{self.algorithm} all-reduce", began, left, round, arrival)
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                raise LossNotFiniteError(value, f"rank {rank}", f"round {round}", intact=False)
        self._take([state for state, _ in states])
        self._take_changed(changed, round)
        return met

    def _write_tail(self, loss: float, wish: int, numbers: Sequence[float]) -> None:
        rank, size = self.group.rank, self.group.size
        tail = [0.0] * (1 + 3 * size)
        tail[0] = float(wish)
        tail[1 + 3 * rank : 4 + 3 * rank] = loss, *divmod(self._now() - self.started, 1.0)
        self.tail.copy_(torch.tensor([*tail, *self._changes(), *numbers], dtype=self.tail.dtype))

    def _changes(self) -> list[float]:
        """Which of rank 0's buffers without floating point have changed in this round."""
        if self.group.rank != 0:
            return [0.0] * len(self.others)
        return [
            float(not torch.equal(now, seen))
            for now, seen in zip(self.others, self._seen, strict=True)
        ]

    def _read_tail(self) -> tuple[list[float], Met, float, list[bool]]:
        """(each rank's loss, what all know, the last arrival, the changed buffers)."""
        tail: list[float] = self.tail.tolist()
        ranks = [tail[1 + 3 * rank : 4 + 3 * rank] for rank in range(self.group.size)]
        rest = tail[1 + 3 * self.group.size :]
        losses = [loss for loss, _, _ in ranks]
        met = Met(
            sum(losses), int(tail[0]) if math.isfinite(tail[0]) else 0, rest[len(self.others) :]
        )
        arrival = max(whole + part for _, whole, part in ranks)
        return losses, met, arrival, [bool(flag) for flag in rest[: len(self.others)]]

    def _take(self, states: Sequence[Tensor | None]) -> None:
        """The means into the buffers and the optimizer's state; or that state as it was at
        first."""
        for buffer, common, change in zip(self.means, self._common, self.extras, strict=False):
            write(buffer, common + change)
        for state, mean in zip(states, self.extras[len(self.means) :], strict=True):
            if state is not None:
                state.copy_(mean)
        if self.momentum == "reset":
            optimizer = self.replica.optimizer
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": copy.deepcopy(self._fresh), "param_groups": groups})

    def _take_changed(self, changed: list[bool], round: int) -> None:
        if any(changed):
            started = time.perf_counter()
            self.group.broadcast_values(
                [b for b, one in zip(self.others, changed, strict=True) if one]
            )
            self.group.meter.communication(
                "broadcast of buffers", started, time.perf_counter(), round
            )
        self._note_buffers()

    def state(self) -> list[Any]:
        """What the compressors of this rank remember."""
        return [compressor.state() for compressor, _ in self.compressors]

    def restore(self, state: Sequence[Any]) -> None:
        """Goes on from `state`, with the replica's buffers as they now are."""
        for (compressor, _), remembered in zip(self.compressors, state, strict=True):
            compressor.restore(remembered)
        self._find_buffers()
        self._note_buffers()


def packed(
    like: Sequence[Tensor], tail: int, group: Group
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(buffers, views into them shaped as `like`, the tail): one buffer a dtype, the tail behind
    one in float32 or 64.

    For the dure backend they lie in shared memory, where it reduces in place.
    """
    lengths: dict[torch.dtype, int] = {}
    places: list[tuple[torch.dtype, int]] = []
    for tensor in like:
        start = lengths.setdefault(tensor.dtype, 0)
        places.append((tensor.dtype, start))
        lengths[tensor.dtype] = start + tensor.numel()
    carrier = next(
        (dtype for dtype in lengths if dtype in (torch.float32, torch.float64)), torch.float32
    )
    lengths[carrier] = lengths.get(carrier, 0) + tail
    make = empty_shared if group.backend(torch.device("cpu")) == "dure" else torch.empty
    buffers = {dtype: make(length, dtype=dtype) for dtype, length in lengths.items()}
    views = [
        buffers[dtype][start : start + tensor.numel()].view(tensor.shape)
        for tensor, (dtype, start) in zip(like, places, strict=True)
    ]
    return list(buffers.values()), views, buffers[carrier][lengths[carrier] - tail :]


def difference(now: Tensor, before: Tensor) -> Tensor:
    """now - before, exactly 0 where they are equal, as in a mask that is infinite."""
    return torch.where(now == before, 0, now - before)


def states_of(replica: Replica) -> list[tuple[Tensor | None, Tensor]]:
    """(the optimizer's tensor, its parameter) for every tensor of the parameter's shape that the
    optimizer keeps.

    None where this rank has none yet, for a parameter that its batches never used.
    """
    state = replica.optimizer.state
    kept = [
        (name, p)
        for p in replica.trained
        for name, value in state.get(p, {}).items()
        if _belongs(name, value, p)
    ]
    names = sorted({name for name, _ in kept})
    return [(state.get(p, {}).get(name), p) for name in names for p in replica.trained]


def _belongs(name: str, value: Any, parameter: Tensor) -> bool:
    """Whether it is a number for each of the parameter's, as a momentum; the count of steps is
    not."""
    if not isinstance(value, Tensor) or name == "step" or value.shape != parameter.shape:
        return False
    return value.is_floating_point() or value.is_complex()


def _compressors(
    compression: Compression | None, replica: Replica
) -> list[tuple[Any, list[Tensor]]]:
    """(compressor, the parameters it is for) a dtype; none where everything travels as it is."""
    if compression is None or isinstance(compression, NoCompression):
        return []
    groups = by_dtype(replica.trained).values()
    return [
        (compression.compressor(group, derive(replica.seed, "compression", number)), group)
        for number, group in enumerate(groups)
    ]

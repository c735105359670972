"""How ranks that train apart come together: one all-reduce of one flat message, once a round.

Every rank puts its vector, already multiplied with its weight, into `bodies`. After `meet` the sum
over the ranks is there, with the same bits on all of them. The message has these parts:

    bodies   d elements       the strategy's vectors; d counts the trained parameters
    buffers  f elements       floating-point buffers, such as batch norm's statistics; their
                              weighted mean arrives
    states   S·d elements     with momentum="average": the optimizer's S tensors for each parameter;
                              their weighted mean arrives
    tail     numbers by name  what all ranks have to know (`dure.collectives.tail`)

The tail has these fields, for N ranks:

    wish     of rank 0        to stop, or to write a checkpoint
    loss     of each rank     its share of the round's mean loss
    arrival  of each rank     when it came to the message; until the last rank has come, a rank is
                              idle
    changed  of each buffer   of the b that are not floating-point: whether rank 0 has changed it;
                              such buffers follow in one broadcast from rank 0
    numbers  e of them        further numbers of the strategy, which are summed

So a round has d + f + S·d + 1 + 3N + b + e elements (`elements_in_message`). With a compression the
bodies travel compressed, before the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dure.averaging.replica import Replica
from dure.collectives.all_reduce import ALGORITHMS, Algorithm, all_reduce
from dure.collectives.compression import Compression, Compressor
from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared
from dure.collectives.tail import Tail, common_start, each, summed, times
from dure.contracts.strategy import Place
from dure.errors import LossNotFiniteError
from dure.randomness.seeds import derive
from dure.tasks.loss_shares import rescale
from dure.tensors.buffers import write
from dure.tensors.flat import by_dtype, views_of

Momentum = Literal["keep", "average", "reset"]
"""What a round's end does to the optimizer's state, such as momentum buffers: every rank goes on
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
    """What all ranks know after a round.

    loss, numbers: sums over the ranks. wish: rank 0's.
    """

    loss: float
    wish: int
    numbers: list[float]


class _Compressed(NamedTuple):
    """A compressor, and the parameters whose shapes it has to know."""

    compressor: Compressor
    like: Sequence[Tensor]


class Meeting:
    """One rank's side of the rounds.

    bodies: one vector a dtype, shaped as `replica.flat.buffers`. numbers: how many further ones
    travel.
    """

    def __init__(
        self,
        replica: Replica,
        place: Place,
        algorithm: Algorithm,
        momentum: Momentum = "keep",
        *,
        compression: Compression | None = None,
        numbers: int = 0,
    ) -> None:
        self.replica = replica
        self.group = place.group
        self.algorithm = algorithm
        self.momentum = momentum
        self._find_buffers()
        self._note_buffers()
        self._compressed = _compressors(compression, replica)
        fields = (
            summed("wish"),
            each("loss"),
            times("arrival"),
            summed("changed", len(self.others)),
            summed("numbers", numbers),
        )
        self.tail = Tail(fields, self.group.rank, self.group.size)
        self._pack([])
        self.started = common_start(self.group, place.clock_offset)

    def _find_buffers(self) -> None:
        """Finds the buffers as they are now: a forward pass may have put others in their place.

        Of the floating-point ones the mean is taken; the others are rank 0's.
        """
        buffers = self.replica.buffers.of(self.replica.model)
        self.means = [buffer for buffer in buffers if buffer.is_floating_point()]
        self.others = [buffer for buffer in buffers if not buffer.is_floating_point()]

    def _note_buffers(self) -> None:
        """Remembers the buffers, now that they are the same on all ranks."""
        self._common = [buffer.clone() for buffer in self.means]
        self._seen = [buffer.clone() for buffer in self.others]

    def _pack(self, states: Sequence[Tensor]) -> None:
        """Makes the message, with room for the optimizer's `states`."""
        bodies = self.replica.flat.buffers
        carried = [] if self._compressed else list(bodies)
        extras = [*self.means, *states]
        # Bodies, extras and tail lie in one buffer a dtype, and a round sends that buffer: nothing
        # is copied into a message.
        self.message, views, self._tail = packed([*carried, *extras], self.tail.length, self.group)
        self.bodies = views[: len(carried)]
        if self._compressed:
            self.bodies = [torch.empty_like(body) for body in bodies]
        self.extras = views[len(carried) :]

    @torch.no_grad()
    def meet(
        self,
        weight: float,
        loss: float,
        wish: int,
        round: int,
        numbers: Sequence[float] = (),
        scale: Callable[[Sequence[float]], float] = lambda heard: 1.0,
    ) -> Met:
        """Sums `bodies` over the ranks, and takes the mean of the buffers; all ranks call it.

        The optimizer's state is kept, averaged or reset, as `momentum` says.

        weight: this rank's, with which its body was multiplied; those of all ranks add to 1. loss:
        its share of the round's mean loss. round: its number, from 1. scale: with what all that was
        summed is multiplied, given the sums of `numbers`: then the weights times it add to 1.
        Raises LossNotFiniteError, on all ranks, if the loss of any of them is not finite.
        """
        entered = time.perf_counter()
        self._find_buffers()
        # only averaged states travel
        states = states_of(self.replica) if self.momentum == "average" else []
        self._fill(weight, states)
        self._write_tail(loss, wish, numbers)
        began = time.perf_counter()
        # Without compression there are no compressors, and the bodies are in `message`.
        for body, (compressor, like) in zip(self.bodies, self._compressed, strict=False):
            compressor.all_reduce(views_of(body, like), self.group, self.algorithm)
        for buffer in self.message:
            all_reduce(buffer, self.group, self.algorithm)
        left = time.perf_counter()
        heard = self.tail.decode(self._tail.tolist())
        self.group.meter.compute("pack", entered, began, round)
        self.group.meter.communication(
            f"{self.algorithm} all-reduce",
            began,
            left,
            round,
            arrival=self.started + max(heard["arrival"]),
        )
        # Before anything is taken over. All ranks hear the same, so all of them raise.
        for rank, value in enumerate(heard["loss"]):
            if not math.isfinite(value):
                raise LossNotFiniteError(value, f"rank {rank}", f"round {round}", intact=False)
        found = scale(heard["numbers"])
        rescale([*self.bodies, *self.extras], found)
        self._take([state for state, _ in states])
        self._take_changed(heard["changed"], round)
        return Met(found * sum(heard["loss"]), int(heard["wish"][0]), heard["numbers"])

    def _fill(self, weight: float, states: Sequence[tuple[Tensor | None, Tensor]]) -> None:
        """Puts this rank's share of the buffers and the optimizer's states into the message.

        Of a buffer it is the change since the ranks had the same: a mean of changes leaves a buffer
        that no rank has changed as it is, to the bit.
        """
        contents = [
            difference(now, common) for now, common in zip(self.means, self._common, strict=True)
        ]
        for state, parameter in states:
            contents.append(state if state is not None else torch.zeros_like(parameter))
        if len(contents) != len(self.extras):  # optimizers make their state in their first step
            # The bodies are filled already: what is in them moves to the new message.
            filled = self.bodies
            self._pack(contents[len(self.means) :])
            for body, content in zip(self.bodies, filled, strict=True):
                body.copy_(content)
        for extra, content in zip(self.extras, contents, strict=True):
            torch.mul(content, weight, out=extra)

    def _write_tail(self, loss: float, wish: int, numbers: Sequence[float]) -> None:
        said: dict[str, Sequence[float]] = {
            "loss": [loss],
            "arrival": [time.perf_counter() - self.started],
            "numbers": numbers,
        }
        if wish:
            said["wish"] = [float(wish)]
        if self.group.rank == 0:
            said["changed"] = self._changes()
        told = self.tail.encode(said)
        self._tail.copy_(torch.tensor(told, dtype=self._tail.dtype))

    def _changes(self) -> list[bool]:
        """Which buffers that are not floating-point have changed in this round, on rank 0."""
        return [
            not torch.equal(now, seen) for now, seen in zip(self.others, self._seen, strict=True)
        ]

    def _take(self, states: Sequence[Tensor | None]) -> None:
        """Puts the means into the buffers and the optimizer's state, or resets that state."""
        # `extras` are the buffers first, and after them the states.
        for buffer, common, change in zip(self.means, self._common, self.extras, strict=False):
            # from the value that all ranks had, so that all have the same bits
            write(buffer, common + change)
        for state, mean in zip(states, self.extras[len(self.means) :], strict=True):
            # A rank that never used the parameter has no state to put the mean into.
            if state is not None:
                state.copy_(mean)
        if self.momentum == "reset":
            self.replica.reset_optimizer()

    def _take_changed(self, changed: Sequence[float], round: int) -> None:
        if any(changed):
            started = time.perf_counter()
            mine = zip(self.others, changed, strict=True)
            self.group.broadcast_values([buffer for buffer, is_changed in mine if is_changed])
            self.group.meter.communication(
                "broadcast of buffers", started, time.perf_counter(), round
            )
        self._note_buffers()

    def state(self) -> list[Any]:
        """What the compressors of this rank remember."""
        return [one.compressor.state() for one in self._compressed]

    def restore(self, state: Sequence[Any]) -> None:
        """Goes on from `state`, with the replica's buffers as they now are."""
        for one, remembered in zip(self._compressed, state, strict=True):
            one.compressor.restore(remembered)
        self._find_buffers()
        self._note_buffers()


def packed(
    like: Sequence[Tensor], tail: int, group: Group
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(buffers, views into them shaped as `like`, the tail): one buffer a dtype.

    The tail is at the end of the first buffer in float32 or float64. For the dure backend the
    buffers lie in shared memory, where it reduces in place.
    """
    lengths: dict[torch.dtype, int] = {}
    places: list[tuple[torch.dtype, int]] = []
    for tensor in like:
        start = lengths.setdefault(tensor.dtype, 0)
        places.append((tensor.dtype, start))
        lengths[tensor.dtype] = start + tensor.numel()
    # In half precision the numbers of the tail would lose their value.
    carrier = next(
        (dtype for dtype in lengths if dtype in (torch.float32, torch.float64)), torch.float32
    )
    # after all that travels in this dtype
    lengths[carrier] = lengths.get(carrier, 0) + tail
    make = empty_shared if group.backend(torch.device("cpu")) == "dure" else torch.empty
    buffers = {dtype: make(length, dtype=dtype) for dtype, length in lengths.items()}
    views = [
        buffers[dtype][start : start + tensor.numel()].view(tensor.shape)
        for tensor, (dtype, start) in zip(like, places, strict=True)
    ]
    return list(buffers.values()), views, buffers[carrier][lengths[carrier] - tail :]


def difference(now: Tensor, before: Tensor) -> Tensor:
    """now - before, exactly 0 where they are equal, such as in a mask that is infinite."""
    return torch.where(now == before, 0, now - before)


def states_of(replica: Replica) -> list[tuple[Tensor | None, Tensor]]:
    """(state, parameter) for every tensor of a parameter's shape that the optimizer keeps.

    None where this rank has none yet, for a parameter that its batches never used.
    """
    state: Mapping[Tensor, Mapping[str, Any]] = replica.optimizer.state
    names: set[str] = set()
    for parameter in replica.trained:
        kept = state.get(parameter, {})
        names.update(name for name, value in kept.items() if _belongs(name, value, parameter))
    found: list[tuple[Tensor | None, Tensor]] = []
    for name in sorted(names):
        # for every trained parameter, so that messages are equally long on all ranks
        found += [(state.get(one, {}).get(name), one) for one in replica.trained]
    return found


def _belongs(name: str, value: Any, parameter: Tensor) -> bool:
    """Whether it has a number for each of the parameter's, such as a momentum.

    The count of steps has not.
    """
    if not isinstance(value, Tensor) or name == "step" or value.shape != parameter.shape:
        return False
    return value.is_floating_point() or value.is_complex()


def _compressors(compression: Compression | None, replica: Replica) -> list[_Compressed]:
    """One for each dtype; none where everything travels as it is."""
    if compression is None or not compression.compresses:
        return []
    found = []
    for number, group in enumerate(by_dtype(replica.trained).values()):
        seed = derive(replica.seed, "compression", number)
        found.append(_Compressed(compression.compressor(group, seed), group))
    return found

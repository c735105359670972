"""Synchronisation of ranks that train separately: one all-reduce of a flat message, once a round.

Every rank writes its vector, multiplied by its weight, to `bodies`. After `meet` they contain the
sum over the ranks, bit-identical on all of them. The message has these parts:

    bodies   d elements       the strategy's vectors; d counts the trained parameters
    buffers  f elements       floating-point buffers, such as batch norm's statistics; the result is
                              their weighted mean
    states   S·d elements     with momentum="average": the optimizer's S tensors for each parameter;
                              the result is their weighted mean
    tail     numbers by name  the trailer, which all ranks need (`dure.collectives.trailer`)

The trailer has these fields, for N ranks:

    control_flags   of rank 0        control flags: stop, or write a checkpoint
    loss            of each rank     its share of the round's mean loss
    arrival         of each rank     the time when it sent the message; earlier ranks are idle
    changed         of each buffer   for the b buffers that are not floating-point: whether rank 0
                                     has changed it; rank 0 then broadcasts the changed buffers
    numbers         e of them        further numbers of the strategy, which are summed

A round therefore has d + f + S·d + 1 + 3N + b + e elements (`elements_in_message`). With a
compression the bodies are sent compressed, before the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from dure.averaging.replica import AveragedReplica
from dure.collectives.all_reduce import ALGORITHMS, Algorithm, all_reduce
from dure.collectives.compression import Compression, Compressor
from dure.collectives.group import Group
from dure.collectives.shared_memory.pool import empty_shared
from dure.collectives.trailer import Trailer, common_start, per_rank_field, summed_field, time_field
from dure.contracts.world import RankContext
from dure.errors import LossNotFiniteError
from dure.machine.devices import CPU, is_cpu
from dure.randomness.seeds import derive
from dure.tasks.loss_shares import rescale
from dure.tensors.buffers import write
from dure.tensors.flat import by_dtype, views_of

Momentum = Literal["keep", "average", "reset"]
"""Effect of a round's end on the optimizer's state, such as momentum buffers: every rank keeps its
own state, takes the weighted mean of all ranks, or resets its state.
"""


def check_exchange(algorithm: str, momentum: str) -> None:
    """Check the names of an all-reduce and of a treatment of the momentum.

    Raises ValueError for an unknown name.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"there is no all-reduce {algorithm!r}; choose one of {', '.join(ALGORITHMS)}"
        )
    if momentum not in get_args(Momentum):
        raise ValueError(f"momentum is {momentum!r}; choose one of {', '.join(get_args(Momentum))}")


def elements_in_message(
    parameters: int,
    ranks: int,
    floating_buffers: int = 0,
    other_buffers: int = 0,
    states: int = 0,
    numbers: int = 0,
) -> int:
    """Return the elements of a round's message: (1 + S)·d + f + 1 + 3N + b + e.

    Args:
        parameters: d, elements of the trained parameters.
        ranks: N.
        floating_buffers: f, elements of floating-point buffers.
        other_buffers: b, tensors.
        states: S, tensors for each parameter.
        numbers: e.
    """
    return (1 + states) * parameters + floating_buffers + 1 + 3 * ranks + other_buffers + numbers


class RoundSums(NamedTuple):
    """Result of a round, equal on all ranks.

    loss, numbers: sums over the ranks. control_flags: rank 0's control flags.
    """

    loss: float
    control_flags: int
    numbers: list[float]


class _Compressed(NamedTuple):
    """A compressor, and the parameters that define the shapes of its input."""

    compressor: Compressor
    like: Sequence[Tensor]


class RoundSynchronisation:
    """Synchronisation of the rounds on this rank.

    Args:
        replica: This rank's model, optimizer and data.
        place: The ranks.
        algorithm: All-reduce.
        momentum: Effect of a round's end on the optimizer's state.
        compression: Compression of the bodies; None sends them uncompressed.
        numbers: Number of further numbers that travel.

    Attributes:
        bodies: A vector for each dtype, with the shapes of `replica.flat.buffers`.
    """

    def __init__(
        self,
        replica: AveragedReplica,
        context: RankContext,
        algorithm: Algorithm,
        momentum: Momentum = "keep",
        *,
        compression: Compression | None = None,
        numbers: int = 0,
    ) -> None:
        self.replica = replica
        self.group = context.group
        self.algorithm = algorithm
        self.momentum = momentum
        self._find_buffers()
        self._note_buffers()
        self._compressed = _compressors(compression, replica)
        fields = (
            summed_field("control_flags"),
            per_rank_field("loss"),
            time_field("arrival"),
            summed_field("changed", len(self.others)),
            summed_field("numbers", numbers),
        )
        self.trailer = Trailer(fields, self.group.rank, self.group.size)
        self._pack([])
        self.started = common_start(self.group, context.clock_offset)

    def _find_buffers(self) -> None:
        """Find the present buffers: a forward pass may have replaced tensors.

        Floating-point buffers are averaged; the others are taken from rank 0.
        """
        buffers = self.replica.buffers.of(self.replica.model)
        self.means = [buffer for buffer in buffers if buffer.is_floating_point()]
        self.others = [buffer for buffer in buffers if not buffer.is_floating_point()]

    def _note_buffers(self) -> None:
        """Store copies of the buffers, which are equal on all ranks now."""
        self._common = [buffer.clone() for buffer in self.means]
        self._seen = [buffer.clone() for buffer in self.others]

    def _pack(self, states: Sequence[Tensor]) -> None:
        """Allocate the message, with memory for the optimizer's `states`."""
        bodies = self.replica.flat.buffers
        carried = [] if self._compressed else list(bodies)
        extras = [*self.means, *states]
        # Bodies, extras and trailer are views of one buffer for each dtype, and a round sends these
        # buffers: nothing is copied into a message.
        self.message, views, self._tail = pack_message(
            [*carried, *extras], self.trailer.length, self.group
        )
        self.bodies = views[: len(carried)]
        if self._compressed:
            self.bodies = [torch.empty_like(body) for body in bodies]
        self.extras = views[len(carried) :]

    @torch.no_grad()
    def meet(
        self,
        weight: float,
        loss: float,
        control_flags: int,
        round: int,
        numbers: Sequence[float] = (),
        scale: Callable[[Sequence[float]], float] = lambda heard: 1.0,
    ) -> RoundSums:
        """Sum `bodies` over the ranks, and average the buffers; all ranks call this method.

        The optimizer's state is kept, averaged or reset, according to `momentum`.

        Args:
            weight: This rank's weight, by which its body was multiplied; the weights of all ranks
                sum to 1.
            loss: This rank's share of the round's mean loss.
            control_flags: Control flags; rank 0's are used.
            round: Number of the round, from 1.
            numbers: Further numbers to sum.
            scale: Returns a factor for all sums, given the sums of `numbers`; the weights times
                this factor sum to 1.

        Returns:
            The loss, control flags and numbers of all ranks.

        Raises:
            LossNotFiniteError: on all ranks, if the loss of any rank is not finite.
        """
        entered = time.perf_counter()
        self._find_buffers()
        # only averaged states travel
        states = states_of(self.replica) if self.momentum == "average" else []
        self._fill(weight, states)
        self._write_tail(loss, control_flags, numbers)
        began = time.perf_counter()
        # Without compression there are no compressors, and the bodies are in `message`.
        for body, (compressor, like) in zip(self.bodies, self._compressed, strict=False):
            compressor.all_reduce(views_of(body, like), self.group, self.algorithm)
        for buffer in self.message:
            all_reduce(buffer, self.group, self.algorithm)
        left = time.perf_counter()
        heard = self.trailer.decode(self._tail.tolist())
        self.group.meter.compute("pack", entered, began, round)
        self.group.meter.communication(
            f"{self.algorithm} all-reduce",
            began,
            left,
            round,
            arrival=self.started + max(heard["arrival"]),
        )
        # Before any result is used. All ranks have the same losses, so all of them raise.
        for rank, value in enumerate(heard["loss"]):
            if not math.isfinite(value):
                raise LossNotFiniteError(value, f"rank {rank}", f"round {round}", intact=False)
        found = scale(heard["numbers"])
        rescale([*self.bodies, *self.extras], found)
        self._take([state for state, _ in states])
        self._take_changed(heard["changed"], round)
        return RoundSums(
            found * sum(heard["loss"]), int(heard["control_flags"][0]), heard["numbers"]
        )

    def _fill(self, weight: float, states: Sequence[tuple[Tensor | None, Tensor]]) -> None:
        """Write this rank's share of the buffers and the optimizer's states to the message.

        The share of a buffer is its change since the ranks had equal values: with a mean of
        changes, a buffer that no rank has changed stays bit-identical.
        """
        contents = [
            difference(now, common) for now, common in zip(self.means, self._common, strict=True)
        ]
        for state, parameter in states:
            contents.append(state if state is not None else torch.zeros_like(parameter))
        if len(contents) != len(self.extras):  # optimizers create their state in their first step
            # The bodies are filled already: their content moves to the new message.
            filled = self.bodies
            self._pack(contents[len(self.means) :])
            for body, content in zip(self.bodies, filled, strict=True):
                body.copy_(content)
        for extra, content in zip(self.extras, contents, strict=True):
            torch.mul(content, weight, out=extra)

    def _write_tail(self, loss: float, control_flags: int, numbers: Sequence[float]) -> None:
        said: dict[str, Sequence[float]] = {
            "loss": [loss],
            "arrival": [time.perf_counter() - self.started],
            "numbers": numbers,
        }
        if control_flags:
            said["control_flags"] = [float(control_flags)]
        if self.group.rank == 0:
            said["changed"] = self._changes()
        told = self.trailer.encode(said)
        self._tail.copy_(torch.tensor(told, dtype=self._tail.dtype))

    def _changes(self) -> list[bool]:
        """Return which of the other buffers (not floating-point) have changed in this round."""
        return [
            not torch.equal(now, seen) for now, seen in zip(self.others, self._seen, strict=True)
        ]

    def _take(self, states: Sequence[Tensor | None]) -> None:
        """Write the means to the buffers and the optimizer's state, or reset that state."""
        # `extras` are the buffers first, and after them the states.
        for buffer, common, change in zip(self.means, self._common, self.extras, strict=False):
            # from the common previous value, so that all ranks get the same bits
            write(buffer, common + change)
        for state, mean in zip(states, self.extras[len(self.means) :], strict=True):
            # A rank that never used the parameter has no state for the mean.
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
        """Return the residuals of this rank's compressors."""
        return [one.compressor.state() for one in self._compressed]

    def restore(self, state: Sequence[Any]) -> None:
        """Restore `state`, with the present buffers of the replica."""
        for one, remembered in zip(self._compressed, state, strict=True):
            one.compressor.restore(remembered)
        self._find_buffers()
        self._note_buffers()


def pack_message(
    like: Sequence[Tensor], tail: int, group: Group
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return (buffers, views of them shaped as `like`, trailer), with a buffer for each dtype.

    The trailer is at the end of the first buffer in float32 or float64. The buffers are on the
    device of `like`; on the CPU, for the dure backend, in shared memory, where it reduces in place.
    """
    lengths: dict[torch.dtype, int] = {}
    places: list[tuple[torch.dtype, int]] = []
    for tensor in like:
        start = lengths.setdefault(tensor.dtype, 0)
        places.append((tensor.dtype, start))
        lengths[tensor.dtype] = start + tensor.numel()
    # Half precision does not represent the numbers of the trailer exactly.
    carrier = next(
        (dtype for dtype in lengths if dtype in (torch.float32, torch.float64)), torch.float32
    )
    # after all elements of this dtype
    lengths[carrier] = lengths.get(carrier, 0) + tail
    device = like[0].device if like else CPU
    shares = is_cpu(device) and group.backend(device) == "dure"
    buffers = {
        dtype: empty_shared(length, dtype=dtype)
        if shares
        else torch.empty(length, dtype=dtype, device=device)
        for dtype, length in lengths.items()
    }
    views = [
        buffers[dtype][start : start + tensor.numel()].view(tensor.shape)
        for tensor, (dtype, start) in zip(like, places, strict=True)
    ]
    return list(buffers.values()), views, buffers[carrier][lengths[carrier] - tail :]


def difference(now: Tensor, before: Tensor) -> Tensor:
    """Return now - before, exactly 0 for equal values, such as an infinite mask."""
    return torch.where(now == before, 0, now - before)


def states_of(replica: AveragedReplica) -> list[tuple[Tensor | None, Tensor]]:
    """Return (state, parameter) for every optimizer state tensor of a parameter's shape.

    The state is None if this rank has none yet, for a parameter that its batches never used.
    """
    state: Mapping[Tensor, Mapping[str, Any]] = replica.optimizer.state
    names: set[str] = set()
    for parameter in replica.trained:
        kept = state.get(parameter, {})
        names.update(name for name, value in kept.items() if _belongs(name, value, parameter))
    found: list[tuple[Tensor | None, Tensor]] = []
    for name in sorted(names):
        # for every trained parameter, so that messages have the same length on all ranks
        found += [(state.get(one, {}).get(name), one) for one in replica.trained]
    return found


def _belongs(name: str, value: Any, parameter: Tensor) -> bool:
    """Return whether a state has a number for each element of the parameter, such as a momentum.

    A count of steps has not.
    """
    if not isinstance(value, Tensor) or name == "step" or value.shape != parameter.shape:
        return False
    return value.is_floating_point() or value.is_complex()


def _compressors(compression: Compression | None, replica: AveragedReplica) -> list[_Compressed]:
    """Return a compressor for each dtype; an empty list without compression."""
    if compression is None or not compression.compresses:
        return []
    found = []
    for number, group in enumerate(by_dtype(replica.trained).values()):
        seed = derive(replica.seed, "compression", number)
        found.append(_Compressed(compression.compressor(group, seed), group))
    return found

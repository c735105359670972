"""A shard: a range of keys with its values, optimizer and clock, and what waits for them.

Pushes become *steps*, and steps are applied; in between a replica may have to have them first
(`server`). With staleness s, over the workers of a group:

    0       the pushes of a clock become one step, when all are there:
                g = sum of weight_p / (sum of weights) · g_p, in the order of the workers
    s, None each push becomes a step when those before it of the same worker are applied:
                g = weight_p · g_p,   a weight being a share of a joint batch

so that a clock of all workers moves the weights as far, to first order, whatever the staleness.

A pull at clock c is answered as soon as all updates before c - s are contained, of every worker of
the group, and as many of the worker's own as it asks for; until then it waits here. Whatever is
applied, all pulls that now may be answered are answered. The values of an answer are a copy, made
between two steps.

Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server"; Li et al. 2014 for the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from dure.parameter_server.clock import RangedClock
from dure.parameter_server.keys import Range
from dure.parameter_server.layout import Layout
from dure.parameter_server.messages import Made, Pull, Push, Step, Values
from dure.parameter_server.optimizer import Recipe, ShardOptimizer
from dure.parameter_server.tables import Table
from dure.tensors.blocks import Blocks

Asks = TypeVar("Asks", Push, Pull)


@dataclass(frozen=True)
class Terms:
    """On what terms a shard trains, the same for all of a run.

    recipe: how its optimizer is made. staleness: by how many clocks a worker may be ahead of the
    slowest of its group; None: by any. schedule: the factor of the learning rates at a clock.
    slows: whether an update whose gradient is n updates old counts one n-th. tables: of the model.
    """

    recipe: Recipe
    staleness: int | None = 0
    schedule: Callable[[int], float] | None = None
    slows: bool = False
    tables: Sequence[Table] = ()


class Shard:
    """The keys of `range`; `values` is theirs from now on, and changed in place."""

    def __init__(self, number: int, keys: Range, values: Tensor, terms: Terms) -> None:
        self._begin(number, keys, terms)
        self.values = values
        self.optimizer = ShardOptimizer(terms.recipe, keys.vector, keys.start, values)

    def _begin(self, number: int, keys: Range, terms: Terms) -> None:
        self.number = number
        self.keys = keys
        self.terms = terms
        self.clock = RangedClock(keys.start, keys.stop)
        self._blocks = Blocks()
        self._plain = terms.recipe.plain
        self.version = 0
        """Steps that are applied."""
        self.made = 0
        """Steps that were made here, and those that others had made before."""
        self._contributions: dict[tuple[int, int, int], dict[int, Push]] = {}
        """Pushes that wait for the rest of their clock: by group, clock and first key."""
        self._early: dict[tuple[int, int], dict[int, Push]] = {}
        """Pushes that came before an earlier one of the same worker: by worker and first key."""
        self._taken: dict[tuple[int, int], int] = {}
        """How many pushes of a worker have become steps here: by worker and first key."""
        self._waiting: dict[int, Pull] = {}
        """Pulls that cannot be answered yet, the newest of each worker."""
        self._answered: dict[tuple[int, int], int] = {}
        """The newest question that was answered: by worker and first key."""

    # Pushes become steps

    def push(self, push: Push, layout: Layout) -> list[Step]:
        """The steps that are ready now that a push has come.

        Raises ValueError for one that does not fit the shard's keys.
        """
        self._check_push(push)
        if push.clock < self._next(push.worker, push.start):
            return []
        if self.terms.staleness == 0:
            group = layout.group_of(push.worker)
            same = self._contributions.setdefault((group, push.clock, push.start), {})
            same.setdefault(push.worker, push)
            return self._complete(layout)
        self._early.setdefault((push.worker, push.start), {}).setdefault(push.clock, push)
        members = layout.groups[layout.group_of(push.worker)].at(push.clock)
        return self._in_turn(push.worker, push.start, len(members))

    def full(self, message: Asks) -> Asks | None:
        """A message with all that it says; None where it names rows that are not known here."""
        return message

    def _check_push(self, push: Push) -> None:
        """Raises ValueError for one that does not fit."""
        self._check(push.start, push.stop)
        self.optimizer.check_range(push.start, push.stop)

    def _joint(self, pushes: Sequence[Push]) -> tuple[Tensor, Tensor | None]:
        """The mean gradient of pushes, and the rows to which it belongs."""
        return _mean(pushes, shares_of(pushes)), None

    def settled(self, layout: Layout) -> list[Step]:
        """The steps that are ready because others take part now."""
        return self._complete(layout)

    def _next(self, worker: int, start: int) -> int:
        """Which push of a worker is the next to become a step."""
        return max(self._taken.get((worker, start), 0), self.contains(worker, start))

    def _complete(self, layout: Layout) -> list[Step]:
        """Clocks of which every push is there, as steps."""
        steps = []
        for key in sorted(self._contributions):
            group, clock, start = key
            there = self._contributions[key]
            members = layout.groups[group].at(clock)
            if all(worker in there for worker in members):
                del self._contributions[key]
                pushes = [there[worker] for worker in members]
                for push in pushes:
                    self._taken[push.worker, start] = clock + 1
                gradient, rows = self._joint(pushes)
                steps.append(self._step(start, gradient, rows, pushes, clock))
        return steps

    def _step(
        self,
        start: int,
        gradient: Tensor,
        rows: Tensor | None,
        pushes: Sequence[Push],
        clock: int,
        factor: float = 1.0,
    ) -> Step:
        """A step. clock: the server's, by which learning rates are scheduled."""
        self.made += 1
        if self.terms.schedule is not None:
            factor *= self.terms.schedule(clock)
        made = tuple(Made(push.worker, push.clock) for push in pushes)
        return Step(start, gradient, made, factor, rows)

    def _in_turn(self, worker: int, start: int, workers: int) -> list[Step]:
        """What has waited for the push that came, in the order of the worker's clocks.

        workers: how many take part: as many steps are a clock.
        """
        early = self._early[worker, start]
        steps = []
        while (clock := self._next(worker, start)) in early:
            push = early.pop(clock)
            self._taken[worker, start] = clock + 1
            gradient, factor = self._weighted(push)
            # Steps that are on their way to the replica will be applied before this one.
            age = self.made - push.version
            factor *= 1 / age if self.terms.slows and age > 1 else 1.0
            now = self.made // max(1, workers)
            steps.append(self._step(start, gradient, push.rows, [push], now, factor))
        if not early:
            del self._early[worker, start]
        return steps

    def _weighted(self, push: Push) -> tuple[Tensor, float]:
        """The gradient of a push as its weight has it, and the factor of the learning rates."""
        if push.weight == 1:
            return push.gradient, 1.0
        # In plain SGD a part of a gradient is a part of the rate, which needs no pass of its own.
        if self._plain:
            return push.gradient, push.weight
        return push.gradient * push.weight, 1.0

    # Steps are applied

    def apply(self, step: Step) -> None:
        """Applies a step. Afterwards, `answers` has what has waited for it."""
        stop = self._move(step)
        self.version += 1
        self.made = max(self.made, self.version)
        for made in step.pushes:
            self.clock.set(step.start, stop, made.worker, made.clock + 1)

    def _move(self, step: Step) -> int:
        """Changes the values by a step; the first key behind those that it is about."""
        self.optimizer.step(step.start, step.gradient, step.factor)
        return step.start + len(step.gradient)

    def contains(self, worker: int, start: int) -> int:
        """How many pushes of a worker to the keys from `start` on are applied."""
        return self.clock.least(start, start + 1, worker)

    # Pulls

    def pull(self, pull: Pull, layout: Layout) -> Values | None:
        """The answer to a pull; None where it has to wait. A later one takes its place.

        Raises ValueError for keys that the shard does not have.
        """
        self._check(pull.start, pull.stop)
        if pull.into is not None and self._answered.get((pull.worker, pull.start)) == pull.number:
            # Asked again, as an answer seems to have been lost: but it may be in use by now, and
            # must not change.
            pull = msgspec.structs.replace(pull, into=None)
        values = self._answer(pull, layout)
        if values is None:
            self._waiting[pull.worker] = pull
        else:
            self._waiting.pop(pull.worker, None)
        return values

    def answers(self, layout: Layout) -> list[Values]:
        """The answers to all pulls that have waited, and need wait no more."""
        found = []
        for worker, pull in list(self._waiting.items()):
            values = self._answer(pull, layout)
            if values is not None:
                del self._waiting[worker]
                found.append(values)
        return found

    def _answer(self, pull: Pull, layout: Layout) -> Values | None:
        own = self.clock.least(pull.start, pull.stop, pull.worker)
        floor: float = 0.0
        if pull.worker >= 0:
            members = layout.groups[layout.group_of(pull.worker)]
            times = [(w, self.clock.least(pull.start, pull.stop, w)) for w in members.workers]
            floor = members.floor(times)
        if pull.clock is not None:
            staleness = self.terms.staleness
            if own < pull.own or (staleness is not None and floor < pull.clock - staleness):
                return None
        self._answered[pull.worker, pull.start] = pull.number
        values, rows = self._read(pull)
        return Values(
            shard=self.number,
            worker=pull.worker,
            number=pull.number,
            values=values if pull.into is None else pull.into.copy_(values),
            version=self.version,
            own=own,
            floor=int(floor) if floor < torch.inf else None,
            layout=layout.version,
            rows=rows,
        )

    def _read(self, pull: Pull) -> tuple[Tensor, Tensor | None]:
        """What is asked for, a copy where nobody says where it is to be; and which rows it is."""
        first = pull.start - self.keys.start
        values = self.values[first : first + pull.stop - pull.start]
        return (self._blocks.copy(values) if pull.into is None else values), None

    # Workers that were given up

    def count(self, worker: int) -> tuple[int, int]:
        """How many pushes of a worker have arrived here: least and most over the keys.

        Those that wait for others of their clock have arrived.
        """
        waiting = [key[1] + 1 for key, there in self._contributions.items() if worker in there]
        least = self.clock.least(self.keys.start, self.keys.stop, worker)
        most = self.clock.most(self.keys.start, self.keys.stop, worker)
        taken = [time for (w, _), time in self._taken.items() if w == worker]
        return least, max([most, *waiting, *taken])

    # Copies

    def state(self) -> dict[str, Any]:
        """Everything applied, as copies: for a replica, a checkpoint."""
        return {
            "keys": [self.keys.vector, self.keys.start, self.keys.stop],
            "values": self.values.clone(),
            "version": self.version,
            "clock": self.clock.state(),
            "optimizer": _copied(self.optimizer.state()),
        }

    @classmethod
    def of(cls, number: int, state: Mapping[str, Any], terms: Terms) -> Shard:
        """A shard from what `state` gave; it shares no tensor with it."""
        shard = cls(number, Range(*state["keys"]), state["values"].clone(), terms)
        shard.version = state["version"]
        shard.made = shard.version
        shard.clock.restore(state["clock"])
        shard.optimizer.restore(state["optimizer"])
        return shard

    def _check(self, start: int, stop: int) -> None:
        if not self.keys.start <= start < stop <= self.keys.stop:
            raise ValueError(
                f"the keys {start} to {stop - 1} are not those of shard {self.number}, which has "
                f"{self.keys.start} to {self.keys.stop - 1}"
            )


def shares_of(pushes: Sequence[Push]) -> list[float]:
    """Which share each push has in what they count together; that of a lone one is 1."""
    if len(pushes) == 1:
        return [1.0]
    total = sum(push.weight for push in pushes)
    # Where nothing counts, such as in parts of padding alone, every gradient is zero.
    return [push.weight / total if total else 0.0 for push in pushes]


def _mean(pushes: Sequence[Push], shares: Sequence[float]) -> Tensor:
    """The mean gradient of the pushes, folded in their order."""
    if len(pushes) == 1:
        return pushes[0].gradient
    out = pushes[0].gradient * shares[0]
    for push, share in zip(pushes[1:], shares[1:], strict=True):
        # Multiplied and added apart, so that processors that fuse both give the same bits.
        out += push.gradient * share
    return out


def _copied(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.clone()
    if isinstance(node, Mapping):
        return {key: _copied(value) for key, value in node.items()}
    return node

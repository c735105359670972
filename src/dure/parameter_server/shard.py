"""A shard: a range of keys with its values, optimizer and clock, and what waits for them.

Pushes become *steps*, and steps are applied; in between a replica may have to have them first
(`server`). With staleness s, over the workers of a group:

    0       the pushes of a clock become one step, when all are there:
                g = sum of weight_p / (sum of weights) · g_p, in the order of the workers
    s, None each push becomes a step when those before it of the same worker are applied, times its
            weight, which is a share of a joint batch:
                SGD     g = weight_p · g_p,  weight decay times weight_p
                others  g = g_p,             learning rate times weight_p

so that a clock of all workers moves the weights as far, and decays them as much, to first order,
whatever the staleness. A push of weight 0 makes no step. Compressed pushes have their weights in
them (`compressed`).

Where steps are clipped (staleness 0), one waits for the norms of all shards (`clipping`):

                g = g · min(1, clip_norm / |g|)      over the shards together

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

from dure.parameter_server.clipping import At, Unclipped, clip_to, norms_at, square_of
from dure.parameter_server.clock import RangedClock
from dure.parameter_server.compressed import Coding
from dure.parameter_server.keys import Range
from dure.parameter_server.layout import Layout
from dure.parameter_server.messages import Made, Norms, Pull, Push, Step, Values
from dure.parameter_server.optimizer import Recipe, ShardOptimizer
from dure.parameter_server.tables import Table
from dure.tasks.loss_shares import scale_of
from dure.tensors.blocks import Blocks

Asks = TypeVar("Asks", Push, Pull)
Floors = dict[tuple[int, int, int], float]
"""By group, first key and last key + 1."""


@dataclass(frozen=True)
class Terms:
    """On what terms a shard trains, the same for all of a run.

    recipe: how its optimizer is made. staleness: by how many clocks a worker may be ahead of the
    slowest of its group; None: by any. schedule: the factor of the learning rates at a clock.
    slows: whether an update whose gradient is n updates old counts one n-th. tables: of the model.
    coding: of pushes; None where they are gradients as they are. clip_norm: the largest norm of the
    gradient of a step of a clock; None is any. A worker that is alone clips its own.
    """

    recipe: Recipe
    staleness: int | None = 0
    schedule: Callable[[int], float] | None = None
    slows: bool = False
    tables: Sequence[Table] = ()
    coding: Coding | None = None
    clip_norm: float | None = None


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
        self.unclipped: dict[At, Unclipped] = {}
        """Steps that wait for the norms of other shards."""
        self.norms: dict[int, Norms] = {}
        """By which the last step of each group was clipped."""
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
        return self._in_turn(push.worker, push.start)

    def full(self, message: Asks) -> Asks | None:
        """A message with all that it says; None where it names rows that are not known here."""
        return message

    def _check_push(self, push: Push) -> None:
        """Raises ValueError for one that does not fit."""
        self._check(push.start, push.stop)
        if self.terms.clip_norm is not None and len(self._keys_of(push)) < len(self.keys):
            raise ValueError(
                f"a push to shard {self.number} is about a part of its keys, of which no step can "
                f"be clipped"
            )
        self.optimizer.check_range(push.start, push.stop)
        coding = self.terms.coding
        if (push.encoded is None) != (coding is None):
            raise ValueError(
                f"a push to shard {self.number} is compressed, or the shard's run is, and not both"
            )
        if coding is not None:
            coding.check(self._keys_of(push), push.gradient)

    def _keys_of(self, push: Push) -> Range:
        return Range(self.keys.vector, push.start, push.stop)

    def _joint(self, pushes: Sequence[Push]) -> tuple[Tensor, Tensor | None]:
        """The mean gradient of pushes, and the rows to which it belongs."""
        if self.terms.coding is not None:
            return self._decoded(pushes, scale_of(1.0, sum(push.weight for push in pushes))), None
        return _mean(pushes, shares_of(pushes)), None

    def _decoded(self, pushes: Sequence[Push], scale: float = 1.0) -> Tensor:
        """What compressed pushes to the same keys add up to, times `scale`."""
        assert self.terms.coding is not None
        messages = [push.gradient for push in pushes]
        return self.terms.coding.sum_of(self._keys_of(pushes[0]), messages, scale)

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
            # Of those who died or left before they pushed, nobody takes part.
            if members and all(worker in there for worker in members):
                del self._contributions[key]
                pushes = [there[worker] for worker in members]
                for push in pushes:
                    self._taken[push.worker, start] = clock + 1
                gradient, rows = self._joint(pushes)
                step = self._step(start, gradient, rows, pushes)
                if self._is_clipped(pushes):
                    self.unclipped[At(group, clock)] = Unclipped(step, square_of(gradient))
                else:
                    steps.append(step)
        return steps

    def _is_clipped(self, pushes: Sequence[Push]) -> bool:
        """Whether a step of these pushes has to be clipped: a lone worker has done it."""
        alone = len(pushes) == 1 and self.terms.coding is None
        return self.terms.clip_norm is not None and not alone

    def clip(self, at: At, squares: Mapping[int, float]) -> list[Step]:
        """The step that has waited for the norms of all shards, if there is one."""
        waited = self.unclipped.pop(at, None)
        if waited is None:
            return []
        assert self.terms.clip_norm is not None
        clip_to(self.terms.clip_norm, waited.step.gradient, squares)
        return [msgspec.structs.replace(waited.step, norms=norms_at(at, squares))]

    def _step(
        self,
        start: int,
        gradient: Tensor,
        rows: Tensor | None,
        pushes: Sequence[Push],
        factor: float = 1.0,
        decay: float = 1.0,
    ) -> Step:
        """A step of pushes that are of one step of their workers."""
        self.made += 1
        if self.terms.schedule is not None:
            factor *= self.terms.schedule(pushes[0].step)
        made = tuple(Made(push.worker, push.clock) for push in pushes)
        return Step(start, gradient, made, factor, rows, decay)

    def _in_turn(self, worker: int, start: int) -> list[Step]:
        """Return the steps of pushes that are next in the order of the worker's clocks."""
        early = self._early[worker, start]
        steps = []
        while (clock := self._next(worker, start)) in early:
            push = early.pop(clock)
            self._taken[worker, start] = clock + 1
            gradient, factor, decay = self._weighted(push)
            # Steps that are on their way to the replica will be applied before this one.
            age = self.made - push.version
            factor *= 1 / age if self.terms.slows and age > 1 else 1.0
            step = self._step(start, gradient, push.rows, [push], factor, decay)
            steps.append(step if push.weight else msgspec.structs.replace(step, moves=False))
        if not early:
            del self._early[worker, start]
        return steps

    def _weighted(self, push: Push) -> tuple[Tensor, float, float]:
        """The gradient of a push, and the factors of learning rates and of weight decay.

        What is accrued of several gradients has the decay of each of them.
        """
        weight = push.weight
        is_coded = self.terms.coding is not None
        gradient = self._decoded([push]) if is_coded else push.gradient
        if weight in (0, 1):
            return gradient, 1.0, push.gradients
        if not self.terms.recipe.linear:
            # Optimizers that measure gradients would make a whole step of a part of one.
            return gradient / weight if is_coded else gradient, weight, push.gradients
        # In plain SGD a part of a gradient is a part of the rate, which needs no pass of its own.
        if self._plain and not is_coded:
            return gradient, weight, 1.0
        return gradient if is_coded else gradient * weight, 1.0, weight * push.gradients

    # Steps are applied

    def apply(self, step: Step) -> None:
        """Applies a step. Afterwards, `answers` has what has waited for it."""
        stop = self._move(step)
        self.version += 1
        if step.norms is not None:
            self.norms[step.norms.group] = step.norms
        self.made = max(self.made, self.version)
        for made in step.pushes:
            self.clock.set(step.start, stop, made.worker, made.clock + 1)

    def _move(self, step: Step) -> int:
        """Changes the values by a step; the first key behind those that it is about."""
        if step.moves:
            self.optimizer.step(step.start, step.gradient, step.factor, step.decay)
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
        values = self._answer(pull, layout, {})
        if values is None:
            self._waiting[pull.worker] = pull
        else:
            self._waiting.pop(pull.worker, None)
        return values

    def answers(self, layout: Layout) -> list[Values]:
        """The answers to all pulls that have waited, and need wait no more."""
        found = []
        floors: Floors = {}
        for worker, pull in list(self._waiting.items()):
            values = self._answer(pull, layout, floors)
            if values is not None:
                del self._waiting[worker]
                found.append(values)
        return found

    def _floor(self, pull: Pull, layout: Layout, floors: Floors) -> float:
        """How many pushes are there of each worker of a group that is waited for.

        floors: those that were found before, since nothing has changed.
        """
        key = (layout.group_of(pull.worker), pull.start, pull.stop)
        if key not in floors:
            members = layout.groups[key[0]]
            times = [(w, self.clock.least(pull.start, pull.stop, w)) for w in members.workers]
            floors[key] = members.floor(times)
        return floors[key]

    def _answer(self, pull: Pull, layout: Layout, floors: Floors) -> Values | None:
        own = self.clock.least(pull.start, pull.stop, pull.worker)
        floor = self._floor(pull, layout, floors) if pull.worker >= 0 else 0.0
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
            "norms": [[one.group, one.clock, dict(one.squares)] for one in self.norms.values()],
        }

    @classmethod
    def of(cls, number: int, state: Mapping[str, Any], terms: Terms) -> Shard:
        """A shard from what `state` gave; it shares no tensor with it."""
        shard = cls(number, Range(*state["keys"]), state["values"].clone(), terms)
        shard.version = state["version"]
        shard.made = shard.version
        shard.clock.restore(state["clock"])
        shard.optimizer.restore(state["optimizer"])
        # Written since steps are clipped here.
        for group, clock, squares in state.get("norms", ()):
            shard.norms[group] = Norms(group, clock, dict(squares))
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

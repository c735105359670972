"""Shard: a range of keys with values, optimizer, clock and waiting requests.

Pushes become *steps*, and steps are applied; in between a replica may have to confirm them first
(`server`). With staleness s, over the workers of a group:

    0       the pushes of a clock become a single step, once all have arrived:
                g = sum of weight_p / (sum of weights) · g_p, in the order of the workers
    s, None each push becomes a step after the earlier pushes of the same worker, scaled by its
            weight, which is a share of a joint batch:
                SGD     g = weight_p · g_p,  weight decay times weight_p
                others  g = g_p,             learning rate times weight_p

so that a clock of all workers moves the weights as far, and decays them as much, to first order,
for any staleness. A push of weight 0 makes no step. Compressed pushes include their weights
(`compressed`).

If steps are clipped (staleness 0), a step waits for the norms of all shards (`clipping`):

                g = g · min(1, clip_norm / |g|)      over the shards together

A pull at clock c is answered once all updates before c - s are contained, of every worker of the
group, and the requested number of the worker's own pushes; until then the pull waits here. After
each step all pulls that can be answered are answered. The values of an answer are a copy, made
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

from dure.parameter_server.clipping import GroupClock, PendingClip, clip_to, norms_at, square_of
from dure.parameter_server.clock import RangedClock
from dure.parameter_server.compressed import PushCoding
from dure.parameter_server.keys import KeyRange
from dure.parameter_server.layout import ShardLayout
from dure.parameter_server.messages import AppliedPush, Norms, Pull, Push, ShardStep, Values
from dure.parameter_server.optimizer import OptimizerRecipe, ShardOptimizer
from dure.parameter_server.tables import EmbeddingTable
from dure.tasks.loss_shares import scale_of
from dure.tensors.block_allocator import BlockAllocator

Asks = TypeVar("Asks", Push, Pull)
Floors = dict[tuple[int, int, int], float]
"""Least times by group, first key and last key + 1."""


@dataclass(frozen=True)
class Terms:
    """Training terms of a run's shards.

    Args:
        recipe: recipe of the optimizer.
        staleness: clocks by which a worker may be ahead of the slowest of its group; None is
            unbounded.
        schedule: factor of the learning rates at a clock; None is 1.
        slows: whether an update whose gradient is n updates old counts one n-th.
        tables: tables of the model.
        coding: decoder of pushes; None for plain gradients.
        clip_norm: largest norm of the gradient of a clock's step; None for no limit. A lone worker
            clips its own gradient.
    """

    recipe: OptimizerRecipe
    staleness: int | None = 0
    schedule: Callable[[int], float] | None = None
    slows: bool = False
    tables: Sequence[EmbeddingTable] = ()
    coding: PushCoding | None = None
    clip_norm: float | None = None


class Shard:
    """Shard of a key range; owns `values` and changes them in place."""

    def __init__(self, number: int, keys: KeyRange, values: Tensor, terms: Terms) -> None:
        self._begin(number, keys, terms)
        self.values = values
        self.optimizer = ShardOptimizer(terms.recipe, keys.vector, keys.start, values)

    def _begin(self, number: int, keys: KeyRange, terms: Terms) -> None:
        self.number = number
        self.keys = keys
        self.terms = terms
        self.clock = RangedClock(keys.start, keys.stop)
        self._blocks = BlockAllocator()
        self._plain = terms.recipe.plain
        self.version = 0
        """Number of applied steps."""
        self.made = 0
        """Number of steps made here, plus those made by earlier owners."""
        self._contributions: dict[tuple[int, int, int], dict[int, Push]] = {}
        """Pushes that wait for the rest of their clock: by group, clock and first key."""
        self._early: dict[tuple[int, int], dict[int, Push]] = {}
        """Pushes that arrived before an earlier push of the same worker.

        By worker and first key.
        """
        self.unclipped: dict[GroupClock, PendingClip] = {}
        """Steps that wait for the norms of other shards."""
        self.norms: dict[int, Norms] = {}
        """Norms of the last clipped step of each group."""
        self._taken: dict[tuple[int, int], int] = {}
        """Number of a worker's pushes that have become steps: by worker and first key."""
        self._waiting: dict[int, Pull] = {}
        """Pulls that cannot be answered yet, the newest of each worker."""
        self._answered: dict[tuple[int, int], int] = {}
        """Number of the newest answered request: by worker and first key."""

    # Pushes become steps

    def push(self, push: Push, layout: ShardLayout) -> list[ShardStep]:
        """Return the steps that are ready after a push.

        Raises ValueError for a push that does not fit the shard's keys.
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
        """Return a message with its rows; None if it names an unknown digest of rows."""
        return message

    def _check_push(self, push: Push) -> None:
        """Check that a push fits the shard; raises ValueError if not."""
        self._check(push.start, push.stop)
        if self.terms.clip_norm is not None and len(self._keys_of(push)) < len(self.keys):
            raise ValueError(
                f"a push to shard {self.number} covers a part of its keys, but clipping needs all "
                "of them"
            )
        self.optimizer.check_range(push.start, push.stop)
        coding = self.terms.coding
        if (push.encoded is None) != (coding is None):
            raise ValueError(
                f"a push to shard {self.number} does not use the same compression as the run of "
                "the shard"
            )
        if coding is not None:
            coding.check(self._keys_of(push), push.gradient)

    def _keys_of(self, push: Push) -> KeyRange:
        return KeyRange(self.keys.vector, push.start, push.stop)

    def _joint(self, pushes: Sequence[Push]) -> tuple[Tensor, Tensor | None]:
        """Return the mean gradient of pushes, and its rows."""
        if self.terms.coding is not None:
            return self._decoded(pushes, scale_of(1.0, sum(push.weight for push in pushes))), None
        return _mean(pushes, shares_of(pushes)), None

    def _decoded(self, pushes: Sequence[Push], scale: float = 1.0) -> Tensor:
        """Return the sum of decoded pushes to the same keys, times `scale`."""
        assert self.terms.coding is not None
        messages = [push.gradient for push in pushes]
        return self.terms.coding.sum_of(self._keys_of(pushes[0]), messages, scale)

    def settled(self, layout: ShardLayout) -> list[ShardStep]:
        """Return the steps that are ready after a change of members."""
        return self._complete(layout)

    def _next(self, worker: int, start: int) -> int:
        """Return the number of a worker's next push to become a step."""
        return max(self._taken.get((worker, start), 0), self.contains(worker, start))

    def _complete(self, layout: ShardLayout) -> list[ShardStep]:
        """Return the steps of clocks whose pushes have all arrived."""
        steps = []
        for key in sorted(self._contributions):
            group, clock, start = key
            there = self._contributions[key]
            members = layout.groups[group].at(clock)
            # A clock may have no members if all were lost or left before their push.
            if members and all(worker in there for worker in members):
                del self._contributions[key]
                pushes = [there[worker] for worker in members]
                for push in pushes:
                    self._taken[push.worker, start] = clock + 1
                gradient, rows = self._joint(pushes)
                step = self._step(start, gradient, rows, pushes)
                if self._is_clipped(pushes):
                    self.unclipped[GroupClock(group, clock)] = PendingClip(
                        step, square_of(gradient)
                    )
                else:
                    steps.append(step)
        return steps

    def _is_clipped(self, pushes: Sequence[Push]) -> bool:
        """Return whether a step of these pushes needs clipping.

        A lone worker clips its own gradient.
        """
        alone = len(pushes) == 1 and self.terms.coding is None
        return self.terms.clip_norm is not None and not alone

    def clip(self, at: GroupClock, squares: Mapping[int, float]) -> list[ShardStep]:
        """Return the clipped step that has waited for these norms, if there is one."""
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
    ) -> ShardStep:
        """Return a step of pushes of the same step of their workers."""
        self.made += 1
        if self.terms.schedule is not None:
            factor *= self.terms.schedule(pushes[0].step)
        made = tuple(AppliedPush(push.worker, push.clock) for push in pushes)
        return ShardStep(start, gradient, made, factor, rows, decay)

    def _in_turn(self, worker: int, start: int) -> list[ShardStep]:
        """Return the steps of pushes that are next in the order of the worker's clocks."""
        early = self._early[worker, start]
        steps = []
        while (clock := self._next(worker, start)) in early:
            push = early.pop(clock)
            self._taken[worker, start] = clock + 1
            gradient, factor, decay = self._weighted(push)
            # Steps in flight to the replica count, since they are applied before this step.
            age = self.made - push.version
            factor *= 1 / age if self.terms.slows and age > 1 else 1.0
            step = self._step(start, gradient, push.rows, [push], factor, decay)
            steps.append(step if push.weight else msgspec.structs.replace(step, moves=False))
        if not early:
            del self._early[worker, start]
        return steps

    def _weighted(self, push: Push) -> tuple[Tensor, float, float]:
        """Return the gradient of a push, the factor of learning rates, and that of weight decay.

        An accrued gradient has the weight decay of each of its gradients.
        """
        weight = push.weight
        is_coded = self.terms.coding is not None
        gradient = self._decoded([push]) if is_coded else push.gradient
        if weight in (0, 1):
            return gradient, 1.0, push.gradients
        if not self.terms.recipe.linear:
            # Adaptive optimizers normalise the gradient, so the weight must scale the rate.
            return gradient / weight if is_coded else gradient, weight, push.gradients
        # In plain SGD the weight can scale the rate, which saves a pass over the gradient.
        if self._plain and not is_coded:
            return gradient, weight, 1.0
        return gradient if is_coded else gradient * weight, 1.0, weight * push.gradients

    # Steps are applied

    def apply(self, step: ShardStep) -> None:
        """Apply a step; call `answers` afterwards for the waiting pulls."""
        stop = self._move(step)
        self.version += 1
        if step.norms is not None:
            self.norms[step.norms.group] = step.norms
        self.made = max(self.made, self.version)
        for made in step.pushes:
            self.clock.set(step.start, stop, made.worker, made.clock + 1)

    def _move(self, step: ShardStep) -> int:
        """Change the values by a step; returns the last key of the step + 1."""
        if step.moves:
            self.optimizer.step(step.start, step.gradient, step.factor, step.decay)
        return step.start + len(step.gradient)

    def contains(self, worker: int, start: int) -> int:
        """Return the number of a worker's applied pushes to the keys from `start` on."""
        return self.clock.least(start, start + 1, worker)

    # Pulls

    def pull(self, pull: Pull, layout: ShardLayout) -> Values | None:
        """Return the answer to a pull; None if the pull has to wait. A later pull replaces it.

        Raises ValueError for keys that the shard does not have.
        """
        self._check(pull.start, pull.stop)
        if pull.into is not None and self._answered.get((pull.worker, pull.start)) == pull.number:
            # A retry: the first answer may have arrived after all, and its memory may be in use:
            # do not write there again.
            pull = msgspec.structs.replace(pull, into=None)
        values = self._answer(pull, layout, {})
        if values is None:
            self._waiting[pull.worker] = pull
        else:
            self._waiting.pop(pull.worker, None)
        return values

    def answers(self, layout: ShardLayout) -> list[Values]:
        """Return the answers to the waiting pulls that can be answered now."""
        found = []
        floors: Floors = {}
        for worker, pull in list(self._waiting.items()):
            values = self._answer(pull, layout, floors)
            if values is not None:
                del self._waiting[worker]
                found.append(values)
        return found

    def _floor(self, pull: Pull, layout: ShardLayout, floors: Floors) -> float:
        """Return the least number of pushes of the workers to wait for.

        `floors` caches earlier results, which are valid since nothing has changed.
        """
        key = (layout.group_of(pull.worker), pull.start, pull.stop)
        if key not in floors:
            members = layout.groups[key[0]]
            times = [(w, self.clock.least(pull.start, pull.stop, w)) for w in members.workers]
            floors[key] = members.floor(times)
        return floors[key]

    def _answer(self, pull: Pull, layout: ShardLayout, floors: Floors) -> Values | None:
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
        """Return the requested values, and their rows; a copy unless the pull names memory."""
        first = pull.start - self.keys.start
        values = self.values[first : first + pull.stop - pull.start]
        return (self._blocks.copy(values) if pull.into is None else values), None

    # Dropped workers

    def count(self, worker: int) -> tuple[int, int]:
        """Return the number of a worker's arrived pushes: least and most over the keys.

        Pushes that wait for others of their clock have arrived.
        """
        waiting = [key[1] + 1 for key, there in self._contributions.items() if worker in there]
        least = self.clock.least(self.keys.start, self.keys.stop, worker)
        most = self.clock.most(self.keys.start, self.keys.stop, worker)
        taken = [time for (w, _), time in self._taken.items() if w == worker]
        return least, max([most, *waiting, *taken])

    # Copies

    def state(self) -> dict[str, Any]:
        """Return copies of the applied state, for a replica or a checkpoint."""
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
        """Return a shard from `state`, without shared tensors."""
        shard = cls(number, KeyRange(*state["keys"]), state["values"].clone(), terms)
        shard.version = state["version"]
        shard.made = shard.version
        shard.clock.restore(state["clock"])
        shard.optimizer.restore(state["optimizer"])
        # States from before clipping lack this entry.
        for group, clock, squares in state.get("norms", ()):
            shard.norms[group] = Norms(group, clock, dict(squares))
        return shard

    def _check(self, start: int, stop: int) -> None:
        if not self.keys.start <= start < stop <= self.keys.stop:
            raise ValueError(
                f"the keys {start} to {stop - 1} do not belong to shard {self.number}, which has "
                f"{self.keys.start} to {self.keys.stop - 1}"
            )


def shares_of(pushes: Sequence[Push]) -> list[float]:
    """Return the share of each push in their total weight; 1 for a lone push."""
    if len(pushes) == 1:
        return [1.0]
    total = sum(push.weight for push in pushes)
    # Without any count, such as in parts of padding alone, every gradient is zero.
    return [push.weight / total if total else 0.0 for push in pushes]


def _mean(pushes: Sequence[Push], shares: Sequence[float]) -> Tensor:
    """Return the weighted mean gradient, summed in the order of the pushes."""
    if len(pushes) == 1:
        return pushes[0].gradient
    out = pushes[0].gradient * shares[0]
    for push, share in zip(pushes[1:], shares[1:], strict=True):
        # Product and sum are rounded separately (no fused multiply-add), for equal bits everywhere.
        out += push.gradient * share
    return out


def _copied(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.clone()
    if isinstance(node, Mapping):
        return {key: _copied(value) for key, value in node.items()}
    return node

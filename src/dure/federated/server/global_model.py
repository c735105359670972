"""The global model, and its update: fold or collect updates, combine, step.

    Δ <- aggregate of s_k·Δ_k over the updates, weighted        x <- server optimizer's step along Δ

An overridden `Algorithm.step` runs between the two: the optimizer then moves along its result minus
x.

Buffers: floating-point buffers (batch-norm statistics) are aggregated with the weights, as
`dure.federated.aggregate.aggregator` documents, and add their mean change without a server step.
Elements that did not change add nothing, so that a mask of -inf stays unchanged; an element that
was not finite becomes the mean of the finite new values. Integer buffers (counters) take the
largest value, complex buffers stay unchanged. For weights, a complex number counts as two real
numbers.

Under user-level differential privacy (`dure.federated.server.privacy_interfaces`) weights,
statistics of batch norm and extras are gathered as a single vector, and return with noise. All
other buffers keep the server's values: a counter reveals a client's steps, and a table that never
moves would drown in noise. A client whose other buffers move is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dure.federated.aggregate.aggregator import Aggregator, Collects, Folds
from dure.federated.aggregate.mean import Mean
from dure.federated.aggregate.rows import UpdateRows
from dure.federated.engines.products import DeferredUpdate
from dure.federated.server.privacy_interfaces import PrivateAggregation
from dure.federated.server.server_optimizer import ServerOptimizer, State
from dure.protocol.messages import Update, nbytes
from dure.randomness.seeds import RoundSeed

CustomStep = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""(weights, mean) -> new weights; `Algorithm.step` with the updates bound."""


@dataclass
class GlobalModel:
    """The global model, and the updates gathered for the next model.

    Args:
        weights: the trained weights, one flat tensor per dtype.
        buffers: in the model's order.
        aggregator: rule that combines updates.
        optimizer: server optimizer.
        number: number of models made so far.
        private: gathers updates instead of the rule, and adds noise; None without user-level
            privacy.
        statistics: indices of batch norm's statistics among the buffers, each with whether it is a
            variance.
        moments: state of the optimizer; None before the first step.
        memory: state of a rule that collects; None before the first round.
    """

    weights: list[Tensor]
    buffers: list[Tensor]
    aggregator: Aggregator = field(default_factory=Mean)
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    number: int = 0
    private: PrivateAggregation | None = None
    statistics: Mapping[int, bool] = field(default_factory=dict)
    moments: State | None = None
    memory: list[Tensor] | None = None
    _folded: Any = None
    _moved: Any = None
    _extra: Any = None
    _refused: int = 0
    _collected: list[list[Tensor]] = field(default_factory=list)
    _shares: list[float] = field(default_factory=list)
    _deferred: list[tuple[DeferredUpdate, float]] = field(default_factory=list)
    _counters: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nbytes = nbytes(self.weights) + nbytes(self.buffers)
        self._complex = any(weight.is_complex() for weight in self.weights)

    def fold(
        self, update: Update, scale: float, weight: float, start: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Take an update, scaled by `scale`, with `weight` in the mean.

        Returns its weights as real tensors, as the rule gets them; an empty list if they are not
        formed.

        start: the update's start weights, if the server mixes in the *model* and not its change:
        the update is then x_start + Δ - x.
        """
        if isinstance(update.delta, DeferredUpdate) and self._defers(update, scale, start):
            self._defer(update.delta, weight)
            return []
        parts = list(update.delta)
        # x_start + Δ is the client's model; minus the global model it is an ordinary update, so
        # that mixing is a mean with a scale.
        if start is not None:
            parts = [d + s - w for d, s, w in zip(parts, start, self.weights, strict=True)]
        # Rules compare, sort and take norms, so they get real numbers only.
        if self._complex:
            parts = [torch.view_as_real(d) if d.is_complex() else d for d in parts]
        moved: list[Tensor] = []
        if self.private is not None:
            moved = buffer_changes(
                self._released_of(update.buffers), self._released_of(self.buffers)
            )
            self.private.fold([*parts, *moved, *map(_real, update.extra)], update.examples)
            return parts
        if self.buffers:
            moved = buffer_changes(update.buffers, self.buffers)
            self._count(update.buffers)
        if scale != 1:
            parts = [part * scale for part in parts]
            moved = [part * scale for part in moved]
        self._take(parts, moved, weight)
        self._shares.append(weight)
        if update.extra:
            if self._extra is None:
                self._extra = Mean().zero(update.extra)
            # Always the plain mean, by clients and not by examples: extras belong to the algorithm,
            # not to the rule.
            self._extra = Mean().fold(self._extra, update.extra, 1.0)
        return parts

    def _take(self, parts: list[Tensor], moved: list[Tensor], weight: float) -> None:
        """Pass an update to the rule. parts: its weights; moved: the changes of its buffers."""
        rule = self.aggregator
        # A rule that collects needs every single update, and so stores a whole cohort here.
        if not isinstance(rule, Folds):
            self._collected.append([*parts, *moved])
            return
        # Earlier folds may have been a sum (`_sum_deferred`), of a model without buffers.
        self._folded = rule.fold(
            rule.zero(parts) if self._folded is None else self._folded, parts, weight
        )
        if moved:
            self._moved = Mean().fold(
                Mean().zero(moved) if self._moved is None else self._moved, moved, weight
            )

    def fold_mean(
        self,
        parts: Sequence[Tensor],
        moved: Sequence[Tensor],
        extra: Sequence[Tensor],
        rises: Sequence[Tensor],
        weight: float,
        clients: int,
    ) -> None:
        """Take the mean of the updates of `clients` clients, from a secure sum.

        Args:
            parts: mean change of the trained weights.
            moved: mean changes of the floating-point buffers.
            extra: mean of the extras.
            rises: increases of the counting buffers.
            weight: of the mean, among others.
            clients: number of clients in the sum.
        """
        if self._complex:
            parts = [torch.view_as_real(d) if d.is_complex() else d for d in parts]
        self._take(list(parts), list(moved), weight)
        self._shares.append(weight)
        if rises:
            mine = self._counters or [b for b in self.buffers if _counts(b)]
            old = [b for b in self.buffers if _counts(b)]
            self._counters = [
                torch.maximum(a, b + rise.to(b.dtype))
                for a, b, rise in zip(mine, old, rises, strict=True)
            ]
        if extra:
            if self._extra is None:
                self._extra = Mean().zero(extra)
            self._extra = Mean().fold(self._extra, extra, float(clients))

    def fold_clipped(self, total: Sequence[Tensor]) -> None:
        """Take the sum of contributions that clients have clipped, under user-level privacy."""
        assert self.private is not None
        self.private.add(total)

    def refuse(self) -> None:
        """Count a refused update, for rules that withstand a number of broken updates."""
        self._refused += 1

    def _count(self, buffers: Sequence[Tensor]) -> None:
        """Take the counters of an update, if they are larger."""
        counters = [b for b in buffers if _counts(b)]
        mine = self._counters or [b for b in self.buffers if _counts(b)]
        self._counters = [torch.maximum(a, b) for a, b in zip(mine, counters, strict=True)]

    def _defers(self, update: Update, scale: float, start: Sequence[Tensor] | None) -> bool:
        """Return whether the update is only needed as a summand of a mean."""
        alone = not (update.buffers or update.extra) and self.private is None
        return alone and scale == 1 and start is None and self.aggregator.sums

    def _defer(self, delta: DeferredUpdate, weight: float) -> None:
        """Take an update that is summed with the others of its cohort.

        The sum is computed when all updates of the cohort are here, or when an update of another
        cohort arrives.
        """
        # Only updates of the same cohort have their sum in one product.
        if self._deferred and self._deferred[0][0].products is not delta.products:
            self._sum_deferred()
        self._deferred.append((delta, weight))
        self._shares.append(weight)
        # The whole cohort is here: sum it now, and free the factors.
        if len(self._deferred) == delta.products.clients:
            self._sum_deferred()

    def _sum_deferred(self) -> None:
        """Fold the sum of a cohort whose updates were never formed."""
        if not self._deferred:
            return
        assert isinstance(self.aggregator, Mean)
        products = self._deferred[0][0].products
        # A client of the cohort whose update was refused, or comes in another fold, weighs 0.
        weights = [0.0] * products.clients
        for delta, weight in self._deferred:
            weights[delta.place] += weight
        home = self.weights[0].device

        # Added directly to the earlier folds: the sum of a cohort needs no memory of its own.
        def sum_onto(total: Tensor | None) -> Tensor:
            if products.device == home:
                return products.sum(weights, total)
            moved = products.sum(weights).to(home)
            return moved if total is None else total.add_(moved)

        self._folded = self.aggregator.add(self._folded, sum_onto, sum(weights))
        self._deferred = []

    def finish(self, seed: int, own: CustomStep | None = None) -> list[Tensor]:
        """Make the new model from the folded updates, if there are any.

        Returns the mean of the updates' extras. own: the step before the optimizer's step.

        Raises TooFewUpdatesError if the updates are too few for the aggregator.
        """
        extra: list[Tensor] = []
        # An incomplete cohort, with refused updates, is summed only here.
        self._sum_deferred()
        if self._shares or self.private is not None:
            if self.private is not None:
                # Released even without any client, because the absence of all clients is secret
                # too.
                delta, moved, extra = self._released(self.private.release(self.number))
            else:
                delta, moved = self._combined(RoundSeed(seed, self.number))
            if self.moments is None:
                self.moments = self.optimizer.start(self.weights)
            if self._complex:
                pairs = zip(delta, self.weights, strict=True)
                delta = [torch.view_as_complex(d) if w.is_complex() else d for d, w in pairs]
            self.weights, self.moments = self._stepped(delta, self.moments, own)
            if self.buffers:
                self.buffers = self._moved_buffers(moved)
            if self._extra is not None:
                extra = Mean().finish(self._extra)
        # Without folds too: the number counts rounds, and seeds batches and draws.
        self.skip()
        return extra

    def _stepped(
        self, delta: list[Tensor], moments: State, own: CustomStep | None
    ) -> tuple[list[Tensor], State]:
        """Return the weights and moments after the step along the aggregated update."""
        spare = self.aggregator.sums  # other rules may have returned a client's own update
        if own is not None:
            reached = own(self.weights, delta)
            # Exact: w + (reached - w) would be rounded.
            if self.optimizer.follows:
                return reached, moments
            delta = [new - w for new, w in zip(reached, self.weights, strict=True)]
            spare = True
        return self.optimizer.step(self.weights, delta, moments, spare)

    def _released_of(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the buffers that are released with noise."""
        return [one for place, one in enumerate(buffers) if place in self.statistics]

    def moves_more(self, update: Update) -> bool:
        """Return whether floating-point buffers move besides the buffers released with noise."""
        pairs = enumerate(zip(update.buffers, self.buffers, strict=True))
        return any(
            bool(buffer_changes([new], [old])[0].any())
            for place, (new, old) in pairs
            if place not in self.statistics and old.is_floating_point()
        )

    def contribution(self, extra: Sequence[Tensor]) -> list[Tensor]:
        """Return real tensors with the shapes of a client's contribution. extra: its extras."""
        return list(map(_real, [*self.weights, *self._released_of(self.buffers), *extra]))

    def _released(
        self, vector: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return (weights, buffers' changes, extras) of a released vector, in their own dtypes."""
        floating = self._released_of(self.buffers)
        weights = len(self.weights)
        own = [_real(weight).dtype for weight in self.weights]
        delta = [one.to(kind) for one, kind in zip(vector, own, strict=False)]
        rest = vector[weights:]
        moved = [one.to(like.dtype) for one, like in zip(rest, floating, strict=False)]
        return delta, moved, list(rest[len(floating) :])

    def _moved_buffers(self, changes: Sequence[Tensor]) -> list[Tensor]:
        """Return the new buffers. changes: of the floating-point buffers."""
        # Rules see floating-point buffers only, so both kinds are merged in the model's order.
        moved = iter(changes)
        counters = iter(self._counters)
        buffers = []
        for place, buffer in enumerate(self.buffers):
            if self.private is not None and place not in self.statistics:
                buffers.append(buffer)
            elif buffer.is_floating_point():
                new = _moved(buffer, next(moved))
                # Noise may make a variance negative.
                positive = self.private is not None and self.statistics[place]
                buffers.append(new.clamp(min=0) if positive else new)
            elif _counts(buffer):
                buffers.append(next(counters))
            else:
                buffers.append(buffer)
        return buffers

    def skip(self) -> None:
        """Advance to the next model number, and discard the folded updates."""
        self.number += 1
        self.forget()

    def forget(self) -> None:
        """Discard the folded updates."""
        self._folded = None
        self._moved = None
        self._extra = None
        self._refused = 0
        self._collected = []
        self._shares = []
        self._deferred = []
        self._counters = []
        if self.private is not None:
            self.private.forget()

    def _combined(self, turn: RoundSeed) -> tuple[list[Tensor], list[Tensor]]:
        """Return the aggregated weights, and the aggregated changes of buffers."""
        if isinstance(self.aggregator, Folds):
            moved = [] if self._moved is None else Mean().finish(self._moved)
            return self.aggregator.finish(self._folded), moved
        assert isinstance(self.aggregator, Collects)
        weights = len(self.weights)
        rows = UpdateRows(self._collected, self._shares, measured=weights)
        combined, self.memory = self.aggregator.combine(rows, turn, self.memory, self._refused)
        return combined[:weights], combined[weights:]

    def state(self) -> dict[str, Any]:
        """Return the state between two models, as a tree for checkpoints."""
        return {
            "weights": list(self.weights),
            "buffers": list(self.buffers),
            "number": self.number,
            "moments": self.moments,
            "memory": self.memory,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]
        self.buffers = state["buffers"]
        self.number = state["number"]
        self.moments = state["moments"]
        self.memory = state["memory"]


def buffer_changes(new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """Return the changes of the floating-point buffers: new - old.

    The change is 0 for equal elements, including infinities and NaNs. If the old element is not
    finite, the change is the new element.
    """
    return [
        (one - other.masked_fill(~other.isfinite(), 0)).masked_fill(
            (one == other) | (one.isnan() & other.isnan()), 0
        )
        for one, other in zip(new, old, strict=True)
        if other.is_floating_point()
    ]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _moved(buffer: Tensor, change: Tensor) -> Tensor:
    return buffer.masked_fill(~buffer.isfinite() & (change != 0), 0) + change


def _counts(buffer: Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex())

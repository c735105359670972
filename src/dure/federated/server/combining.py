"""Combining of updates into the next model: each update is checked, counted and folded.

The coordinator names the assignments whose updates are combined. The updates arrive one after
another, in the order of the assignments, so that a mean needs the memory of one model. Folded
updates are not stored: after a restart, all of them are folded again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dure.errors import TooFewUpdatesError
from dure.federated.algorithm import Algorithm
from dure.federated.server.algorithm_step import checked_step
from dure.federated.server.global_model import CustomStep, GlobalModel
from dure.federated.server.update_validation import invalid_reason
from dure.protocol.messages import Assignment, Update
from dure.tasks.loss_shares import mean_over

MOST_EMPTY_MODELS = 100
"""Models in a row without any accepted update before the server fails.

Such models arise if every update was refused.
"""

MOVES = (
    "its model changes a buffer that is not a statistic of batch norm, to which no noise is "
    "added: make it a parameter, or keep it constant"
)
"""Reason for refusing an update under user-level differential privacy."""


class RoundResult(NamedTuple):
    """Statistics of the updates of a new model.

    loss: mean over the counted weight of the samples, None without accepted updates. refused:
    reasons of `fold`, by assignment id. wrong: the clients of the refused assignments, in their
    order. cut: number of values beyond the range of secure sums; None without secure sums.
    """

    loss: float | None
    samples: int
    clients: list[int]
    staleness: list[int]
    refused: dict[int, str]
    wrong: list[int]
    cut: int | None = None


class FoldedUpdate(NamedTuple):
    """Statistics of a folded update."""

    client: int
    samples: int
    counted: float
    loss: float
    staleness: int


class SummedUpdates(NamedTuple):
    """Mean of the updates of several clients, from a secure sum that hides the single updates.

    tickets: assignment ids of these updates. examples: the sum of their n_k. cut: number of values
    beyond the range. clipped: under user-level differential privacy, the sum of the contributions
    that the clients have clipped, instead of the mean. The other fields are as in
    `GlobalModel.fold_mean` and `RoundResult`.
    """

    tickets: Sequence[int]
    delta: Sequence[Tensor]
    buffers: Sequence[Tensor]
    extra: Sequence[Tensor]
    rises: Sequence[Tensor]
    weight: float
    examples: int
    samples: int
    counted: float
    loss: float
    cut: int
    clipped: Sequence[Tensor] | None = None


@dataclass
class UpdateCombiner:
    """State of the updates that are being combined.

    sizes: largest number of examples of each client. most_counted: largest weight of an example in
    the loss. vain: models in a row without any accepted update. tickets: ids of the assignments
    that are being combined. fewest: fewest clients with accepted updates in a new model.
    """

    model: GlobalModel
    algorithm: Algorithm
    sizes: Sequence[int]
    seed: int
    most_counted: float = math.inf
    unsuccessful_models: int = 0
    tickets: list[int] = field(default_factory=list)
    fewest: int = 1
    _awaited: dict[int, Assignment] = field(default_factory=dict)
    _clients: dict[int, int] = field(default_factory=dict)
    _folded: list[FoldedUpdate] = field(default_factory=list)
    _refused: dict[int, str] = field(default_factory=dict)
    _summed: list[SummedUpdates] = field(default_factory=list)
    _taken: set[int] = field(default_factory=set)
    """Clients whose updates are in the new model."""
    _kept: list[Update] = field(default_factory=list)
    """Folded updates, for an algorithm that overrides `step`."""

    def begin(self, asked: Mapping[int, Assignment]) -> None:
        """Start to combine the updates of these assignments, in order; discard earlier folds."""
        self.tickets = list(asked)
        self._awaited = dict(asked)
        self._clients = {ticket: one.client for ticket, one in asked.items()}
        self._folded = []
        self._refused = {}
        self._summed = []
        self._taken = set()
        self._kept = []
        self.model.forget()

    def fold(self, update: Update, finite: bool, computed: bool) -> list[Tensor] | None:
        """Take the next update, as `Coordinator.fold` documents."""
        asked = self._awaited.pop(update.ticket, None)
        if asked is None:
            raise ValueError(
                f"the update with ticket {update.ticket} is not expected, or was already aggregated"
            )
        reason = update.failure if computed else self._unfit(update, asked, finite)
        if reason is None and self.model.private is not None and self.model.moves_more(update):
            reason = MOVES
        if reason is not None:
            self._refused[update.ticket] = reason
            self.model.refuse()
            return None
        # Staleness follows the assignment, because a client might misreport its round.
        staleness = self.model.number - asked.round
        scale, weight = self.algorithm.share(update, staleness)
        start = asked.weights if self.algorithm.mixes_models else None
        # A client whose loss counted nothing has learned nothing. A client with its own noise does
        # not reveal its count.
        learned = weight > 0 or self.model.private is not None
        taken = self.model.fold(update, scale, weight, start) if learned else None
        if learned:
            self._taken.add(update.client)
        if learned and self.algorithm.has_own_step:
            self._kept.append(update)
        told = (update.client, update.samples, update.count, update.loss)
        self._folded.append(FoldedUpdate(*told, staleness))
        return taken

    def fold_sum(self, summed: SummedUpdates) -> None:
        """Take the mean of the updates of several assignments, instead of a `fold` for each."""
        for ticket in summed.tickets:
            asked = self._awaited.pop(ticket)
            staleness = self.model.number - asked.round
            self._folded.append(FoldedUpdate(asked.client, 0, 0.0, 0.0, staleness))
            self._taken.add(asked.client)
        self._summed.append(summed)
        if summed.clipped is not None:
            self.model.fold_clipped(summed.clipped)
            return
        self.model.fold_mean(
            summed.delta,
            summed.buffers,
            summed.extra,
            summed.rises,
            summed.weight,
            len(summed.tickets),
        )

    def lost(self, ticket: int, reason: str) -> None:
        """Note that the update of this assignment is in no sum."""
        del self._awaited[ticket]
        self._refused[ticket] = reason
        self.model.refuse()

    def _unfit(self, update: Update, asked: Assignment, finite: bool) -> str | None:
        return invalid_reason(
            update,
            asked,
            extra=self.algorithm.expects(asked),
            examples=self.sizes[asked.client],
            most_counted=self.most_counted,
            finite=finite,
        )

    def finish(self) -> RoundResult:
        """Make the new model, as `Coordinator.finish` documents."""
        extra: list[Tensor] = []
        try:
            self._check_enough()
            extra = self.model.finish(self.seed, self._own_step())
        except TooFewUpdatesError as error:
            # The rule has refused all updates, including updates that `fold` accepted. The model's
            # number still rises, so that no round's random numbers are drawn twice.
            self._refused = dict.fromkeys(self.tickets, str(error))
            self._folded = []
            self.model.skip()
        # Under user-level differential privacy the number of arrived updates is secret: extras then
        # have the denominator of the weights.
        private = self.model.private
        if private is not None:
            extra = list(map(_like, extra, self.algorithm.down()))
        self.algorithm.absorb(extra, len(self._folded) if private is None else private.expected)
        result = self._result()
        # A round for which Poisson sampling drew no client is neither a success nor a failure.
        if self._folded:
            self.unsuccessful_models = 0
        elif self._refused:
            self.unsuccessful_models += 1
        self.begin({})
        return result

    def _check_enough(self) -> None:
        """Raise TooFewUpdatesError if the new model has fewer clients than required.

        The clients of the run require the minimum `fewest`.

        A model without any client is allowed, because it reveals nobody's update; in a sum that is
        too small, a client shares the sum with too few others.
        """
        smallest = min([len(self._taken), *(len(one.tickets) for one in self._summed)])
        if 0 < smallest < self.fewest:
            raise TooFewUpdatesError(
                f"{smallest} clients' updates could be combined, but a client of the run requires "
                f"at least {self.fewest}"
            )

    def _own_step(self) -> CustomStep | None:
        if not self.algorithm.has_own_step:
            return None
        return partial(checked_step, self.algorithm, self._kept)

    def complaint(self, result: RoundResult) -> str:
        """Return a sentence about consecutive rounds in which every update was refused."""
        reason = next(iter(result.refused.values()))
        return f"every update was rejected in {self.unsuccessful_models} rounds in a row: {reason}"

    def _result(self) -> RoundResult:
        # For a sum of updates only totals are known.
        told: list[FoldedUpdate | SummedUpdates] = [*self._folded, *self._summed]
        loss = sum([one.counted * one.loss for one in told])
        return RoundResult(
            loss=mean_over(loss, sum([one.counted for one in told])),
            samples=sum([one.samples for one in told]),
            clients=[one.client for one in self._folded],
            staleness=[one.staleness for one in self._folded],
            refused=self._refused,
            wrong=[self._clients[ticket] for ticket in self._refused],
            cut=sum([one.cut for one in self._summed])
            if self._summed and self.model.private is None
            else None,
        )


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a released tensor of real numbers in float64 in the type of the algorithm's tensor."""
    whole = torch.view_as_complex(tensor) if other.is_complex() else tensor
    return whole.to(other.dtype)

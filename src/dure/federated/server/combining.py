"""What makes the next model of updates: each is looked at, counted and folded.

The coordinator says which tickets are combined. Their updates come one after another, in the order
of the tickets, so that a mean needs the memory of one model. What was folded is kept nowhere: after
a restart, all of them are given again.
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
from dure.federated.server.global_model import GlobalModel, OwnStep
from dure.federated.server.stepping import stepped
from dure.federated.server.unfit import unfit
from dure.protocol.messages import Assignment, Update
from dure.tasks.loss_shares import mean_over

VAIN = 100
"""Models in a row that may be made of nothing, before the server gives up.

Of nothing: every update was refused.
"""

MOVES = (
    "its model moves a buffer that is no statistics of batch norm, to which no noise is added: make"
    " it a parameter, or one that stays"
)
"""Why an update is refused where clients have differential privacy."""


class Result(NamedTuple):
    """What a new model was made of.

    loss: mean over what was counted in the samples, None of nothing. refused: by `fold`, ticket to
    reason. wrong: the clients of these tickets, in their order. cut: values that were beyond
    the range of secure sums; None without any.
    """

    loss: float | None
    samples: int
    clients: list[int]
    staleness: list[int]
    refused: dict[int, str]
    wrong: list[int]
    cut: int | None = None


class Folded(NamedTuple):
    """What is remembered of an update that was folded."""

    client: int
    samples: int
    counted: float
    loss: float
    staleness: int


class Summed(NamedTuple):
    """The mean of some clients' updates, of which nobody knows the single ones.

    tickets: of these updates. examples: the sum of their n_k. cut: values that were beyond the
    range. clipped: with differential privacy of clients, the sum of what they have clipped, in
    place of the mean. The rest is as `GlobalModel.fold_mean` and `Result` have it.
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
class Combining:
    """What is combined now, and what came of it so far.

    sizes: how many examples each client has at most. most_counted: what the loss counts in one of
    them at most. vain: models in a row that were made of nothing. tickets: those that are combined
    now. fewest: clients whose updates have to be taken for a new model.
    """

    model: GlobalModel
    algorithm: Algorithm
    sizes: Sequence[int]
    seed: int
    most_counted: float = math.inf
    vain: int = 0
    tickets: list[int] = field(default_factory=list)
    fewest: int = 1
    _awaited: dict[int, Assignment] = field(default_factory=dict)
    _clients: dict[int, int] = field(default_factory=dict)
    _folded: list[Folded] = field(default_factory=list)
    _refused: dict[int, str] = field(default_factory=dict)
    _summed: list[Summed] = field(default_factory=list)
    _taken: set[int] = field(default_factory=set)
    """The clients whose updates are in the new model."""
    _kept: list[Update] = field(default_factory=list)
    """The updates that were folded, where the algorithm has a step of its own."""

    def begin(self, asked: Mapping[int, Assignment]) -> None:
        """Combines the updates of these tickets, in this order; forgets what was folded before."""
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
        """Takes the next update; `Coordinator.fold` says the rest."""
        asked = self._awaited.pop(update.ticket, None)
        if asked is None:
            raise ValueError(
                f"nobody waits for the update with ticket {update.ticket}, or it was folded already"
            )
        reason = update.failure if computed else self._unfit(update, asked, finite)
        if reason is None and self.model.private is not None and self.model.moves_more(update):
            reason = MOVES
        if reason is not None:
            self._refused[update.ticket] = reason
            self.model.refuse()
            return None
        # By what was asked, and not by what the update says of itself.
        staleness = self.model.number - asked.round
        scale, weight = self.algorithm.share(update, staleness)
        start = asked.weights if self.algorithm.mixes_models else None
        # Where its loss has counted nothing, a client has learned nothing; with noise of its own it
        # does not say what was counted.
        learned = weight > 0 or self.model.private is not None
        taken = self.model.fold(update, scale, weight, start) if learned else None
        if learned:
            self._taken.add(update.client)
        if learned and self.algorithm.has_own_step:
            self._kept.append(update)
        told = (update.client, update.samples, update.count, update.loss)
        self._folded.append(Folded(*told, staleness))
        return taken

    def fold_sum(self, summed: Summed) -> None:
        """Takes the mean of these tickets' updates in place of each by `fold`."""
        for ticket in summed.tickets:
            asked = self._awaited.pop(ticket)
            staleness = self.model.number - asked.round
            self._folded.append(Folded(asked.client, 0, 0.0, 0.0, staleness))
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
        """The update with this ticket is in no sum."""
        del self._awaited[ticket]
        self._refused[ticket] = reason
        self.model.refuse()

    def _unfit(self, update: Update, asked: Assignment, finite: bool) -> str | None:
        return unfit(
            update,
            asked,
            extra=self.algorithm.expects(asked),
            examples=self.sizes[asked.client],
            most_counted=self.most_counted,
            finite=finite,
        )

    def finish(self) -> Result:
        """Makes the new model; `Coordinator.finish` says the rest."""
        extra: list[Tensor] = []
        try:
            self._check_enough()
            extra = self.model.finish(self.seed, self._own_step())
        except TooFewUpdatesError as error:
            # The rule has refused all, also those that `fold` took. The number of the model rises
            # all the same, so that no round is drawn twice.
            self._refused = dict.fromkeys(self.tickets, str(error))
            self._folded = []
            self.model.skip()
        # How many came is not told where clients have differential privacy: extras then have the
        # denominator of the weights.
        private = self.model.private
        if private is not None:
            extra = list(map(_like, extra, self.algorithm.down()))
        self.algorithm.absorb(extra, len(self._folded) if private is None else private.expected)
        result = self._result()
        # A round for which nobody was drawn (Poisson sampling) is neither: nothing was refused.
        if self._folded:
            self.vain = 0
        elif self._refused:
            self.vain += 1
        self.begin({})
        return result

    def _check_enough(self) -> None:
        """Raises TooFewUpdatesError where fewer clients' updates were taken than a client asks for.

        A model of nobody is none of anybody's; in a sum that is too small, somebody is alone with
        too few.
        """
        smallest = min([len(self._taken), *(len(one.tickets) for one in self._summed)])
        if 0 < smallest < self.fewest:
            raise TooFewUpdatesError(
                f"{smallest} clients' updates could be combined, and a client of the run asks for "
                f"at least {self.fewest}"
            )

    def _own_step(self) -> OwnStep | None:
        if not self.algorithm.has_own_step:
            return None
        return partial(stepped, self.algorithm, self._kept)

    def complaint(self, result: Result) -> str:
        """A sentence for where every update was refused, as many times in a row as `vain` says."""
        reason = next(iter(result.refused.values()))
        return f"in {self.vain} rounds in a row every update was refused: {reason}"

    def _result(self) -> Result:
        # Of a sum of updates only the sums are known.
        told: list[Folded | Summed] = [*self._folded, *self._summed]
        loss = sum([one.counted * one.loss for one in told])
        return Result(
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
    """A released tensor, of real numbers in float64, as the algorithm's own is."""
    whole = torch.view_as_complex(tensor) if other.is_complex() else tensor
    return whole.to(other.dtype)

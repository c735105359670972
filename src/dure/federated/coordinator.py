"""The coordinator: the server of a federation as a state machine, without I/O, threads or clock.

It is told what happened and answers with what is to be done; whoever drives it (a simulation, a network) carries
the messages. `begin_round` names the clients of a round and what each is to receive; `receive` takes an update and,
with the last one, makes the new global model

    w <- w + server_lr · (sum over S_t of n_k·Δ_k) / (sum over S_t of n_k).

Updates are folded in order of client, never of arrival: one that comes early waits for those before it. So the
model depends on what clients sent and not on who was faster.

Buffers: floating-point buffers (batch-norm statistics) are averaged with the same weights as the parameters;
integer buffers (batch counters) take the largest value.

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dure.federated import sampling
from dure.federated.aggregate import mean
from dure.federated.messages import Assignment, Update


class RoundResult(NamedTuple):
    """What a finished round did: mean training loss, examples processed, and who took part."""

    loss: float
    samples: int
    clients: list[int]


@dataclass
class Coordinator:
    """The server's state. weights, buffers: the global model. round: rounds finished."""

    weights: list[Tensor]
    buffers: list[Tensor]
    clients: int
    fraction: float
    seed: int
    server_lr: float = 1.0
    round: int = 0
    _expected: list[int] = field(default_factory=list)
    _early: dict[int, Update] = field(default_factory=dict)
    _folded: mean.Folded | None = None
    _counters: list[Tensor] = field(default_factory=list)
    _loss_sum: float = 0.0
    _samples: int = 0
    _taken: list[int] = field(default_factory=list)

    def begin_round(self) -> list[Assignment]:
        """The assignments of the next round. They share the global tensors, which nobody may change."""
        chosen = sampling.uniform(self.seed, self.round, self.clients, self.fraction)
        self._expected, self._early, self._taken = chosen, {}, []
        self._folded = mean.zero([*self.weights, *self._floating()])
        self._counters = [buffer.clone() for buffer in self.buffers if not buffer.is_floating_point()]
        self._loss_sum, self._samples = 0.0, 0
        return [Assignment(self.round, client, self.weights, self.buffers) for client in chosen]

    def receive(self, update: Update) -> RoundResult | None:
        """Takes an update; with the last of the round makes the new model and returns what the round did.

        Raises ValueError for an update of another round, of a client not asked, or one that came twice.
        """
        if update.round != self.round:
            raise ValueError(f"client {update.client} sent an update of round {update.round} in round {self.round}")
        if update.client not in self._expected or update.client in self._early or update.client in self._taken:
            raise ValueError(f"client {update.client} was not asked for an update, or has sent it already")
        self._early[update.client] = update
        while len(self._taken) < len(self._expected):
            ready = self._early.pop(self._expected[len(self._taken)], None)
            if ready is None:
                return None
            self._fold(ready)
        return self._finish()

    def _floating(self) -> list[Tensor]:
        return [buffer for buffer in self.buffers if buffer.is_floating_point()]

    def _fold(self, update: Update) -> None:
        assert self._folded is not None
        floating = [buffer for buffer in update.buffers if buffer.is_floating_point()]
        counters = [buffer for buffer in update.buffers if not buffer.is_floating_point()]
        self._folded = mean.fold(self._folded, [*update.delta, *floating], float(update.examples))
        self._counters = [torch.maximum(a, b) for a, b in zip(self._counters, counters, strict=True)]
        self._loss_sum += update.loss * update.samples
        self._samples += update.samples
        self._taken.append(update.client)

    def _finish(self) -> RoundResult:
        assert self._folded is not None
        averages = mean.finish(self._folded)
        deltas, floating = averages[: len(self.weights)], averages[len(self.weights) :]
        self.weights = [w.add(d, alpha=self.server_lr) for w, d in zip(self.weights, deltas, strict=True)]
        self.buffers = merged(self.buffers, floating, self._counters)
        self.round += 1
        self._folded = None
        return RoundResult(self._loss_sum / self._samples, self._samples, self._taken)


def merged(buffers: Sequence[Tensor], floating: Sequence[Tensor], counters: Sequence[Tensor]) -> list[Tensor]:
    """New values in the order of `buffers`: of the floating-point ones, and of the others."""
    of_floating, of_counters = iter(floating), iter(counters)
    return [next(of_floating) if buffer.is_floating_point() else next(of_counters) for buffer in buffers]

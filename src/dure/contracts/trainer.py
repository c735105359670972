"""Trainers of other libraries that train a client in place of dure's own loop.

    round           load the weights -> run so many steps -> read the weights
    what dure sets  weights, examples of each step, terms of the algorithm, random seed
    what stays      loss, optimizer, schedule, callbacks, precision, accumulation: the trainer's own

`dure.trainers` has the trainers of transformers, TRL and Lightning. A trainer of your own needs the
members of `ClientTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class GradientTerms:
    """Terms that a federated algorithm adds to each gradient, by name of the parameter.

        g <- g + mu (w - anchor) + correction

    mu: coefficient of the proximal term; 0 without. anchor: its centre. correction: SCAFFOLD's;
    empty without.
    """

    mu: float
    anchor: Mapping[str, Tensor]
    correction: Mapping[str, Tensor]

    @torch.no_grad()
    def add_to(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Add the terms to the gradients of the parameters that train."""
        for name, parameter in parameters:
            if not parameter.requires_grad:
                continue
            # A parameter that took no part in the loss gets the terms anyway.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            if name in self.anchor:
                own = self.anchor[name].to(parameter.device)
                parameter.grad.add_(parameter.detach() - own, alpha=self.mu)
            if name in self.correction:
                parameter.grad.add_(self.correction[name].to(parameter.device))


@dataclass(frozen=True)
class TrainerRound:
    """Training of a client in a round.

    Args:
        number: the client's turn, from 0.
        batches: examples of each step, as indices of the trainer's data.
        per_epoch: steps of a pass over the data.
        first_step: position of the first step in its pass, from 0.
        terms: terms of the algorithm; None adds nothing.
        look: called before each step; an exception of it ends the training.
    """

    number: int
    batches: Sequence[Tensor]
    per_epoch: int
    first_step: int
    terms: GradientTerms | None = None
    look: Callable[[], None] | None = None

    @property
    def passes(self) -> int | None:
        """Number of whole passes over the data; None if the round has parts of a pass."""
        whole = self.first_step == 0 and len(self.batches) % self.per_epoch == 0
        return len(self.batches) // self.per_epoch if whole else None


@dataclass(frozen=True)
class TrainerResult:
    """Result of a round.

    Args:
        steps: steps of the optimizer, fewer than asked if a callback of the trainer ended them.
        samples: processed examples, with passes counted.
        loss: mean over `counted`.
        counted: weight that the loss counted, such as tokens; 0 without examples.
    """

    steps: int
    samples: int
    loss: float
    counted: float


class ClientTrainer(Protocol):
    """Trainer of one client, with its own model and data."""

    @property
    def name(self) -> str:
        """Name of the trainer, for messages."""

    @property
    def batch_size(self) -> int:
        """Examples of a step of the optimizer, over all accumulated batches and ranks."""

    @property
    def examples(self) -> int:
        """Number of training examples."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights and buffers into the model, by name."""

    def tensors(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Return copies of weights and buffers in the CPU's memory."""

    def cannot(self, round: TrainerRound) -> str | None:
        """Return why the trainer cannot train such a round; None if it can."""

    def run(self, round: TrainerRound) -> TrainerResult:
        """Train. Raises the errors of the trainer."""

    def close(self) -> None:
        """End the training, after the last round."""


class ClientTrainers(Protocol):
    """Trainers of the clients of this process."""

    def of(self, client: int) -> ClientTrainer:
        """Return the trainer of a client."""

    def local(self, client: int, examples: Tensor) -> Tensor:
        """Return indices of the task's training data as indices of the client's own data."""

    def close(self) -> None:
        """End all trainers."""

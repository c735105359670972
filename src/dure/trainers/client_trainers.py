"""The trainers of a process: one for a client on a network, one for each simulated client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dure.contracts.trainer import ClientTrainer


@dataclass(frozen=True)
class SingleTrainer:
    """The trainer of the only client of this process."""

    trainer: ClientTrainer

    def of(self, client: int) -> ClientTrainer:
        """Return the trainer."""
        return self.trainer

    def local(self, client: int, examples: Tensor) -> Tensor:
        """Return the indices: the task's data are the client's."""
        return examples

    def close(self) -> None:
        """End the training."""
        self.trainer.close()


@dataclass(frozen=True)
class SimulatedTrainers:
    """Trainers of simulated clients, whose data follow one another in the task's data.

    first: index of each client's first example.
    """

    trainers: Sequence[ClientTrainer]
    first: Sequence[int]

    def of(self, client: int) -> ClientTrainer:
        """Return the trainer of a client."""
        return self.trainers[client]

    def local(self, client: int, examples: Tensor) -> Tensor:
        """Return indices of the task's data as indices of the client's data."""
        return examples - self.first[client]

    def close(self) -> None:
        """End all training."""
        for trainer in self.trainers:
            trainer.close()

"""A trainer as a client of a federation: the patch.

    dure.client.patch(trainer, "https://…")
    trainer.train()             takes part until the federation ends

`train` then joins the federation as `dure.join` does, with the same identity, policy, journal and
privacy; the client's training is the trainer's own (`dure.contracts.trainer`). The model stays in
the trainer, with the weights of the client's last round. Under torchrun or accelerate launch all
ranks are one client (`dure.trainers.ranks`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from dure.contracts.trainer import ClientTrainer
from dure.run.join import join
from dure.trainers.client_trainers import SingleTrainer
from dure.trainers.integration import check_between_rounds
from dure.trainers.libraries import integration_of
from dure.trainers.ranks import RankedTrainer, follow, ranks

__all__ = ["patch"]

Trainer = TypeVar("Trainer")


def patch(
    trainer: Trainer,
    url: str,
    *,
    between_rounds: str = "reset",
    counts: str | None = None,
    on_progress: Callable[[str, Mapping[str, object]], None] | None = None,
    **identity: Any,
) -> Trainer:
    """Make a trainer a client of the federation at `url`, from its next `train` on.

    Args:
        trainer: a transformers.Trainer, a trainer of trl, or a lightning.Trainer, before training.
        url: address of the server.
        between_rounds: `reset`: optimizer, schedule, counters and logs begin anew in each round.
            `keep`: they go on, in one call of the trainer's `train`.
        counts: terms of the loss, as in `dure.OwnLoss`; None follows from the model.
        on_progress: as in `dure.join`; None warns of rounds that failed.
        identity: other arguments of `dure.join`, such as name, state, token and authority.

    Returns:
        The same trainer, whose `train` (`fit` of Lightning) returns the reason for the end of the
        run.

    Raises:
        ValueError: for another object, and for a trainer that cannot train a client. `train` raises
            the errors of `dure.join`.
    """
    found = integration_of(trainer, **({} if counts is None else {"counts": counts}))
    state = check_between_rounds(between_rounds)
    tell = on_progress or _warn

    def train(*given: Any, **named: Any) -> str:
        client = found.client(state, given, named)
        trained: ClientTrainer = client.trainer
        if ranks() > 1:
            if dist.get_rank():
                follow(client.trainer)
                return "rank 0 has left the federation"
            trained = RankedTrainer(client.trainer)
        task = dataclasses.replace(client.task, trainer=SingleTrainer(trained))
        try:
            return join(url, task, on_progress=tell, **identity)
        finally:
            trained.close()

    setattr(trainer, found.method, train)
    return trainer


def _warn(what: str, about: Mapping[str, object]) -> None:
    """Warn of a round whose training failed, which the client repeats."""
    if what == "failed":
        warnings.warn(f"training failed, and is tried again: {about.get('error')}", stacklevel=2)

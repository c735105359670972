"""Serve a federation to clients on other machines: `dure.train` in a `dure.Network` world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dure.contracts.stop import Stop
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.deploy.world import Network
from dure.record.run import Run
from dure.run.train import Progress, train


def _ignore(event: dict[str, Any]) -> None:
    pass


def serve(
    task: Task,
    strategy: Strategy,
    stop: Stop | None = None,
    *,
    out: str | Path,
    seed: int = 0,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    label: str | None = None,
    callbacks: Sequence[Any] = (),
    track: str | None = None,
    on_progress: Progress = _ignore,
    **network: Any,
) -> Run:
    """Serve a federation until `stop`; clients connect to this process and train.

    Args:
        task: model, loss and metrics. The server needs no training data (`Task(train=None)`), and
            tests the model if the task has test data.
        strategy: a federated strategy.
        stop: limits of the run, as in `dure.train`.
        out: run folder, which also contains the journal. After a restart or a kill
            `dure.resume(out)` continues the run with the same bits.
        seed: as in `dure.train`.
        evaluate_every: as in `dure.train`.
        checkpoint_every: as in `dure.train`.
        label: as in `dure.train`.
        callbacks: as in `dure.train`.
        track: as in `dure.train`.
        on_progress: receives the events of `dure.train`, and besides {"serving": url} once clients
            can connect, and {"waiting": text} until enough clients have joined.
        network: fields of `dure.Network`, such as host, port, certificate, access, start_with,
            deadline.

    Returns:
        The finished run.

    Raises:
        ValueError: if the address is in use; besides, every error of `dure.train`.
    """
    return train(
        task,
        strategy,
        Network(**network),
        stop,
        seed=seed,
        out=out,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        label=label,
        callbacks=callbacks,
        track=track,
        on_progress=on_progress,
    )

"""A federation served to clients elsewhere: `dure.train` in a world that is a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dure.contracts.stop import Stop
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.record.run import Run
from dure.run.train import Progress, train
from dure.worlds.network.world import Network


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
    """Serves a federation until `stop`: clients come to this process and train.

    task: what is learned. The server needs no training data (`Task(train=None)`), and tests the
    model where there are test data. strategy: a federated one. out: the run folder, in which the
    journal lies too; `dure.resume(out)` goes on with it after a restart or a kill, with the same
    bits. network: fields of `dure.Network`, such as host, port, certificate, access, start_with,
    deadline. seed, evaluate_every, checkpoint_every, label, callbacks, track: as in `dure.train`.
    on_progress hears besides {"serving": url} once
    clients may come, and {"waiting": text} until enough are there.

    Raises what `dure.train` raises, and ValueError where the address is taken.
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

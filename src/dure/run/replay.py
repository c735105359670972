"""A recorded federation, replayed: its models are made again, and compared with the run's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.errors import RunFolderError
from dure.record.run import RunFolder, trained_weights
from dure.run.begun import Asks
from dure.run.config import asked_in
from dure.run.train import found_again, prepare, run_job
from dure.wire.tensors import digest_of
from dure.worlds.network.replay import Replay


class Replayed(NamedTuple):
    """What came of a replay.

    rounds: models that were made. digest: SHA-256 of the last one, as a stream of safetensors.
    same: whether it has the bits of the run's model.safetensors; None where the run has not ended.
    """

    rounds: int
    digest: str
    same: bool | None


def replay(
    folder: str | Path, *, task: Task | str | None = None, strategy: Strategy | str | None = None
) -> Replayed:
    """Makes the models of a recorded run again (`dure serve --record`), and writes nothing.

    task, strategy: where these are a user's own, named or given as in `dure.resume`.

    Raises RunFolderError where the folder holds no run that was served and recorded.
    """
    path = Path(folder)
    config = RunFolder.open(path).read_json("config.json")
    asked = asked_in(path, config)
    if asked.world.get("name") != "network":
        raise RunFolderError(f"{path} was not served over a network: there is nothing to replay")
    if not asked.world.get("record"):
        raise RunFolderError(
            f"{path} was not recorded, so what it is made of is gone: serve with --record"
        )
    named = [strategy] if isinstance(strategy, str) else []
    task, strategy, _ = found_again(path, asked, Asks(path, config, named), task, strategy, None)
    world = Replay(path, asked.run)
    job, _ = prepare(
        task,
        strategy,
        world,
        asked.stop,
        asked.seed,
        evaluate_every=asked.evaluate_every,
        label=asked.label,
    )
    run = run_job(dataclasses.replace(job, config=config), world, lambda event: None)
    weights = dict(run.model.state_dict())
    return Replayed(len(run.history.steps), digest_of(weights), _same(path, weights))


def _same(path: Path, weights: Mapping[str, Tensor]) -> bool | None:
    """Whether the run's model has these bits."""
    file = path / "model.safetensors"
    if not file.exists():
        return None
    theirs = trained_weights(path, {})
    return theirs.keys() == weights.keys() and all(
        digest_of({name: theirs[name]}) == digest_of({name: tensor})
        for name, tensor in weights.items()
    )

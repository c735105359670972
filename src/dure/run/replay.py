"""A recorded federation, replayed: its models are made again, and compared with the run's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.errors import RunFolderError
from dure.record.checkpoint import stored
from dure.record.run import RunFolder, trained_weights
from dure.record.settings import LINEAGE, edited, settings, without_sums
from dure.run.begun import Asks
from dure.run.config import asked_in
from dure.run.lineage import verify
from dure.run.train import found_again, prepare, run_job
from dure.wire.tensors import digest_of
from dure.worlds.network.replay import Replay


class Replayed(NamedTuple):
    """What came of a replay.

    rounds: models that were made. digest: SHA-256 of the last one, as a stream of safetensors.
    same: whether all that could be compared has the run's bits; None where nothing could be.
    compared: models whose digests the run has written down. differ: those of them that are others.
    ended: whether the last one was compared with model.safetensors.
    """

    rounds: int
    digest: str
    same: bool | None
    compared: int = 0
    differ: tuple[int, ...] = ()
    ended: bool = False


def replay(
    folder: str | Path, *, task: Task | str | None = None, strategy: Strategy | str | None = None
) -> Replayed:
    """Makes the models of a recorded run again (`dure serve --record`), and writes nothing.

    Every model is compared with the digest that the run has written down (`models.jsonl`).

    task, strategy: where these are a user's own, named or given as in `dure.resume`.

    Raises RunFolderError where the folder holds no run that was served and recorded, or one whose
    files are not as they were written; LineageError where they are not as they were signed.
    """
    path = Path(folder)
    config = _config_of(path)
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
    last = _same(path, weights)
    made = world.models
    compared = len(made.compared)
    same = None if last is None and not compared else last is not False and not made.differ
    return Replayed(
        rounds=len(run.history.steps),
        digest=digest_of(weights),
        same=same,
        compared=compared,
        differ=tuple(made.differ),
        ended=last is not None,
    )


def _config_of(path: Path) -> dict[str, Any]:
    """What was asked: as it was signed, or where nothing is signed as it was written.

    Raises LineageError, RunFolderError.
    """
    folder = RunFolder.open(path)
    if (path / LINEAGE).exists():
        verify(path)
        return without_sums(folder.read_json("config.json"))
    config = folder.config(whole=True)
    checkpoint = stored(path / "checkpoint")
    if checkpoint is not None and checkpoint.seal is not None:
        differs = edited(checkpoint.seal.config, settings(config))
        if differs:
            raise RunFolderError(
                f"{path / 'config.json'} has changed since {checkpoint.path} was written ("
                f"{'; '.join(differs)}): put it back as it was"
            )
    return config


def _same(path: Path, weights: Mapping[str, Tensor]) -> bool | None:
    """Whether the run's model has these bits; None where the run has not ended."""
    folder = RunFolder(path)
    # One of an earlier part of a run that goes on is not its last.
    if not (path / "summary.json").exists() or not (path / "model.safetensors").exists():
        return None
    theirs = trained_weights(path, folder.read_json("summary.json"))
    return theirs.keys() == weights.keys() and all(
        digest_of({name: theirs[name]}) == digest_of({name: tensor})
        for name, tensor in weights.items()
    )

"""Replay a recorded federation: recompute its models and compare them with those of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.deploy.replay import Replay
from dure.errors import RunFolderError
from dure.record.checkpoint import stored
from dure.record.run import RunFolder, trained_weights
from dure.record.settings import LINEAGE, edited, settings, without_sums
from dure.run.config import run_request_in
from dure.run.lineage import verify
from dure.run.train import prepare, reload_run, run_job
from dure.run.trusted_code import ReferenceGuard
from dure.wire.tensors import digest_of


class ReplayResult(NamedTuple):
    """Result of a replay.

    Args:
        rounds: models that were recomputed.
        digest: SHA-256 of the last model, as a stream of safetensors.
        same: whether every comparison found the run's bits; None without a comparison.
        compared: models whose digests the run has recorded.
        differ: rounds whose models differ from the run's.
        ended: whether the last model was compared with model.safetensors.
    """

    rounds: int
    digest: str
    same: bool | None
    compared: int = 0
    differ: tuple[int, ...] = ()
    ended: bool = False


def replay(
    folder: str | Path, *, task: Task | str | None = None, strategy: Strategy | str | None = None
) -> ReplayResult:
    """Recompute the models of a recorded run (`dure serve --record`), and write nothing.

    Every model is compared with the digest that the run has recorded (`models.jsonl`). task,
    strategy: a user's own task or strategy, named or given as in `dure.resume`.

    Raises RunFolderError if the folder has no served and recorded run, or its files have changed;
    LineageError if the files differ from the signed ones.
    """
    path = Path(folder)
    config = _config_of(path)
    asked = run_request_in(path, config)
    if asked.world.get("name") != "network":
        raise RunFolderError(f"{path} was not served over a network: there is nothing to replay")
    if not asked.world.get("record"):
        raise RunFolderError(
            f"{path} was not recorded, so its updates are not available: serve with --record"
        )
    named = [strategy] if isinstance(strategy, str) else []
    task, strategy, _ = reload_run(
        path, asked, ReferenceGuard(path, config, named), task, strategy, None
    )
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
    return ReplayResult(
        rounds=len(run.history.steps),
        digest=digest_of(weights),
        same=same,
        compared=compared,
        differ=tuple(made.differ),
        ended=last is not None,
    )


def _config_of(path: Path) -> dict[str, Any]:
    """Return config.json as it was signed; without signatures, as it was written.

    Raises LineageError or RunFolderError if the files have changed.
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
                f"{path / 'config.json'} has changed since {checkpoint.path} was written "
                f"({'; '.join(differs)}): restore it"
            )
    return config


def _same(path: Path, weights: Mapping[str, Tensor]) -> bool | None:
    """Return whether the run's model has these bits; None if the run has not ended."""
    folder = RunFolder(path)
    # The model of an earlier part of an unfinished run is not its last model.
    if not (path / "summary.json").exists() or not (path / "model.safetensors").exists():
        return None
    theirs = trained_weights(path, folder.read_json("summary.json"))
    return theirs.keys() == weights.keys() and all(
        digest_of({name: theirs[name]}) == digest_of({name: tensor})
        for name, tensor in weights.items()
    )

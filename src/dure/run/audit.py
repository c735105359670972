"""Measure the information that the updates of a recorded simulation leak: `dure audit RUN`.

Reads RUN/updates, runs every attack (`dure.federated.attacks`) and writes

    RUN/audit.json      results of each attack, as `AttackResult`, and of a guess without updates
    RUN/audit/*.png     originals above their reconstructions

for the report. With canaries the run is trained once more, in memory, with canaries in place of
some clients (`dure.federated.attacks.canaries`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dure.contracts.fresh_model import seeded_model
from dure.contracts.stop import Stop
from dure.contracts.strategy import Strategy
from dure.contracts.task import Task
from dure.contracts.world import World
from dure.federated.attacks.canaries import Canaries, audited_epsilon
from dure.federated.attacks.examine import (
    AttackProgress,
    AttackResult,
    Examination,
    Examiner,
)
from dure.federated.attacks.recording import read_updates
from dure.federated.strategy import Federated
from dure.fleet.malicious import malicious_clients
from dure.record.disk import disk_errors, write_atomically
from dure.record.png import strip
from dure.record.run import RunFolder, trained_weights
from dure.report.json_values import listing, mapping, numbers
from dure.run.config import run_request_in
from dure.run.train import reload_run, train
from dure.run.trusted_code import ReferenceGuard
from dure.tensors.flat import FlatParameters
from dure.worlds.simulated import Simulated

FILE = "audit.json"
FOLDER = "audit"
VERSION = 1
DELTA = 1e-5
"""Default delta of the bound from canaries, if the run promises none."""


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """Result of an audit. rows: result of each attack. content: content of audit.json."""

    rows: Sequence[AttackResult]
    content: Mapping[str, Any]


def audit(
    folder: str | Path,
    examination: Examination | None = None,
    *,
    canaries: int = 0,
    delta: float | None = None,
    task: Task | str | None = None,
    strategy: Strategy | str | None = None,
    say: AttackProgress = lambda what, done, of: None,
) -> AuditResult:
    """Attack the updates that a simulation has stored (`Simulated(keep_updates=5)`).

    Args:
        folder: run folder.
        examination: choice of attacks; None takes the defaults.
        canaries: clients to replace by canaries in one more training; 0 trains nothing.
        delta: delta of the bound on epsilon; None takes that of the run's promise, or 1e-5.
        task: as in `dure.resume`, if the run was not started here.
        strategy: as in `dure.resume`, if the run was not started here.
        say: receives progress as (text, done, total).

    Raises:
        RunFolderError: for a folder without recorded updates.
        ValueError: for canaries that do not fit the run.
    """
    path = Path(folder)
    config = RunFolder.open(path).config()
    updates = read_updates(path)
    asked = run_request_in(path, config)
    named = [one for one in (strategy,) if isinstance(one, str)]
    ask = ReferenceGuard(path, config, named)
    task, strategy, world = reload_run(path, asked, ask, task, strategy, None)
    # Before the attacks, which take long.
    if canaries:
        check_canaries(task, strategy, world, canaries)
    examination = examination or Examination()
    examiner = Examiner(task, asked.seed, examination, _final(path), say)
    rows = examiner.rows(updates)
    content = {
        "version": VERSION,
        "run": asked.run,
        "seed": examination.seed,
        "updates": len(updates),
        "rounds": sorted({one.about.round for one in updates}),
        "sums_only": isinstance(strategy, Federated) and strategy.privacy.secure is not None,
        "guess": dict(examiner.guess()),
        "rows": _written(path, rows),
    }
    promised = _promised(path)
    if promised is not None:
        content["promised"] = promised
    if canaries:
        say("canaries: training again with canaries", 0, 1)
        if delta is None:
            delta = DELTA if promised is None else promised["delta"]
        content["canaries"] = canary_epsilon(
            task, strategy, world, asked.stop, canaries, asked.seed, delta
        )
    RunFolder(path).write_json(FILE, content)
    return AuditResult(rows, content)


def _promised(path: Path) -> dict[str, float] | None:
    """Return the promised client-level epsilon and delta; None without a promise."""
    if not (path / "summary.json").is_file():
        return None
    summary = RunFolder(path).read_json("summary.json")
    facts = mapping(next(iter(listing(summary.get("facts"))), None))
    told = numbers(mapping(facts.get("user_level")))
    if not {"epsilon", "delta"} <= told.keys():
        return None
    return {"epsilon": told["epsilon"], "delta": told["delta"]}


def _final(path: Path) -> Mapping[str, Tensor] | None:
    """Return the run's final model; None if the run has not ended."""
    file = path / "model.safetensors"
    if not file.is_file():
        return None
    there = (path / "summary.json").is_file()
    return trained_weights(path, RunFolder(path).read_json("summary.json") if there else {})


def _written(path: Path, rows: Sequence[AttackResult]) -> list[dict[str, Any]]:
    """Return the rows as JSON, and write their pictures; older pictures are deleted."""
    folder = path / FOLDER
    with disk_errors(folder):
        for old in folder.glob("*.png"):
            old.unlink()
    return [_row(path, number, row) for number, row in enumerate(rows)]


def _row(path: Path, number: int, row: AttackResult) -> dict[str, Any]:
    content: dict[str, Any] = {
        "attack": row.attack,
        "sum": row.sum,
        "change": row.change,
        "groups": row.groups,
        "examples": row.examples,
        "figures": {name: list(figure) for name, figure in row.figures.items()},
    }
    if row.why is not None:
        content["why"] = row.why
    if row.pictures is not None and _drawable(row.pictures.true):
        with disk_errors(path / FOLDER):
            (path / FOLDER).mkdir(exist_ok=True)
        name = f"{number:03}.png"
        true = row.pictures.true.double().numpy()
        found = row.pictures.found.double().numpy()
        picture = strip([true, found], float(true.min()), float(true.max()))
        write_atomically(path / FOLDER / name, picture)
        content["picture"] = name
    return content


def _drawable(pictures: Tensor) -> bool:
    return pictures.ndim == 4 and pictures.shape[1] in (1, 3)


def canary_epsilon(
    task: Task,
    strategy: Strategy,
    world: World,
    stop: Stop,
    count: int,
    seed: int = 0,
    delta: float = DELTA,
) -> dict[str, Any]:
    """Bound epsilon from below: train with canaries in place of `count` clients.

    Returns:
        A dict with the keys canaries, guessed, right, delta and epsilon_at_least (95 % confidence).

    Raises:
        ValueError: if the strategy, world or number of clients permits no canaries.
    """
    check_canaries(task, strategy, world, count)
    assert isinstance(world, Simulated)
    canaries = Canaries(seed=seed)
    there = dataclasses.replace(world, attack=canaries, attackers=float(count), keep_updates=0)
    before = FlatParameters(seeded_model(task, seed)).copy()
    # The evaluations are not used, so they are skipped.
    run = train(task, strategy, there, stop, seed=seed, evaluate_every=10**9)
    after = FlatParameters(run.model).copy()
    moved = [
        new.cpu().double() - old.cpu().double() for new, old in zip(after, before, strict=True)
    ]
    assert isinstance(strategy, Federated)
    clients = strategy.count(task)
    assert clients is not None
    places = malicious_clients(clients, there.attackers, seed)
    scores = {client: canaries.score(client, moved) for client in places}
    epsilon, guessed, right = audited_epsilon(canaries, scores, delta)
    return {
        "canaries": len(scores),
        "guessed": guessed,
        "right": right,
        "delta": delta,
        "epsilon_at_least": epsilon,
    }


def check_canaries(task: Task, strategy: Strategy, world: World, count: int) -> None:
    """Raise ValueError if canaries cannot replace so many clients."""
    if not isinstance(strategy, Federated) or not isinstance(world, Simulated):
        raise ValueError("canaries replace simulated clients, and this run has none")
    clients = strategy.count(task)
    if clients is None or not 2 <= count <= clients:
        raise ValueError(
            f"canaries is {count}, but a run of {clients} clients can have 2 to {clients}"
        )
    if world.attackers:
        raise ValueError(
            "the run has malicious clients, which canaries would replace: audit a run without "
            "malicious clients"
        )

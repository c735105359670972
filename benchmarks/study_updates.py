"""What updates give away: inputs, labels and members, by batch size, sums, noise and compression.

Clients make one step of a batch of 1, 8 or 100 examples; a server, or whoever reads it, attacks
single updates and sums of 8: labels from the last layer, inputs in closed form and by gradient
inversion, members by their loss. Then the same updates under noise and compression. After training,
the same attacks again: models that know their examples tell less of them. Last, canaries: what can
be guessed of who took part, beside the accountant's epsilon.

    python benchmarks/study_updates.py --data DIR > benchmarks/results/study_updates.json
    python benchmarks/study_updates.py --quick

DIR has the folder mnist; without it there are digits alone. It takes about half an hour on one
core; --quick a minute, with figures that say little. Progress goes to standard error, the result as
JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dure
from dure.collectives.compression import parse
from dure.federated.privacy.attacks.changes import Change
from dure.federated.privacy.attacks.examine import Examination, Examiner, Row
from dure.federated.privacy.attacks.recording import Recorded, read_updates
from dure.run.audit import canary_epsilon

JSON = dict[str, Any]

SEED = 0
CLIENTS = 16
EACH = 100
"""Examples of a client."""
BATCHES = (1, 8, 100)
SUMS = (1, 8)
CHANGES = (
    Change(),
    Change(noise=0.1),
    Change(noise=1.0),
    Change(compression=parse("int8")),
    Change(compression=parse("top-k:0.1")),
    Change(compression=parse("sign")),
)
LATER = 20
"""Rounds of training before the attacks on a trained model."""
NOISES = (0.0, 0.5, 1.0, 2.0)
CANARIES = 150


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def first(task: dure.Task, examples: int, test: int = 1000) -> dure.Task:
    """The task with the first examples of its data."""
    assert task.test is not None
    train = (task.train.inputs[:examples], task.train.targets[:examples])
    others = (task.test.inputs[:test], task.test.targets[:test])
    return dure.Task(task.model, task.loss, train, others, task.optimizer, name=task.name)


def tasks(data: Path | None) -> Iterator[tuple[str, dure.Task, int]]:
    """Name, task, and iterations of an inversion."""
    yield "digits, 2NN", first(dure.load_task("digits"), 1437), 400
    if data is not None:
        examples = CLIENTS * EACH
        yield (
            "MNIST, 2NN",
            first(dure.load_task("mnist", data=data / "mnist", model="2nn"), examples),
            400,
        )
        yield (
            "MNIST, CNN",
            first(dure.load_task("mnist", data=data / "mnist", model="cnn"), examples),
            300,
        )


def recorded(task: dure.Task, batch: int, rounds: int) -> list[Recorded]:
    """Updates of one step of a batch from each client; those of the last of so many rounds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        # Digits has fewer examples than 16 x 100: as many of each as there are.
        strategy = dure.FedAvg(clients=CLIENTS, local_steps=1, batch_size=batch)
        world = dure.Simulated(keep_updates=rounds, engine="loop")
        dure.train(task, strategy, world, dure.Stop(rounds=rounds), seed=SEED, out=out)
        updates = read_updates(out)
    return [one for one in updates if one.about.round == rounds - 1]


def attacked(
    name: str, task: dure.Task, updates: Sequence[Recorded], wanted: Examination
) -> list[JSON]:
    def say(what: str, done: int, of: int) -> None:
        show(f"{name}: {what}: {done} of {of}")

    examiner = Examiner(task, SEED, wanted, say=say)
    return [written(row) for row in examiner.rows(updates)]


def written(row: Row) -> JSON:
    return {
        "attack": row.attack,
        "sum": row.sum,
        "change": row.change,
        "groups": row.groups,
        "examples": row.examples,
        "why": row.why,
        "figures": {key: [round(x, 4) for x in value] for key, value in row.figures.items()},
    }


def study(name: str, task: dure.Task, iterations: int, quick: bool) -> JSON:
    """All batch sizes of a task."""
    found: JSON = {"guess": dict(Examiner(task, SEED, Examination()).guess()), "batches": {}}
    for batch in BATCHES:
        # Large batches take long, and give hardly more figures.
        groups = 1 if quick or batch == 100 else 4
        show(f"{name}, batch {batch}")
        wanted = Examination(
            sums=SUMS,
            changes=CHANGES[:2] if quick else CHANGES if batch < 100 else CHANGES[:3],
            groups=groups,
            iterations=20 if quick else iterations,
            seed=SEED,
        )
        cells = {"first round": attacked(name, task, recorded(task, batch, 1), wanted)}
        if not quick and "CNN" not in name and batch < 100:
            trained = Examination(sums=(1,), groups=groups, iterations=iterations, seed=SEED)
            rounds = LATER + 1
            updates = recorded(task, batch, rounds)
            cells[f"after {LATER} rounds"] = attacked(name, task, updates, trained)
        found["batches"][str(batch)] = cells
    return found


def canaries(quick: bool) -> list[JSON]:
    """The bound that canaries give, beside what the accountant promises."""
    task = dure.load_task("digits")
    rounds = 2 if quick else 10
    found = []
    for noise in NOISES[:2] if quick else NOISES:
        show(f"canaries, noise {noise}")
        strategy = dure.FedAvg(
            clients=200, fraction=0.5, selection="coins", privacy=f"user-level:1:{noise}"
        )
        stop = dure.Stop(rounds=rounds)
        said = canary_epsilon(task, strategy, dure.Simulated(), stop, CANARIES, SEED)
        run = dure.train(task, strategy, dure.Simulated(), stop, seed=SEED)
        found.append(
            {
                "noise": noise,
                "rounds": rounds,
                "accountant": run.summary["numbers"]["epsilon"],
                "test_accuracy": run.summary["test_accuracy"],
                **said,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder that has mnist")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    asked = parser.parse_args()
    result: JSON = {"seed": SEED, "clients": CLIENTS, "tasks": {}}
    for name, task, iterations in tasks(None if asked.quick else asked.data):
        result["tasks"][name] = study(name, task, iterations, asked.quick)
    result["canaries"] = canaries(asked.quick)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

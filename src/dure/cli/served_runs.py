"""`dure replay`, `dure backup` and `dure personalise`: commands for served runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dure.cli.flags import given_options, names_before_flags, options_of_task, parse_flags
from dure.cli.running import check_names

if TYPE_CHECKING:
    from dure.run.replay import ReplayResult


@dataclass(frozen=True)
class ReplayOptions:
    """User code that the run names.

    Args:
        task: the task, path/to/file.py:name, if the run was not started here.
        strategy: the class of the strategy, path/to/file.py:Name, likewise.
    """

    task: str | None = None
    strategy: str | None = None


@dataclass(frozen=True)
class PersonaliseOptions:
    """Options of personalisation.

    Args:
        epochs: passes over the data.
        batch_size: examples of a step.
        seed: seed of the order of examples.
    """

    epochs: int = 1
    batch_size: int = 10
    seed: int = 0


def replay(given: list[str]) -> int:
    """Run `dure replay RUN`; exit status 1 if recomputed models differ from the run's."""
    names, flags = names_before_flags(given)
    if len(names) != 1:
        raise ValueError("dure replay RUN: name the folder of a run that was served with --record")
    about = "Recompute the models of a recorded run, and compare them."
    how: ReplayOptions = parse_flags("dure replay RUN", {"how": ReplayOptions}, flags, about)["how"]
    from dure.run.replay import replay as replayed

    found = replayed(names[0], task=how.task, strategy=how.strategy)
    print(f"{found.rounds} models, the last one is {found.digest}")
    if not found.compared:
        print("the run has no models.jsonl: only the last model can be compared", file=sys.stderr)
    if not found.ended:
        print("the run has not ended: there is no model.safetensors to compare", file=sys.stderr)
    if found.same is None:
        return 0
    if found.compared:
        print(f"{found.compared} models compared with the digests in models.jsonl")
    print(
        "identical to the run's models, bit for bit"
        if found.same
        else f"NOT identical to the run's models{_where(found)}"
    )
    return 0 if found.same else 1


def _where(found: ReplayResult) -> str:
    return f", from model {found.differ[0]}" if found.differ else ": the last model differs"


def backup(given: list[str]) -> int:
    """Run `dure backup RUN TO`."""
    if given in (["--help"], ["-h"]):
        print("dure backup RUN TO: copy the folder of a run, even while it is served")
        return 0
    if len(given) != 2 or any(one.startswith("-") for one in given):
        raise ValueError("dure backup RUN TO: name a run folder and a new folder for the copy")
    from dure.run.backup import backup as copied

    print(copied(given[0], given[1]))
    return 0


def personalise(given: list[str]) -> int:
    """Run `dure personalise DIR TASK`."""
    names, flags = names_before_flags(given)
    if len(names) != 2:
        raise ValueError("dure personalise DIR TASK: name the folder of a client and a task")
    folder, reference = names
    check_names(reference, [])
    parts = {"task": options_of_task(reference), "how": PersonaliseOptions}
    about = "Train the newest global model further on the client's own data, offline."
    asked = parse_flags(f"dure personalise DIR {reference}", parts, flags, about)
    how: PersonaliseOptions = asked["how"]
    from dure.run.personalise import personalise as trained
    from dure.tasks.builtin import load_task

    task = load_task(reference, **given_options(asked["task"]))
    found = trained(Path(folder), task, epochs=how.epochs, batch_size=how.batch_size, seed=how.seed)
    print(
        f"the personal model, trained from the global model of round {found.round}, is in {folder}"
    )
    for name, before in found.before.items():
        print(f"{name}: {before:.4f} before, {found.after[name]:.4f} after")
    return 0

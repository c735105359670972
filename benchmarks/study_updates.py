"""What updates give away: inputs, labels and members, by batch size, sums, noise and compression.

Clients make one step of a batch of 1, 8 or 100 examples; a server, or whoever reads it, attacks
single updates and sums of 8: labels from the last layer, inputs in closed form and by gradient
inversion, members by their loss. Then the same updates under noise and compression. After training,
the same attacks again: models that know their examples tell less of them. Last, canaries: what can
be guessed of who took part, beside the accountant's epsilon.

    python benchmarks/study_updates.py --data DIR --result benchmarks/results/study_updates.json
    python benchmarks/study_updates.py --data DIR --pictures docs/images
    python benchmarks/study_updates.py --from benchmarks/results/study_updates.json \\
        --page docs/what-an-update-gives-away.md

DIR has the folder mnist; without it there are digits alone. It takes half an hour on one core;
--quick half a minute, with figures that say little. Progress goes to standard error, the result as
JSON to standard output. --pictures draws originals above what was rebuilt of them; --page puts the
tables of a result into the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result

import dure
from dure.collectives.compression import parse
from dure.federated.attacks.changes import UpdateChange
from dure.federated.attacks.examine import AttackResult, Examination, Examiner
from dure.federated.attacks.recording import RecordedUpdate, read_updates
from dure.record.png import strip
from dure.run.audit import canary_epsilon

JSON = dict[str, Any]

SEED = 0
CLIENTS = 16
EACH = 100
"""Examples of a client."""
BATCHES = (1, 8, 100)
SUMS = (1, 8)
CHANGES = (
    UpdateChange(),
    UpdateChange(noise=0.1),
    UpdateChange(noise=1.0),
    UpdateChange(compression=parse("int8")),
    UpdateChange(compression=parse("top-k:0.1")),
    UpdateChange(compression=parse("sign")),
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


FULL = Examination(sums=SUMS, changes=CHANGES, groups=4, iterations=400, seed=SEED)
LESS = replace(
    FULL,
    changes=CHANGES[:2],
    iterations=200,
    most=40,
    attacks=("labels", "first-layer", "geiping", "membership"),
)
"""Of convolutions, whose gradients of gradients take long: no DLG, and no large sums."""
QUICK = replace(FULL, changes=CHANGES[:2], groups=1, iterations=20)


def tasks(data: Path | None) -> Iterator[tuple[str, dure.Task, Examination]]:
    """Name, task, and how it is attacked."""
    yield "digits, 2NN", first(dure.load_task("digits"), 1437), FULL
    if data is not None:
        for name, model, wanted in (("MNIST, 2NN", "2nn", FULL), ("MNIST, CNN", "cnn", LESS)):
            task = dure.load_task("mnist", data=data / "mnist", model=model)
            yield name, first(task, CLIENTS * EACH), wanted


def recorded(task: dure.Task, batch: int, rounds: int) -> list[RecordedUpdate]:
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
    name: str, task: dure.Task, updates: Sequence[RecordedUpdate], wanted: Examination
) -> list[JSON]:
    def say(what: str, done: int, of: int) -> None:
        show(f"{name}: {what}: {done} of {of}")

    examiner = Examiner(task, SEED, wanted, say=say)
    return [written(row) for row in examiner.rows(updates)]


def written(row: AttackResult) -> JSON:
    return {
        "attack": row.attack,
        "sum": row.sum,
        "change": row.change,
        "groups": row.groups,
        "examples": row.examples,
        "why": row.why,
        "figures": {key: [round(x, 4) for x in value] for key, value in row.figures.items()},
    }


def as_sent(wanted: Examination) -> Examination:
    return replace(wanted, changes=wanted.changes[:1])


def as_changed(wanted: Examination) -> Examination:
    """Without DLG, which takes longest, and finds nothing under noise."""
    attacks = [one for one in wanted.attacks if one != "dlg"]
    return replace(wanted, changes=wanted.changes[1:], attacks=attacks)


def study(name: str, task: dure.Task, full: Examination) -> JSON:
    """All batch sizes of a task."""
    found: JSON = {"guess": dict(Examiner(task, SEED, full).guess()), "batches": {}}
    for batch in BATCHES:
        show(f"{name}, batch {batch}")
        # Large batches take long, and have more figures each.
        wanted = full if batch < 100 else replace(full, groups=1, changes=full.changes[:3])
        updates = recorded(task, batch, 1)
        cells = {"first round": attacked(name, task, updates, as_sent(wanted))}
        cells["first round"] += attacked(name, task, updates, as_changed(wanted))
        if full == FULL and batch < 100:
            trained = replace(as_sent(wanted), sums=(1,))
            updates = recorded(task, batch, LATER + 1)
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


def pictures(data: Path, folder: Path) -> None:
    """MNIST: single examples, batches of 8, sums of 8 such batches, and noise."""
    task = first(dure.load_task("mnist", data=data / "mnist", model="2nn"), CLIENTS * EACH)
    for batch, size, change in (
        (1, 1, CHANGES[0]),
        (8, 1, CHANGES[0]),
        (8, 8, CHANGES[0]),
        (1, 1, CHANGES[1]),
    ):
        wanted = Examination(
            sums=(size,), changes=(change,), groups=1 if batch > 1 else 8, attacks=("geiping",)
        )
        examiner = Examiner(task, SEED, wanted)
        updates = recorded(task, batch, 1)
        # Eight pictures in each strip: of single examples those of eight updates.
        some = [updates] if batch > 1 else [[one] for one in updates[:8]]
        shown = [examiner.rows(each)[0].pictures for each in some]
        true = torch.cat([one.true for one in shown if one is not None])[:8]
        found = torch.cat([one.found for one in shown if one is not None])[:8]
        name = f"update-{batch}-{size}{'-noise' if change.noise else ''}.png"
        content = strip(
            [true.double().numpy(), found.double().numpy()], float(true.min()), float(true.max())
        )
        (folder / name).write_bytes(content)
        show(f"{folder / name}")


SHOWN = {"first-layer": "closed form", "dlg": "DLG", "geiping": "Geiping"}


def tables(result: JSON) -> dict[str, list[str]]:
    """The tables of the page, by their names there."""
    return {
        "inputs": list(inputs_table(result)),
        "changes": list(changes_table(result)),
        "members": list(members_table(result)),
        "canaries": list(canaries_table(result)),
    }


def cell(rows: Sequence[JSON], attack: str, size: int, change: str, figure: str) -> str:
    """A figure with its interval; a dash where the attack was not made."""
    for row in rows:
        if (row["attack"], row["sum"], row["change"]) == (attack, size, change):
            if figure not in row["figures"]:
                return "–"
            value, low, high = row["figures"][figure]
            scale = 100 if figure == "labels_right" else 1
            digits = 2 if figure in ("ssim", "auc") or figure.startswith("tpr") else 0
            unit = " %" if figure == "labels_right" else ""
            if low == high:
                return f"{scale * value:.{digits}f}{unit}"
            ends = f"{scale * low:.{digits}f} to {scale * high:.{digits}f}"
            return f"{scale * value:.{digits}f}{unit} ({ends})"
    return "–"


def inputs_table(result: JSON) -> Iterator[str]:
    """Labels, and the PSNR of each attack, as updates are sent."""
    heads = ["labels right", *(f"{words}, PSNR" for words in SHOWN.values()), "Geiping, SSIM"]
    yield f"| | batch | updates in a sum | {' | '.join(heads)} |"
    yield "| --- | --: | --: | --: | --: | --: | --: | --: |"
    for name, found in result["tasks"].items():
        for batch, cells in found["batches"].items():
            for when, rows in cells.items():
                for size in SUMS if when == "first round" else SUMS[:1]:
                    label = name if when == "first round" else f"{name}, {when}"
                    got = [cell(rows, "labels", size, "as sent", "labels_right")]
                    got += [cell(rows, attack, size, "as sent", "psnr") for attack in SHOWN]
                    got += [cell(rows, "geiping", size, "as sent", "ssim")]
                    yield f"| {label} | {batch} | {size} | {' | '.join(got)} |"


def changes_table(result: JSON) -> Iterator[str]:
    """The same under noise and compression, for batches of 8."""
    heads = "updates in a sum | update | labels right | closed form, PSNR | Geiping, PSNR | SSIM"
    yield f"| | {heads} |"
    yield "| --- | --: | --- | --: | --: | --: | --: |"
    for name, found in result["tasks"].items():
        rows = found["batches"]["8"]["first round"]
        for size in SUMS:
            for change in dict.fromkeys(row["change"] for row in rows):
                got = [
                    cell(rows, "labels", size, change, "labels_right"),
                    cell(rows, "first-layer", size, change, "psnr"),
                    cell(rows, "geiping", size, change, "psnr"),
                    cell(rows, "geiping", size, change, "ssim"),
                ]
                yield f"| {name} | {size} | {change} | {' | '.join(got)} |"


def members_table(result: JSON) -> Iterator[str]:
    """AUC against clients' models, by batch size."""
    yield "| | batch | AUC, model of 1 update | of a sum of 8 | noise 1, 1 update |"
    yield "| --- | --: | --: | --: | --: |"
    for name, found in result["tasks"].items():
        for batch, cells in found["batches"].items():
            rows = cells["first round"]
            got = [
                cell(rows, "membership", 1, "as sent", "auc"),
                cell(rows, "membership", 8, "as sent", "auc"),
                cell(rows, "membership", 1, "noise 1", "auc"),
            ]
            yield f"| {name} | {batch} | {' | '.join(got)} |"


def canaries_table(result: JSON) -> Iterator[str]:
    yield "| noise z | accountant: at most | canaries: at least | guesses right | test accuracy |"
    yield "| --: | --: | --: | --: | --: |"
    for row in result["canaries"]:
        most = "–" if row["accountant"] is None else f"{row['accountant']:.1f}"
        yield (
            f"| {row['noise']:g} | {most} | {row['epsilon_at_least']:.2f} | {row['right']} of "
            f"{row['guessed']} | {100 * row['test_accuracy']:.0f} % |"
        )


def write_page(result: JSON, page: Path) -> None:
    """Puts the tables between their marks."""
    text = page.read_text()
    for name, lines in tables(result).items():
        begin = f"<!-- {name} -->"
        end = f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}"
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder that has mnist")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--pictures", type=Path, help="draw pictures into this folder, and end")
    parser.add_argument("--from", type=Path, dest="there", help="a result that is there")
    parser.add_argument("--page", type=Path, help="put the tables of that result into this page")
    takes_result(parser)
    asked = parser.parse_args()
    if asked.there is not None:
        write_page(json.loads(asked.there.read_text()), asked.page)
        return
    if asked.pictures is not None:
        pictures(asked.data, asked.pictures)
        return
    result: JSON = {"seed": SEED, "clients": CLIENTS, "tasks": {}}
    for name, task, full in tasks(None if asked.quick else asked.data):
        result["tasks"][name] = study(name, task, QUICK if asked.quick else full)
    result["canaries"] = canaries(asked.quick)
    give(result, asked.result, indent=1)


if __name__ == "__main__":
    main()

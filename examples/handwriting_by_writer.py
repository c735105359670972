"""Handwriting: fetch a model that others have trained, and train it further on one's own writing.

The bundled digits do not say who wrote them: each writer's hand here is a fixed slant and size.
First simulated, with the writer as the natural key; then served to four writers, threads here."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch.nn import functional as F

import dure

digits = dure.load_task("digits", lr=0.3)
SLANTS = {"Ada": 0.0, "Ben": 0.5, "Cem": -0.5, "Dia": 1.2}


def written(examples: dure.Examples, *writers: str) -> dure.Examples:
    """Every fourth digit for each writer, in the writer's hand."""
    pages, labels, keys = [], [], []
    for writer in writers:
        own, slant = slice(list(SLANTS).index(writer), None, 4), SLANTS[writer]
        plain = examples.inputs[own]
        hand = torch.tensor([[1.0, slant, 0], [0, 1 + abs(slant) / 2, 0]]).repeat(len(plain), 1, 1)
        grid = F.affine_grid(hand, plain.shape, align_corners=False)
        pages.append(F.grid_sample(plain, grid, align_corners=False))
        labels.append(examples.targets[own])
        keys += [writer] * len(plain)
    return dure.Examples(torch.cat(pages), torch.cat(labels), keys)


def task(*writers: str) -> dure.Task:
    data = {part: written(getattr(digits, part), *writers) for part in ("train", "test")}
    return replace(digits, **data)


strategy = dure.FedAvg(clients=4, local_epochs=2, partition=dure.NaturalKey())
run = dure.train(task(*SLANTS), strategy, stop=dure.Stop(rounds=4))
print(f"simulated: accuracy {run.summary['test_accuracy']:.2f}")
with tempfile.TemporaryDirectory() as folder:
    with ThreadPoolExecutor() as desks:

        def started(event: dict) -> None:
            for writer in SLANTS if "serving" in event else ():
                url, state = event["serving"], f"{folder}/{writer}"
                desks.submit(dure.join, url, task(writer), name=writer, state=state)

        where = {"out": f"{folder}/run", "port": 0, "access": "open", "on_progress": started}
        dure.serve(replace(digits, train=None, test=None), strategy, dure.Stop(rounds=4), **where)
    for writer in SLANTS:
        found = dure.personalise(f"{folder}/{writer}", task(writer), epochs=5)
        before, after = found.before["test_accuracy"], found.after["test_accuracy"]
        print(f"{writer}: {before:.2f} with the model of all, {after:.2f} with their own")

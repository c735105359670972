"""Steps of a single worker against a hand-written loop, on one device: ResNet-20 and a GPT in bf16.

Both train the same model on the same batches. The loop by hand is the shortest that does so: its
batches come from pinned memory of the CPU, and it reads the loss of every step, as dure does. With
`compile` both compile the model by torch.compile. Seconds are those of a step, after the first
ones; contenders take turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import dure
from dure.contracts.fresh_model import seeded_model
from dure.randomness.seeds import shuffled
from dure.tasks.models import ResNet, Transformer

JSON = dict[str, Any]


class Setup(NamedTuple):
    """What is trained. compiled: whether a second pair of contenders compiles the model."""

    name: str
    task: dure.Task
    batch: int
    compiled: bool


def setups(small: bool) -> list[Setup]:
    """ResNet-20 and GPT-2 of 124 M parameters, or small ones of the same kinds."""
    generator = torch.Generator().manual_seed(0)
    count, size = (32, 8) if small else (1280, 128)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    resnet_task = dure.Task(
        partial(ResNet, depth=8 if small else 20),
        F.cross_entropy,
        (images, labels),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )
    vocabulary, length, width, layers, heads, texts, of_step = (
        (64, 16, 32, 2, 2, 16, 4) if small else (50304, 1024, 768, 12, 12, 64, 8)
    )
    tokens = torch.randint(0, vocabulary, (texts, length + 1), generator=generator)
    gpt_task = dure.Task(
        partial(Transformer, vocabulary, length, layers, heads, width, tied=True),
        F.cross_entropy,
        (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        precision="bf16",
    )
    return [
        Setup("ResNet-20, batch 128", resnet_task, size, not small),
        Setup("GPT, 124 M parameters, 8 x 1024 tokens, bf16", gpt_task, of_step, not small),
    ]


def by_hand(setup: Setup, device: torch.device, epochs: int, compiles: bool) -> float:
    """Seconds of a step of the hand-written loop: the median of the epochs after the first."""
    task = setup.task
    model = seeded_model(task, 0).to(device).train()
    forward = torch.compile(model) if compiles else model
    optimizer = task.optimizer(model.parameters())
    inputs, targets = task.train.inputs, task.train.targets
    reduced = torch.bfloat16 if task.precision == "bf16" else None
    seconds = []
    for epoch in range(epochs):
        started = time.perf_counter()
        batches = shuffled(len(inputs), 0, epoch).split(setup.batch)
        for indices in batches:
            given = inputs[indices].to(device, non_blocking=True)
            wanted = targets[indices].to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, reduced, enabled=reduced is not None):
                loss = task.loss(forward(given), wanted)
            loss.backward()
            optimizer.step()
            loss.item()
        seconds.append((time.perf_counter() - started) / len(batches))
    return statistics.median(seconds[1:])


def by_dure(setup: Setup, device: torch.device, epochs: int, compiles: bool) -> float:
    """Seconds of a step of `dure.SingleWorker`: the median of the epochs after the first."""
    task = dataclasses.replace(setup.task, compile="inductor") if compiles else setup.task
    steps = -(-len(task.train) // setup.batch)
    run = dure.train(
        task,
        dure.SingleWorker(setup.batch, device=str(device)),
        stop=dure.Stop(epochs=epochs),
        evaluate_every=10**9,
    )
    ends = [0.0, *(step.seconds for step in run.history.steps)][::steps]
    seconds = [(end - begin) / steps for begin, end in itertools.pairwise(ends)]
    return statistics.median(seconds[1:])


def step_rows(device: torch.device, rounds: int, small: bool) -> list[JSON]:
    """A row for each model, and one more for each that is compiled."""
    ways: dict[str, Callable[..., float]] = {"by hand": by_hand, "dure": by_dure}
    rows = []
    for setup in setups(small):
        for compiles in (False, True) if setup.compiled else (False,):
            samples: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(rounds):
                names = list(ways) if number % 2 else list(reversed(ways))
                for name in names:
                    samples[name].append(ways[name](setup, device, 4, compiles))
            ratios = [
                mine / other
                for mine, other in zip(samples["dure"], samples["by hand"], strict=True)
            ]
            rows.append(
                {
                    "model": setup.name + (", compiled" if compiles else ""),
                    "seconds": {name: statistics.median(one) for name, one in samples.items()},
                    "dure over by hand": statistics.median(ratios),
                }
            )
    return rows

"""A model whose step needs more memory than a process of its own may have: run as a script.

    python wide.py SYSTEM GROUP RESULT

GROUP is a limit of `limited`, which every process enters before it makes the model; "-" is none.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from limited import enter
from torch import nn
from torch.nn.functional import mse_loss

import dure
from dure.parallel.mesh.mesh import Mesh

WIDTH = 1024
LAYERS = 12
WEIGHTS = LAYERS * WIDTH * (WIDTH + 1) * 8
"""Bytes of the parameters."""
STEP = 4 * WEIGHTS
"""Bytes of an undivided step with AdamW: weights, gradients, two moments."""

PLAN = "; ".join(f"{2 * n}={'Row' if n % 2 else 'Column'}()" for n in range(LAYERS))

SYSTEMS = {
    "single": (dure.SingleWorker(batch_size=8), 1),
    "tensor": (dure.TensorParallel(batch_size=8, plan=PLAN), 2),
    "pipeline": (dure.Pipeline(batch_size=8, microbatches=2), 2),
    "zero": (dure.ZeRO(stage=3, batch_size=8), 2),
    "mesh": (dure.Parallel(mesh=Mesh(data=2), zero=3, batch_size=8, microbatches=1), 2),
}


class Wide:
    """The factory of the model, which enters the limit first."""

    def __init__(self, group: str) -> None:
        self.group = group

    def __call__(self) -> nn.Module:
        if self.group != "-":
            enter(Path(self.group))
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()]
        return nn.Sequential(*layers)


def task(group: str) -> dure.Task:
    draws = torch.Generator().manual_seed(0)
    data = torch.randn(16, WIDTH, generator=draws, dtype=torch.float64)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return dure.Task(Wide(group), mse_loss, train=(data, data.flip(1)), optimizer=optimizer)


def main(system: str, group: str, result: str) -> None:
    strategy, ranks = SYSTEMS[system]
    stop = dure.Stop(steps=3)
    run = dure.train(task(group), strategy, dure.Processes(ranks), stop)
    # A few numbers of each, so that the models need not be in memory together.
    torch.save(
        {name: one.flatten()[::997].clone() for name, one in run.model.state_dict().items()},
        f"{result}.pt",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""ZeRO on two processes: what each stage divides, what it sends for that, and that the model stays
the same."""

from dataclasses import replace
from functools import partial

import torch

import dure

task = replace(dure.load_task("digits"), optimizer=partial(torch.optim.Adam, lr=1e-3))

for strategy in (dure.DataParallel(), dure.ZeRO(stage=1), dure.ZeRO(stage=2), dure.ZeRO(stage=3)):
    run = dure.train(task, strategy, dure.Processes(2), dure.Stop(epochs=2))
    sent = run.summary["bytes_sent_per_worker"] / run.summary["steps"] / 1e3
    print(
        f"{run.label:<28} test loss {run.summary['test_loss']:.6f}, {sent:3.0f} kB sent by a "
        f"worker in a step"
    )

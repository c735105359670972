"""Recomputation by a budget: what a step was predicted to take, what it took, and how long.

    python benchmarks/recompute.py [--layers 8] [--width 256] [--batch 16] [--steps 4]

A transformer is trained by one worker without recomputation, within budgets that lie between what
that takes and the least, and with the least. Each run has a process of its own. Measured is the
most resident memory while it trains (VmHWM), less what was resident when everything that it needs
was imported. The prediction is what the run says of itself: weights, optimizer's state, and what
forward and backward take at most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from torch.nn import functional as F

import dure
from dure.tasks.models import Transformer

SYMBOLS, CONTEXT = 64, 128

MAPPED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""What a tensor takes goes back when it goes: measured are tensors, and no holes between them."""

PARTS = (0.9, 0.75, 0.6, 0.45)
"""Budgets, as parts of the way from the least to what a step takes without recomputation."""


def task(layers: int, width: int, examples: int) -> dure.Task:
    symbols = torch.randint(0, SYMBOLS, (examples, CONTEXT + 1), generator=torch.Generator())
    data = (symbols[:, :-1].contiguous(), symbols[:, 1:].contiguous())
    model = partial(Transformer, SYMBOLS, CONTEXT, layers=layers, heads=8, width=width, tied=True)
    return dure.Task(model, F.cross_entropy, data, optimizer=partial(torch.optim.AdamW, lr=1e-3))


def measured(layers: int, width: int, batch: int, steps: int, fields: dict[str, Any]) -> Any:
    """One run, in this process: predicted and measured bytes, and seconds of a step."""
    # What is imported on the way is there before anything is measured.
    dure.train(task(1, 16, 8), dure.SingleWorker(4, recompute="blocks.*"), stop=dure.Stop(steps=1))
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    run = dure.train(
        task(layers, width, batch),
        dure.SingleWorker(batch, **fields),
        stop=dure.Stop(steps=steps),
    )
    facts = run.summary["facts"][0]
    return {
        "predicted": facts["predicted_bytes"],
        "measured": _resident("VmHWM") - before,
        "recomputed": len(facts["recomputed"]),
        "extra_flops": facts["recomputed_flops"],
        "seconds": run.summary["seconds"] / steps,
    }


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def _apart(arguments: argparse.Namespace, fields: dict[str, Any]) -> dict[str, Any]:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("layers", "width", "batch")]
    command = [sys.executable, __file__, *sizes, f"--steps={arguments.steps}"]
    out = subprocess.run(
        [*command, "--fields", json.dumps(fields)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **MAPPED},
    )
    found: dict[str, Any] = json.loads(out.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 8), ("width", 256), ("batch", 16), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    takes_result(parser)
    parser.add_argument("--fields", help="of one run, which is made in this process")
    arguments = parser.parse_args()
    sizes = (arguments.layers, arguments.width, arguments.batch, arguments.steps)
    if arguments.fields is not None:
        print(json.dumps(measured(*sizes, json.loads(arguments.fields))))
        return
    rows = {"1000GB": _apart(arguments, {"memory": "1000GB"})}
    least = _apart(arguments, {"recompute": True})
    most = rows["1000GB"]["predicted"]
    for part in PARTS:
        budget = int(least["predicted"] + part * (most - least["predicted"]))
        rows[f"{budget / 1e6:.0f}MB"] = _apart(arguments, {"memory": str(budget)})
    rows["least"] = least
    print(f"{'memory':>10} predicted measured  ratio again  flops   time", file=sys.stderr)
    for name, row in rows.items():
        ratio = row["measured"] / row["predicted"]
        slower = row["seconds"] / rows["1000GB"]["seconds"]
        print(
            f"{name:>10} {row['predicted'] / 1e6:9.1f} {row['measured'] / 1e6:8.1f} {ratio:6.3f} "
            f"{row['recomputed']:5d} {row['extra_flops']:6.1%} {slower:6.2f}",
            file=sys.stderr,
        )
    give({"threads": torch.get_num_threads(), "runs": rows}, arguments.result, indent=2)


if __name__ == "__main__":
    main()

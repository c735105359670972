"""Training on shards of ten times the memory, against examples that lie in memory, in one run.

Both train the same model, by the same batches in number and size, on pictures of 3 KiB. The one has
them on a disk (`dure.Shards`), ten times as many as a control group lets its process have of
memory, the pages of files that the system keeps for it counted in; the other has a tenth of the
limit in memory, no limit, and passes over it as often as it takes. Rates are examples a second of
training time. Repetitions are interleaved, and figures are medians. `reading` is the rate of
batches alone, without a model.

    python benchmarks/data_larger_than_memory.py --result result.json

A control group takes root, and version 1 or 2 of them with the memory controller; without one the
limit is not there, and the result says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import dure
from dure.data.batches import Batches

PICTURE = (3, 32, 32)
BYTES = 3 * 32 * 32 + 8
SHARD = 1 << 14
"""Examples in a file: 48 MiB."""

GROUPS = Path("/sys/fs/cgroup")


class Network(nn.Module):
    """Of bytes, which are scaled here."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs.float().div(255))


def mlp() -> nn.Module:
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10)))


def cnn() -> nn.Module:
    return Network(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )
    )


MODELS = {"mlp": mlp, "cnn": cnn}


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 256, (count, *PICTURE), dtype=torch.uint8, generator=drawn)
    return inputs, torch.randint(0, 10, (count,), generator=drawn)


def write(folder: Path, examples: int) -> None:
    for number, first in enumerate(range(0, examples, SHARD)):
        inputs, targets = pictures(min(SHARD, examples - first), number)
        columns = {"inputs": inputs, "targets": targets}
        save_file(columns, folder / f"{number:05d}.safetensors")
    os.sync()


@contextmanager
def limited(limit: int) -> Iterator[Path | None]:
    """A control group of so many bytes; None where none can be made."""
    old = GROUPS / "memory"
    made = (old if old.is_dir() else GROUPS) / f"dure-{os.getpid()}"
    name = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
    try:
        made.mkdir()
    except OSError:
        yield None
        return
    try:
        (made / name).write_text(str(limit))
        yield made
    except FileNotFoundError:
        yield None
    finally:
        _removed(made)


def _removed(group: Path) -> None:
    """A group whose last process has ended just now is busy for a moment."""
    until = time.monotonic() + 5
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def child(way: str, model: str, data: str, steps: int, batch: int, group: Path | None) -> None:
    """Trains, in the control group, and says what it found."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    train: Any = dure.Shards(data) if way != "memory" else pictures(int(data), 0)
    if way == "reading":
        batches = Batches(len(train), batch, 0, order=train.order())
        started = time.perf_counter()
        seen = sum(len(train.batch(batches.at(step))[1]) for step in range(steps))
        seconds = time.perf_counter() - started
    else:
        task = dure.Task(model=MODELS[model], loss=F.cross_entropy, train=train)
        run = dure.train(
            task,
            dure.SingleWorker(batch),
            stop=dure.Stop(steps=steps),
            evaluate_every=10**9,
        )
        seconds, seen = run.summary["seconds"], run.summary["samples"]
    peaks = [
        int((group / name).read_text())
        for name in ("memory.max_usage_in_bytes", "memory.peak")
        if group is not None and (group / name).is_file()
    ]
    print(json.dumps({"rate": seen / seconds, "peak": max(peaks, default=None)}))


def measured(
    way: str, model: str, data: str, steps: int, batch: int, group: Path | None
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, model, data, str(steps), str(batch)]
    command += [str(group)] if group is not None else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{way} of {model} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        way, model, data, steps, batch, *group = sys.argv[2:]
        child(way, model, data, int(steps), int(batch), Path(group[0]) if group else None)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=0.4, help="GB of memory")
    parser.add_argument("--times", type=float, default=10, help="the data over the limit")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each; by default an epoch of the shards")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--folder", type=Path, help="on a disk; by default the temporary one")
    takes_result(parser)
    asked = parser.parse_args()
    limit = int(asked.limit * 1e9)
    examples = int(asked.times * limit / BYTES)
    steps = asked.steps or -(-examples // asked.batch)
    fits = int(limit / 10 / BYTES)
    folder = Path(tempfile.mkdtemp(prefix="dure-shards-", dir=asked.folder))
    try:
        write(folder, examples)
        rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
        with limited(limit) as group:
            for repetition in range(asked.repeat):
                for model in asked.models:
                    ways = {"memory": (str(fits), None), "shards": (str(folder), group)}
                    if model == asked.models[0]:
                        ways["reading"] = (str(folder), group)
                    order = list(ways) if repetition % 2 else list(reversed(ways))
                    for way in order:
                        data, inside = ways[way]
                        found = measured(way, model, data, steps, asked.batch, inside)
                        rows.setdefault(model, {}).setdefault(way, []).append(found)
                        told = f"{model} {way}: {found['rate']:,.0f} examples a second"
                        print(told, file=sys.stderr, flush=True)
            has_limit = group is not None
    finally:
        shutil.rmtree(folder)
    rates = {
        model: {way: statistics.median(one["rate"] for one in found) for way, found in ways.items()}
        for model, ways in rows.items()
    }
    peaks = [one["peak"] for ways in rows.values() for one in ways["shards"] if one["peak"]]
    result = {
        "limit": limit if has_limit else None,
        "data_bytes": examples * BYTES,
        "examples": examples,
        "steps": steps,
        "peak": max(peaks, default=None),
        "rates": rates,
        "shards_over_memory": {
            model: found["shards"] / found["memory"] for model, found in rates.items()
        },
        "versions": {"dure": dure.__version__, "torch": torch.__version__},
    }
    give(result, asked.result, indent=1)


if __name__ == "__main__":
    main()

"""Training that does not fit into memory, from files: seconds of a step, and memory at its peak.

An MLP of equal layers is trained with Adam by a single worker, in a process of its own each time:

    plain               nothing is offloaded, no limit
    offloaded           what `--parts` says lies in files, no limit: what the way itself costs
    offloaded, limited  the same in a control group whose memory is limited
    plain, limited      what a run without offloading does there: it is killed

The weights of all that come to their end are compared, bit for bit. Beside them stands the disk:
how long it takes to write, and to read, as many bytes as a step moves, one after the other.

    python benchmarks/offload.py --limit 600MB

It needs to be root, for the control group (version 1 or 2). A table goes to standard error, the
result as JSON to standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from outcome import give, takes_result
from torch import nn
from torch.nn import functional as F

import dure
from dure.record.meter import peak_memory
from dure.settings import read_bytes

JSON = dict[str, Any]

VERSION_1 = Path("/sys/fs/cgroup/memory")
VERSION_2 = Path("/sys/fs/cgroup")


def network(width: int, layers: int) -> nn.Module:
    made: list[nn.Module] = []
    for _ in range(layers):
        made += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*made, nn.Linear(width, 10))


def task(width: int, layers: int, batch: int) -> dure.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, width, generator=generator)
    targets = torch.randint(0, 10, (batch,), generator=generator)
    return dure.Task(
        model=partial(network, width, layers),
        loss=F.cross_entropy,
        train=dure.Examples(inputs, targets),
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        name="layers",
    )


def digest(model: nn.Module) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        found.update(memoryview(tensor.detach().reshape(-1).numpy()).cast("B"))
    return found.hexdigest()


def one(asked: argparse.Namespace, offload: str) -> None:
    """A run in this process, which is in its control group already."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    run = dure.train(
        task(asked.width, asked.layers, asked.batch),
        dure.SingleWorker(batch_size=None, offload=offload),  # type: ignore[arg-type]
        stop=dure.Stop(steps=asked.steps),
    )
    steps = [one.seconds for one in run.history.steps]
    # The first step makes the state; the others are alike.
    each = [later - earlier for earlier, later in pairwise(steps)]
    told = {
        "first_step": steps[0],
        "step": statistics.median(each),
        "steps": each,
        "whole": time.perf_counter() - started,
        "peak": peak_memory(),
        "weights": digest(run.model),
    }
    print(json.dumps(told), flush=True)


class Limited:
    """A control group; 0 bytes are no limit."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        first = (VERSION_1 / "memory.limit_in_bytes").exists()
        self.file = "memory.limit_in_bytes" if first else "memory.max"
        self.peak = "memory.max_usage_in_bytes" if first else "memory.peak"
        self.folder = (VERSION_1 if first else VERSION_2) / f"dure-{os.getpid()}"

    def __enter__(self) -> Limited:
        if self.nbytes:
            self.folder.mkdir()
            (self.folder / self.file).write_text(str(self.nbytes))
        return self

    def __exit__(self, *exception: object) -> None:
        if self.nbytes:
            self.folder.rmdir()

    def enter(self) -> None:
        """In the child, before it becomes another program."""
        if self.nbytes:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def highest(self) -> int | None:
        return int((self.folder / self.peak).read_text()) if self.nbytes else None


def measured(arguments: list[str], offload: str, limit: int) -> JSON:
    """What a run tells; {"killed": True} where it did not live to its end."""
    with Limited(limit) as group:
        done = subprocess.run(
            [sys.executable, __file__, *arguments, "--one", offload],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=group.enter,
            check=False,
        )
        if done.returncode < 0:
            return {"killed": True}
        if done.returncode:
            return {"refused": True}
        told: JSON = json.loads(done.stdout.splitlines()[-1])
        return {**told, "group_peak": group.highest()}


def disk(nbytes: int, folder: str | None) -> JSON:
    """Seconds to write so many bytes to the disk, and to read them from there."""
    block = os.urandom(8 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(max(1, nbytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        # Or it would be read from memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(len(block)):
            pass
        return {
            "bytes": nbytes,
            "write": written - started,
            "read": time.perf_counter() - began,
        }


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", default="600MB", help="memory of the control group")
    parser.add_argument("--parts", default="optimizer,parameters,gradients,activations")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default=None, help="of the files, on a disk")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    takes_result(parser)
    return parser


def main() -> None:
    asked = options().parse_args()
    if asked.one is not None:
        one(asked, asked.one)
        return
    arguments = [
        *("--width", str(asked.width), "--layers", str(asked.layers)),
        *("--batch", str(asked.batch), "--steps", str(asked.steps)),
    ]
    limit = read_bytes(asked.limit)
    weights = 4 * sum(one.numel() for one in network(asked.width, asked.layers).parameters())
    rows: dict[str, JSON] = {}
    for name, parts, most in (
        ("plain", "none", 0),
        ("offloaded", asked.parts, 0),
        ("offloaded, limited", asked.parts, limit),
        ("plain, limited", "none", limit),
    ):
        rows[name] = measured(arguments, parts, most)
        print(f"{name:20} {told(rows[name])}", file=sys.stderr, flush=True)
    digests = {row["weights"] for row in rows.values() if "weights" in row}
    # Adam's state, once there and once back.
    moved = disk(2 * weights, asked.folder)
    print(
        f"{'the disk':20} {moved['bytes'] / 1e6:.0f} MB written in {moved['write']:.2f} s, read in "
        f"{moved['read']:.2f} s",
        file=sys.stderr,
    )
    found = {
        "limit": limit,
        "weights": weights,
        "needs": 4 * weights,
        "rows": rows,
        "same_bits": len(digests) == 1,
        "disk": moved,
    }
    print(f"same bits: {found['same_bits']}", file=sys.stderr)
    give(found, asked.result, indent=2)


def told(row: JSON) -> str:
    if "step" not in row:
        return "killed" if row.get("killed") else "ended with an error"
    return f"{row['step']:.2f} s a step, {row['peak'] / 1e6:.0f} MB at its peak"


if __name__ == "__main__":
    main()
